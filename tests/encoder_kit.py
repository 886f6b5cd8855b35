"""What the tests of encoders share: small two-sided models with loud weights, and a tokenizer with a mask token."""

import torch
from model_kit import VOCABULARY, make_loud
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import lengthwise as lw
from lengthwise.model import LengthwiseEncoderConfig, LengthwiseForMaskedLM

TWO_SIDED = [name for name, encoding in lw.ENCODINGS.items() if encoding.two_sided]
CAUSAL_ONLY = [name for name, encoding in lw.ENCODINGS.items() if not encoding.two_sided]
ONE_OF_EACH_KIND = ["alibi", "kerple", "fire", "cable", "rope", "learned", "t5", "ssmax"]
MASK = 2


def encoder_config(encoding: str | None, **changes: object) -> LengthwiseEncoderConfig:
    """Two layers of three heads; trained at 64 tokens, where tables end."""
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 3, "pad_token_id": 0}
    return LengthwiseEncoderConfig(**(sizes | {"encoding": encoding} | changes))


def loud_encoder(encoding: str | None, **changes: object) -> LengthwiseForMaskedLM:
    """With weights 20 times those of a new model, the same every time."""
    torch.manual_seed(0)
    model = LengthwiseForMaskedLM(encoder_config(encoding, **changes)).eval()
    make_loud(model)
    return model


def mask_tokenizer() -> PreTrainedTokenizerFast:
    words = {"[PAD]": 0, "[UNK]": 1, "[MASK]": MASK} | {f"w{n}": n for n in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
