"""The shapes in signatures are true: jaxtyping and beartype check them at every call, in a process of their own.

Not in the whole suite: what is checked cannot be compiled by torch.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from jaxtyping import install_import_hook

CHECKED = ["bias", "rescore", "token_layout", "encodings", "attention.call", "attention.reference",
           "attention.backend", "visibility", "attention.decode", "model"]
with install_import_hook([f"lengthwise.{name}" for name in CHECKED], "beartype.beartype"):
    import lengthwise.bias, lengthwise.rescore, lengthwise.token_layout, lengthwise.encodings, lengthwise.attention
    import lengthwise.model

import torch
import lengthwise as lw
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.testing import LAWS, DoesNotApply, Subject

torch.manual_seed(0)
try:
    lw.merge((torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 4)), (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)))
    lengthwise.attention.reference.softmax(torch.zeros(2, 3), torch.zeros(2, 3))
except Exception as error:
    print("checked:", type(error).__name__)

for name in sys.argv[1:]:
    for law in LAWS:
        try:
            law(Subject(name, backend="reference"))
        except DoesNotApply:
            pass
    config = LengthwiseConfig(encoding=name, vocab_size=64, n_layer=2, n_head=4, n_embd=32, n_positions=32)
    model, tokens = LengthwiseForCausalLM(config), torch.randint(64, (2, 20))
    model.loss(tokens, tokens).backward()
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    for kind in ("dynamic", "static"):
        model.generate(tokens, attention_mask=mask, max_new_tokens=4, cache_implementation=kind, pad_token_id=0)
    for implementation in ("eager", "sdpa") if not config.stock_attention else ("eager",):
        model.set_attn_implementation(implementation)
        model(tokens, attention_mask=mask)
print("done")
"""


LATER = [
    "fire dape",
    "dapev2 t5",
    "inkling deberta",
    "learned cope",
    "bam xpos pope",
    "grape-m-ctx carope selective-rope",
    "grape-a stick-breaking path",
    "ssmax sink",
]


@pytest.mark.parametrize("names", ["cable rope", *(pytest.param(names, marks=pytest.mark.prove) for names in LATER)])
def test_the_shapes_in_signatures_are_true(names):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *names.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["checked: TypeCheckError", "done"]
