"""A GPT-2 checkpoint as the start of a model with another encoding: every weight that is not positional is kept.

model = convert_gpt2("openai-community/gpt2", encoding="cable")
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, PreTrainedModel

from lengthwise.model.checkpoint_checks import refuse_pickles
from lengthwise.model.configuration import LengthwiseConfig
from lengthwise.model.modeling import LengthwiseForCausalLM

COPIED = (
    "vocab_size",
    "n_positions",
    "n_embd",
    "n_layer",
    "n_head",
    "n_inner",
    "resid_pdrop",
    "embd_pdrop",
    "layer_norm_epsilon",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
)
"""Fields that both configs have."""

OWN = ("n_kv_head", "head_dim", "qkv_bias", "out_bias", "scale", "softcap", "qk_norm", "qk_norm_place")
"""Those of a Lengthwise model alone."""

TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh")


@torch.no_grad()
def convert_gpt2(
    source: PreTrainedModel | str | Path,
    *,
    encoding: str | None = None,
    encoding_options: Mapping[str, Any] | None = None,
    share_encoding: bool = False,
    layers: str | list[Any] | None = None,
    embed: str | dict[str, Any] | None = None,
) -> LengthwiseForCausalLM:
    """A Lengthwise model with the weights of a GPT-2, or of another Lengthwise model: one loaded, a folder or a name.

    With "learned", which it has if nothing else is named, it gives the same logits; any other encoding starts as it
    says. GPT-2's attention dropout is left out, since there is none here.
    """
    if not isinstance(source, PreTrainedModel):
        refuse_pickles(source)
        source = AutoModelForCausalLM.from_pretrained(source, use_safetensors=True)
    if not isinstance(source, GPT2LMHeadModel | LengthwiseForCausalLM):
        raise TypeError(
            f"expected a GPT2LMHeadModel, a LengthwiseForCausalLM, or the folder of one, got a {type(source).__name__}"
        )
    if isinstance(source, GPT2LMHeadModel):
        _refuse_other_formulas(source.config)
    stored = source.config.to_dict() if isinstance(source, LengthwiseForCausalLM) else {}
    config = LengthwiseConfig(
        **{name: getattr(source.config, name) for name in COPIED},
        **{name: stored[name] for name in OWN if name in stored},
        encoding=encoding or ("learned" if layers is None and embed is None else None),
        encoding_options=dict(encoding_options or {}),
        share_encoding=share_encoding,
        layers=layers,
        embed=embed,
    )
    model: Any = LengthwiseForCausalLM._from_config(config, dtype=source.dtype)
    norms = {name for name in source.state_dict() if name.endswith(("q_norm.weight", "k_norm.weight"))}
    if lost := norms ^ {name for name in model.state_dict() if name.endswith(("q_norm.weight", "k_norm.weight"))}:
        raise ValueError(
            "a norm after the rotation needs an encoding that rotates in the same layers as before, got "
            f"{config.label!r}, with other norms: {min(lost)}"
        )
    weights = {name: w for name, w in source.state_dict().items() if ".encoding." not in name}
    if "transformer.wpe.weight" not in model.state_dict():
        weights.pop("transformer.wpe.weight", None)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    fresh = [name for name in missing if ".encoding." not in name and ".wpe." not in name]
    assert not fresh + unexpected, fresh + unexpected
    return model.to(source.device).train(source.training)


def _refuse_other_formulas(config: Any) -> None:
    """An error for the switches of GPT2Config that change the mathematics."""
    usual = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    strange = {name: getattr(config, name) for name, value in usual.items() if getattr(config, name) is not value}
    if config.activation_function not in TANH_GELUS:
        strange["activation_function"] = config.activation_function
    if strange:
        raise ValueError(
            f"the model must compute what GPT-2 does; its config has {strange}. There is nothing like it here."
        )
