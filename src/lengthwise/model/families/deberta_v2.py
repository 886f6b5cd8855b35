"""DeBERTa-v2 and -v3: disentangled attention (He et al. 2021), equation 4.

    scores = scale (q_c . k_c  +  q_c . k_r[distance]  +  k_c . q_r[-distance])      content, c2p, p2c

The last two, content to position and position to content, are its positional bias; both follow the tokens. Distances
share buckets beyond half of their number, on a logarithmic scale.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Encoder,
    DisentangledSelfAttention,
    make_log_bucket_position,
)

from lengthwise.bias import Bias, QueryDistanceBias, SumBias
from lengthwise.model.families.base import AttentionRecord, HookedFamily, sliced, split_heads, table_length
from lengthwise.model.families.described import Described, placed_by
from lengthwise.model.families.layer_call import Placed

Buckets = Int[Tensor, " distance"]
"""The bucket of each distance from 1 - length on."""


class DebertaV2Family(HookedFamily):
    """DeBERTa-v2, DeBERTa-v3 and their heads; encoders."""

    attention = DisentangledSelfAttention

    @property
    def encoding(self) -> str:
        """Learned positions, disentangled attention, or both."""
        config = self.model.config
        names = {"learned": config.position_biased_input, "disentangled": config.relative_attention}
        return "+".join(name for name, present in names.items() if present) or "none"

    @property
    def max_length(self) -> int | None:
        """The end of its table of absolute positions, where it has one; distances have no end."""
        return table_length(self.model)

    def read(self, module: Any, layer: int, arguments: Mapping[str, Any], merged: Tensor) -> AttentionRecord:
        """Both positional terms from the layer's own projections."""
        queries = arguments["query_states"]
        q, k, v, scale = _qkv(module, arguments["hidden_states"], queries)
        bias = None
        if module.relative_attention:
            relative = arguments["relative_pos"][0].long().to(q.device)
            # Distances from the most negative on: the first row backwards, then down the first column.
            buckets = torch.cat([relative[0].flip(0), relative[1:, 0]])
            bias = _positional_bias(module, q, k, buckets, arguments["rel_embeddings"], scale)
        return AttentionRecord(
            layer=layer,
            q=q,
            k=k,
            v=v,
            out=split_heads(merged, module.num_attention_heads),
            scale=scale,
            mask=sliced(arguments["attention_mask"].bool()),
            causal=False,
            bias=bias,
        )


class DescribedDebertaV2Attention(Described, DisentangledSelfAttention):
    """DeBERTa's attention whose two positional terms are described."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Buckets | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As it was, but for the matrices of scores."""
        q, k, v, scale = _qkv(self, hidden_states, query_states)
        bias = None
        if self.relative_attention:
            assert relative_pos is not None
            bias = _positional_bias(self, q, k, relative_pos, self.pos_dropout(rel_embeddings), scale)
        out, weights = self.attend(
            *(q, k, v, attention_mask),
            bias=lambda placed: bias,
            scale=scale,
            dropout=self.dropout.p,
            weights=output_attentions,
        )
        return out.flatten(2), weights


class DescribedDebertaV2Encoder(Described, DebertaV2Encoder):
    """DeBERTa's encoder, which makes neither a square mask nor a square of buckets."""

    def get_attention_mask(self, attention_mask: Tensor) -> Placed:
        """The tokens of the pass, in the place of a mask."""
        length = attention_mask.shape[-1]
        return placed_by(attention_mask, length, length, causal=False, device=attention_mask.device)

    def get_rel_pos(self, hidden_states: Tensor, query_states: Any = None, relative_pos: Any = None) -> Buckets | None:
        """The bucket of every distance, by the family's own function."""
        if relative_pos is not None:
            raise NotImplementedError("DeBERTa is accelerated with its own relative positions only, got others")
        if not self.relative_attention:
            return None
        length = hidden_states.shape[1]
        distance = torch.arange(1 - length, length, device=hidden_states.device)
        if self.position_buckets > 0 and self.max_relative_positions > 0:
            distance = make_log_bucket_position(distance, self.position_buckets, self.max_relative_positions)
        return distance.long()


def _qkv(module: Any, x: Tensor, queries: Tensor | None) -> tuple[Tensor, Tensor, Tensor, float]:
    """Queries, keys, values, and what their products are multiplied by."""
    heads = module.num_attention_heads
    q = split_heads(module.query_proj(x if queries is None else queries), heads)
    k, v = (split_heads(project(x), heads) for project in (module.key_proj, module.value_proj))
    terms = 1 + sum(term in module.pos_att_type for term in ("c2p", "p2c"))
    return q, k, v, 1 / math.sqrt(terms * q.shape[-1])


def _positional_bias(
    module: Any, q: Tensor, k: Tensor, buckets: Buckets, embeddings: Tensor, scale: float
) -> Bias | None:
    """Content to position and position to content, of those that the model has."""
    span, heads = module.pos_ebd_size, module.num_attention_heads
    query, key = (torch.arange(x.shape[2], device=x.device)[None] for x in (q, k))
    first = 1 - k.shape[2]
    table = embeddings[: 2 * span]
    terms: list[Bias] = []
    if "c2p" in module.pos_att_type:
        project = module.key_proj if module.share_att_key else module.pos_key_proj
        terms.append(QueryDistanceBias(q * scale, _profiles(project(table), heads, buckets, span), query, key, first))
    if "p2c" in module.pos_att_type:
        project = module.query_proj if module.share_att_key else module.pos_query_proj
        # A key's term is looked up by the distance seen from the key, with its sign changed.
        profiles = _profiles(project(table), heads, -buckets.flip(0), span)
        terms.append(QueryDistanceBias(k * scale, profiles, query, key, first, side="key"))
    return SumBias(tuple(terms)) if terms else None


def _profiles(projected: Tensor, heads: int, buckets: Buckets, span: int) -> Tensor:
    """(head, dim, distance) from (bucket, width)."""
    rows = (buckets + span).clamp(0, 2 * span - 1)
    return projected.unflatten(-1, (heads, -1)).permute(1, 2, 0)[..., rows]


DebertaV2Family.described = {
    DisentangledSelfAttention: DescribedDebertaV2Attention,
    DebertaV2Encoder: DescribedDebertaV2Encoder,
}
