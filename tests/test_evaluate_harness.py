"""lm-evaluation-harness measures our models unchanged, and agrees with us on the same text."""

import math

import pytest
from model_kit import loud_model

from lengthwise.data import load_tokenizer
from lengthwise.evaluate import read_corpus, score_lengths

STORY = "Zoë saw 3 ships — and a crow; the wind was 日本語.\n" * 9


@pytest.mark.parametrize("case", ["cable", "rope"])
@pytest.mark.parametrize("length", [33, 64])
def test_bits_per_byte_agree_with_the_harness(case, length):
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="the extra 'eval' is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.api.metrics import bits_per_byte

    model, tokenizer = loud_model(case, vocab_size=257), load_tokenizer("bytes")
    harness = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, max_length=length, batch_size=1, device="cpu")
    (likelihood,) = harness.loglikelihood_rolling(
        [Instance(request_type="loglikelihood_rolling", doc={}, arguments=(STORY,), idx=0)], disable_tqdm=True
    )
    theirs = bits_per_byte([(likelihood, len(STORY.encode()))])

    # The harness does not ask for the end of the text.
    text = read_corpus([STORY], tokenizer, limit=len(tokenizer(STORY)["input_ids"]) + 1)
    (ours,) = score_lengths(model, text, [length], name="m", protocol="sliding", stride=length, windows=10_000)
    assert sum(ours.bytes) == len(STORY.encode())
    assert ours.bits_per_byte == pytest.approx(theirs, rel=1e-5)
    assert math.isfinite(theirs)
