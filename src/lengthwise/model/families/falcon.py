"""Falcon: ALiBi with slopes rounded to bfloat16 and divided by sqrt(head_dim), or RoPE."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from lengthwise.model.families.base import (
    AttentionRecord,
    HookedFamily,
    OnRecord,
    Selected,
    key_level_bias,
    sliced,
    split_heads,
    visible,
)
from lengthwise.model.families.interface import rotary_of


class FalconFamily(HookedFamily):
    """Falcon of all three architectures."""

    attention = FalconAttention
    projection = "dense"

    @property
    def encoding(self) -> str:
        """As its config says."""
        return "alibi" if self.model.config.alibi else "rope"

    @contextmanager
    def capture(self, on_record: OnRecord, selected: Selected) -> Iterator[None]:
        """Hook the selected layers."""
        if self.model.config.alibi:
            self.check_attention("sdpa", reason="Falcon's other implementations add the bias twice")
        with super().capture(on_record, selected):
            yield

    def read(self, module: Any, layer: int, arguments: Mapping[str, Any], merged: Tensor) -> AttentionRecord:
        """With ALiBi the numbers are those that the layer adds, rounded as it rounds them."""
        heads = module._split_heads(module.query_key_value(arguments["hidden_states"]))
        q, k, v = (x.transpose(1, 2) for x in heads)
        alibi, angles, bias = arguments["alibi"], arguments["position_embeddings"], None
        if alibi is None:
            q, k = apply_rotary_pos_emb(q, k, *angles)
        else:
            bias = key_level_bias((alibi / math.sqrt(module.head_dim))[:, :, 0], q.shape[2])
        return AttentionRecord(
            layer=layer,
            q=q,
            k=k,
            v=v,
            out=split_heads(merged, module.num_heads),
            scale=module.inv_norm_factor,
            mask=sliced(visible(arguments["attention_mask"])[:, :1]),
            causal=True,
            bias=bias,
            context_free=True,
            rotary=rotary_of(module, q, k, angles) if bias is None else None,
        )
