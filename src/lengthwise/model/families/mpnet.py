"""MPNet: T5's buckets, one learned table for all layers, over learned absolute positions."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention

from lengthwise.bias import DistanceBias
from lengthwise.model.families.base import (
    AttentionRecord,
    HookedFamily,
    sliced,
    split_heads,
    table_length,
    visible_keys,
)
from lengthwise.model.families.described import Described, by_distance, shared
from lengthwise.model.families.interface import distance_bias
from lengthwise.model.families.layer_call import Placed


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


class DescribedMPNetAttention(Described, MPNetSelfAttention):
    """MPNet's attention whose bias is described."""

    takes_runs = True
    is_causal = False

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        position_bias: Any = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """As it was, but for the matrices of scores."""
        heads = self.num_attention_heads
        q, k, v = (split_heads(project(hidden_states), heads) for project in (self.q, self.k, self.v))
        out, weights = self.attend(
            *(q, k, v, attention_mask),
            bias=lambda placed: shared(placed, position_bias, lambda: position_bias.bias_by_distance(placed)),
            scale=self.attention_head_size**-0.5,
            dropout=self.dropout.p,
            weights=output_attentions,
            **kwargs,
        )
        own = self.o(out.flatten(2))
        return (own, weights) if weights is not None else (own,)


class DescribedMPNetEncoder(Described, MPNetEncoder):
    """MPNet's encoder, which hands itself to its layers in the place of a filled-in bias."""

    def compute_position_bias(
        self, x: Tensor, position_ids: Any = None, num_buckets: int = 32
    ) -> "DescribedMPNetEncoder":
        """Described where the tokens of a pass are known."""
        return self

    def bias_by_distance(self, placed: Placed) -> DistanceBias:
        """From the one table; its 32 buckets up to 128 tokens are fixed, whatever the config says."""
        return by_distance(self.relative_position_bucket, self.relative_attention_bias.weight, 128, placed)


MPNetFamily.described = {MPNetSelfAttention: DescribedMPNetAttention, MPNetEncoder: DescribedMPNetEncoder}
