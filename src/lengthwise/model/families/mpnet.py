"""MPNet: T5's buckets, one learned table for all layers, over learned absolute positions."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.models.mpnet.modeling_mpnet import MPNetSelfAttention

from lengthwise.model.families.base import (
    AttentionRecord,
    HookedFamily,
    sliced,
    split_heads,
    table_length,
    visible_keys,
)
from lengthwise.model.families.interface import distance_bias


class MPNetFamily(HookedFamily):
    """MPNet and its heads; an encoder."""

    encoding = "learned+t5"
    attention = MPNetSelfAttention
    projection = "o"

    @property
    def max_length(self) -> int | None:
        """The end of its table of absolute positions, which begins after the row for padding."""
        return table_length(self.model)

    def read(self, module: Any, layer: int, arguments: Mapping[str, Any], merged: Tensor) -> AttentionRecord:
        """The bias comes filled in, the same for every sequence."""
        x, heads = arguments["hidden_states"], module.num_attention_heads
        q, k, v = (split_heads(project(x), heads) for project in (module.q, module.k, module.v))
        bias = arguments["position_bias"]
        return AttentionRecord(
            layer=layer,
            q=q,
            k=k,
            v=v,
            out=split_heads(merged, heads),
            scale=module.attention_head_size**-0.5,
            mask=sliced(visible_keys(arguments["attention_mask"], q, k, causal=False)),
            causal=False,
            bias=None if bias is None else distance_bias(bias[:1]),
            context_free=True,
        )
