"""Tiny random models that encodings are fitted into, and their twins."""

import copy

import torch
import transformers as hf
from inspect_kit import LLAMA, MODELS, SMALL, VOCABULARY
from torch import Tensor, nn

LENGTH = 29

DECODERS = {
    name: MODELS[name] for name in ("llama", "qwen3", "mistral", "gemma2", "gpt_neox", "phi3", "gpt_oss", "gpt2", "opt")
}
DECODERS |= {
    "falcon-rope": MODELS["falcon-rope"],
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            **LLAMA | {"num_hidden_layers": 2},
            head_dim=8,
            pad_token_id=0,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**LLAMA, pad_token_id=0)),
    "yarn": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(
            **LLAMA,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        )
    ),
}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS = {
    "bert": lambda: hf.BertForMaskedLM(
        hf.BertConfig(**SMALL, **QUIET, intermediate_size=64, max_position_embeddings=64)
    ),
    "roberta": lambda: hf.RobertaForMaskedLM(
        hf.RobertaConfig(**SMALL, **QUIET, intermediate_size=64, max_position_embeddings=66)
    ),
    "modernbert": lambda: hf.ModernBertForMaskedLM(
        hf.ModernBertConfig(
            **SMALL,
            intermediate_size=64,
            max_position_embeddings=64,
            local_attention=8,
            pad_token_id=0,
            global_attn_every_n_layers=2,
        )
    ),
}


OWN_CODE = {name: MODELS[name] for name in ("bloom", "mpt", "falcon-alibi", "falcon-new")}
OWN_CODE |= {
    "mpnet": lambda: hf.MPNetForMaskedLM(
        hf.MPNetConfig(**SMALL, **QUIET, intermediate_size=64, max_position_embeddings=66)
    )
}
"""Families that do not follow transformers' attention interface."""


def make_loud(model: nn.Module, by: float = 0.2) -> None:
    """Weights large enough that a wrong position shows."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name.lower() and "ln_" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=by)


def make_model(name: str, dtype: torch.dtype = torch.float64) -> hf.PreTrainedModel:
    """A loud model, in float64 unless said otherwise, so that no law needs room for rounding."""
    torch.manual_seed(0)
    model = (DECODERS | ENCODERS | OWN_CODE)[name]().eval()
    make_loud(model)
    if name == "gpt_oss":
        # Its fast experts have no float64.
        model.set_experts_implementation("eager")
    return model.to(dtype)


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))


def padded(side: str, batch: int = 2, length: int = LENGTH, padding: int = 6) -> Tensor:
    """A mask whose second sequence has padding."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1, :padding] = 0
    return mask if side == "left" else mask.flip(1)


def assert_close(found: Tensor, expected: Tensor, of_largest: float) -> None:
    largest = expected.abs().max()
    assert (found - expected).abs().max() <= of_largest * largest, float((found - expected).abs().max() / largest)


def twin(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    return copy.deepcopy(model)
