"""RoPE's scalings switched on at evaluation time: the same weights, other angles, for our models and transformers'.

A scaling is written TYPE:FACTOR, as in "yarn:8", or is a mapping with all parameters of its rule.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from lengthwise.encodings import Encoding
from lengthwise.model import LengthwiseForCausalLM

Scaling = str | Mapping[str, object]


def parse_scaling(scaling: Scaling) -> dict[str, object]:
    """The mapping that a scaling stands for.

    >>> parse_scaling("yarn:8")
    {'type': 'yarn', 'factor': 8.0}
    """
    if not isinstance(scaling, str):
        return dict(scaling)
    kind, _, factor = scaling.partition(":")
    try:
        return {"type": kind, "factor": float(factor)}
    except ValueError:
        raise ValueError(f"a scaling must be TYPE:FACTOR, such as 'yarn:8', got {scaling!r}") from None


def uses_rope(model: PreTrainedModel) -> bool:
    """Whether positions enter by rotation, so that a scaling means something."""
    if isinstance(model, LengthwiseForCausalLM):
        return any(name == "rope" for spec in model.config.schedule for name, _ in spec.parts())
    return bool(getattr(model.config.get_text_config(), "rope_parameters", None))


def length_dependent(model: PreTrainedModel) -> bool:
    """Whether the angles change as the sequence grows."""
    if isinstance(model, LengthwiseForCausalLM):
        return any(part.length_dependent for part in model.modules() if isinstance(part, Encoding))
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    return rope.get("rope_type") in ("dynamic", "longrope")


def with_scaling(model: PreTrainedModel, scaling: Scaling) -> PreTrainedModel:
    """The same model, sharing its weights, with its angles stretched."""
    if not uses_rope(model):
        raise ValueError(f"a scaling stretches RoPE's angles, and {type(model).__name__} has none")
    rule = parse_scaling(scaling)
    config: Any = copy.deepcopy(model.config)
    if isinstance(model, LengthwiseForCausalLM):
        config.with_options("rope", scaling=rule)
    else:
        text = config.get_text_config()
        parameters = {key: value for key, value in rule.items() if key != "type"}
        length = text.max_position_embeddings
        text.rope_parameters = {
            "rope_theta": text.rope_parameters["rope_theta"],
            "rope_type": rule["type"],
            "original_max_position_embeddings": length,
            **{k: v for k, v in text.rope_parameters.items() if k == "partial_rotary_factor"},
            **parameters,
        }
    config._attn_implementation = model.config._attn_implementation
    with torch.device(model.device):
        scaled = type(model)(config)
    scaled.load_state_dict(model.state_dict(), assign=True)
    scaled.tie_weights()
    return scaled.eval()
