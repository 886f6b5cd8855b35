"""DeBERTa-v2 and -v3: disentangled attention (He et al. 2021), equation 4.

    scores = scale (q_c . k_c  +  q_c . k_r[distance]  +  k_c . q_r[-distance])      content, c2p, p2c

The last two, content to position and position to content, are its positional bias; both follow the tokens. Distances
share buckets beyond half of their number, on a logarithmic scale.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

from lengthwise.bias import Bias, SumBias
from lengthwise.model.families._relative import key_distance_bias, query_distance_bias
from lengthwise.model.families.base import AttentionRecord, HookedFamily, sliced, split_heads, table_length


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
        x, heads = arguments["hidden_states"], module.num_attention_heads
        queries = x if arguments["query_states"] is None else arguments["query_states"]
        q = split_heads(module.query_proj(queries), heads)
        k, v = (split_heads(project(x), heads) for project in (module.key_proj, module.value_proj))
        terms = 1 + sum(term in module.pos_att_type for term in ("c2p", "p2c"))
        scale = 1 / math.sqrt(terms * q.shape[-1])
        bias = None
        if module.relative_attention:
            bias = _positional_bias(module, q, k, arguments["relative_pos"], arguments["rel_embeddings"], scale)
        return AttentionRecord(
            layer=layer,
            q=q,
            k=k,
            v=v,
            out=split_heads(merged, heads),
            scale=scale,
            mask=sliced(arguments["attention_mask"].bool()),
            causal=False,
            bias=bias,
        )


def _positional_bias(
    module: Any, q: Tensor, k: Tensor, relative: Tensor, embeddings: Tensor, scale: float
) -> Bias | None:
    """Content to position and position to content, of those that the model has."""
    span, keys, device = module.pos_ebd_size, k.shape[2], q.device
    relative = relative[0].long().to(device)
    # Distances from the most negative on: the first row backwards, then down the first column.
    bucket = torch.cat([relative[0].flip(0), relative[1:, 0]])
    places = torch.arange(q.shape[2], device=device), torch.arange(keys, device=device)
    query, key = places
    first = torch.tensor(1 - keys, device=device)
    table = embeddings[: 2 * span]
    heads = module.num_attention_heads
    terms: list[Bias] = []
    if "c2p" in module.pos_att_type:
        project = module.key_proj if module.share_att_key else module.pos_key_proj
        profiles = _profiles(project(table), heads, bucket, span) * scale
        terms.append(query_distance_bias(q, profiles, key, query, first))
    if "p2c" in module.pos_att_type:
        project = module.query_proj if module.share_att_key else module.pos_query_proj
        # A key's term is looked up by the distance seen from the key, with its sign changed.
        profiles = _profiles(project(table), heads, -bucket.flip(0), span) * scale
        terms.append(key_distance_bias(k, profiles, key, query, first))
    return SumBias(tuple(terms)) if terms else None


def _profiles(projected: Tensor, heads: int, bucket: Tensor, span: int) -> Tensor:
    """(head, dim, distance) from (bucket, width)."""
    rows = (bucket + span).clamp(0, 2 * span - 1)
    return projected.unflatten(-1, (heads, -1)).permute(1, 2, 0)[..., rows]
