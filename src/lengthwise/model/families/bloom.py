"""BLOOM: ALiBi as slope times key position, which follows the padding mask; positions have no end."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add

from lengthwise.bias import LevelBias
from lengthwise.bias.constants import constant
from lengthwise.encodings.alibi import interleaved_slopes
from lengthwise.model.families.base import AttentionRecord, HookedFamily, key_level_bias, sliced, split_heads, visible
from lengthwise.model.families.described import Described, by_level, shared
from lengthwise.model.families.layer_call import Placed


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


class DescribedBloomAttention(Described, BloomAttention):
    """BLOOM's attention whose bias is described."""

    takes_runs = True

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Any,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As it was, but for the matrices of scores."""
        out, weights = self.attend(
            *self._reshape(self.query_key_value(hidden_states)),
            attention_mask,
            bias=lambda placed: shared(placed, BloomAttention, lambda: _bias(alibi, self.num_heads, placed)),
            scale=self.inv_norm_factor,
            dropout=self.attention_dropout.p,
            weights=output_attentions,
            cache=layer_past,
            **kwargs,
        )
        return dropout_add(self.dense(out.flatten(2)), residual, self.hidden_dropout, self.training), weights


def _bias(alibi: Tensor, heads: int, placed: Placed) -> LevelBias:
    """Slope times distance in tokens; in half precision the numbers that BLOOM rounds."""
    if alibi.dtype != torch.float32:
        return by_level(alibi.view(-1, heads, alibi.shape[2]), placed)
    places = placed.layout
    key = places.key if places.key_mask is None else (places.key_mask.cumsum(1) - 1).clamp(min=0)
    query = key.index_select(1, places.query_slots())
    slope = constant(tuple(interleaved_slopes(heads)), alibi.device, torch.float32)
    return LevelBias(query[:, None].double(), key[:, None].double(), slope[None, :, None])


BloomFamily.described = {BloomAttention: DescribedBloomAttention}
