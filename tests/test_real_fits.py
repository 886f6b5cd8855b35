"""Real checkpoints are themselves when fitted with their own encoding, or accelerated.

The folder is named in LENGTHWISE_REAL; a checkpoint that is not there is skipped by name.
"""

import os
from pathlib import Path

import pytest
import torch
import transformers as hf
from fit_kit import assert_close

import lengthwise as lw

pytestmark = pytest.mark.prove
TEXT = "Once upon a time there was a small boat. It lived in a harbour with many other boats, and every morning " * 8
CASES = {
    "stories15M": (hf.AutoModelForCausalLM, lambda model: lw.fit(model, "own")),
    "SmolLM2-135M-Instruct": (hf.AutoModelForCausalLM, lambda model: lw.fit(model, "own")),
    "gemma-3-270m": (hf.AutoModelForCausalLM, lambda model: lw.fit(model, "own")),
    "all-MiniLM-L6-v2": (hf.AutoModel, lambda model: lw.fit(model, "own")),
    "all-mpnet-base-v2": (hf.AutoModel, lw.accelerate),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_a_real_model_is_itself_and_comes_back_bit_for_bit(name):
    kind, change = CASES[name]
    folder = Path(os.environ.get("LENGTHWISE_REAL", "real")) / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not in {folder.parent}; run `make prove-real`")
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    ids = hf.AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids[:, :200]
    options = {"max_new_tokens": 12, "do_sample": False}
    own = model(ids)[0]
    text = model.generate(ids[:, :40], **options) if kind is hf.AutoModelForCausalLM else None
    change(model)
    assert_close(model(ids)[0], own, 1e-5)
    if text is not None:
        assert torch.equal(model.generate(ids[:, :40], **options), text)
    lw.unfit(model)
    assert torch.equal(model(ids)[0], own)
