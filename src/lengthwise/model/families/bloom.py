"""BLOOM: ALiBi as slope times key position, which follows the padding mask; positions have no end."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.models.bloom.modeling_bloom import BloomAttention

from lengthwise.model.families.base import AttentionRecord, HookedFamily, key_level_bias, sliced, split_heads, visible


class BloomFamily(HookedFamily):
    """BLOOM and its heads."""

    encoding = "alibi"
    attention = BloomAttention
    projection = "dense"

    def read(self, module: Any, layer: int, arguments: Mapping[str, Any], merged: Tensor) -> AttentionRecord:
        """Queries, keys and values are split as the layer itself splits them."""
        q, k, v = module._reshape(module.query_key_value(arguments["hidden_states"]))
        batch, heads, queries, _ = q.shape
        shown = visible(arguments["attention_mask"])
        # A token that does not see itself is padding. Behind a text its position is 0, which is not ALiBi: left out.
        shown = shown & shown.diagonal(dim1=-2, dim2=-1)[..., None]
        return AttentionRecord(
            layer=layer,
            q=q,
            k=k,
            v=v,
            out=split_heads(merged, heads),
            scale=module.inv_norm_factor,
            mask=sliced(shown),
            causal=True,
            bias=key_level_bias(arguments["alibi"].view(batch, heads, -1), queries),
            context_free=True,
        )
