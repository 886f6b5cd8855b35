"""Transformer-XL's relative positions (Dai et al. 2019, section 3.3), as in XLNet and Conformer.

    scores[h, i, j] = ((q[h, i] + u[h]) . k[h, j] + (q[h, i] + v[h]) . (W wave(i - j))[h]) / sqrt(head_dim)
    wave(d)         = sin(d w[0]), sin(d w[1]), ..., cos(d w[0]), cos(d w[1]), ...     w[n] = 10000 ** (-2n / width)

The first product is content, by `rotate`, the second a bias. u, v and W are every layer's own, as in XLNet. `reach` is
the distance beyond which all are alike, none by default.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lengthwise.bias import QueryDistanceBias, at_least_float32, without_autocast
from lengthwise.encodings._table_cache import TableCache, is_decoding, table_reach
from lengthwise.encodings.base import (
    AttentionShape,
    Keys,
    Queries,
    QueryEncoding,
    State,
    Tokens,
    check_sides,
    reset_linear,
)
from lengthwise.errors import check_int
from lengthwise.token_layout import TokenLayout


class TransformerXL(QueryEncoding):
    """Waves of the distance, as keys of their own."""

    paper = "Dai et al. 2019, arXiv 1901.02860"
    by_head = ("content_query", "distance_query", "to_key.weight")
    kind = QueryDistanceBias
    tables = ("content_query", "distance_query")

    def __init__(self, shape: AttentionShape, *, reach: int | None = None) -> None:
        super().__init__(shape)
        if reach is not None:
            check_int("reach", reach, "None is for no end.")
        self.reach = reach
        self.content_query = nn.Parameter(torch.empty(shape.heads, shape.head_dim))
        self.distance_query = nn.Parameter(torch.empty(shape.heads, shape.head_dim))
        self.to_key = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self._tables = TableCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02), all of it."""
        reset_linear(self.to_key)
        for query in (self.content_query, self.distance_query):
            nn.init.normal_(query, std=0.02)

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Queries with u added, and keys as they are."""
        return (self.queries(q, layout) + self.content_query[:, None]).to(q.dtype), k

    def bias(
        self,
        x: Tokens,
        layout: TokenLayout,
        state: State | None = None,
        *,
        q: Tensor | None = None,
        k: Tensor | None = None,
    ) -> QueryDistanceBias:
        """Queries with v added, which meet the waves."""
        check_sides(layout, causal=self.shape.causal)
        rows = (self.queries(q, layout) + self.distance_query[:, None]) * self.shape.head_dim**-0.5
        count = table_reach(layout)
        if count is None:  # positions with gaps: as long as it takes
            assert layout.facts is not None
            count = layout.facts.furthest + 1
        count = count if self.reach is None else min(count, self.reach + 1)
        profiles, first = self._tables.table(self._profiles, count, self.to_key.weight, decoding=is_decoding(layout))
        return QueryDistanceBias(rows, profiles, layout.query, layout.key, first)

    def _profiles(self, count: int) -> tuple[Float[Tensor, "head dim distance"], int]:
        """W wave(d) for so many distances to each side, up to `reach`, and the first distance."""
        count = count if self.reach is None else min(count, self.reach + 1)
        first = 0 if self.shape.causal else 1 - count
        width, weight = self.shape.width, at_least_float32(self.to_key.weight)
        distance = torch.arange(first, count, device=weight.device).to(weight.dtype)
        pairs = torch.arange(0, width, 2, device=weight.device).to(weight.dtype)
        angles = distance[:, None] * 10000 ** (-pairs / width)
        waves = torch.cat([angles.sin(), angles.cos()], -1)[:, :width]
        with without_autocast(weight):
            keys = F.linear(waves, weight)
        return keys.unflatten(1, (self.shape.heads, -1)).permute(1, 2, 0).contiguous(), first
