"""GRAPE-A: additive group positions (Zhang et al. 2025, section 4): ALiBi whose slopes follow the query and the key.

    bias[h, i, j] = -|i - j| m[h] softplus(w[h]) (softplus(v[h] . q[i] / sqrt(head_dim)) + softplus(u[h] . k[j] / ...))

m are ALiBi's interleaved slopes, v and u unit vectors, softplus(w) starts at 1. With v = u = 0 it is ALiBi with slopes
1.39 times as steep. q and k are the layer's own, before any rotation. The state is the key's number, one per token and
head. The bias is a function, computed tile by tile: no table and no level can hold a slope of both sides.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lengthwise.bias import FunctionBias, Index, at_least_float32, registered
from lengthwise.bias.constants import constant
from lengthwise.encodings.alibi import interleaved_slopes
from lengthwise.encodings.base import AttentionShape, Encoding, State, Tokens, checked_state, every_head, masked_tokens
from lengthwise.encodings.grape_m import PAPER
from lengthwise.token_layout import TokenLayout


class GrapeA(Encoding):
    """Queries and keys choose how steep the bias is."""

    paper = PAPER
    by_head = ("slopes", "query_vector", "key_vector", "raw_scale")
    kind = FunctionBias
    symmetric = True
    uses_qk = ("state", "bias")
    tables = ("query_vector", "key_vector")

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.slopes = interleaved_slopes(shape.heads)
        self.query_vector = nn.Parameter(torch.empty(shape.heads, shape.head_dim))
        self.key_vector = nn.Parameter(torch.empty(shape.heads, shape.head_dim))
        self.raw_scale = nn.Parameter(torch.empty(shape.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Directions at random, softplus(w) = 1."""
        for vector in (self.query_vector, self.key_vector):
            nn.init.normal_(vector, std=self.shape.head_dim**-0.5)
        nn.init.constant_(self.raw_scale, math.log(math.expm1(1.0)))

    def state(
        self,
        x: Tokens,
        key_mask: Bool[Tensor, "#batch position"] | None = None,
        *,
        q: Tensor | None = None,
        k: Tensor | None = None,
    ) -> State:
        """softplus(u . k / sqrt(head_dim)); 0 for masked tokens."""
        key = every_head("k", k, self.shape, x.shape[1])
        return {"key": masked_tokens(self._gate(key, self.key_vector), key_mask)}

    def bias(
        self,
        x: Tokens,
        layout: TokenLayout,
        state: State | None = None,
        *,
        q: Tensor | None = None,
        k: Tensor | None = None,
    ) -> FunctionBias:
        """Distance times the sum of the slopes of query and key."""
        own = self.state(x, q=q, k=k) if state is None else state
        key = checked_state(own, "key", x.shape[0], self.shape.heads, layout.key_count)
        scale = F.softplus(at_least_float32(self.raw_scale))
        slopes = constant(tuple(self.slopes), scale.device, scale.dtype)
        factor = (slopes * scale)[:, None]
        query = self._gate(every_head("q", q, self.shape, layout.query_count), self.query_vector)
        return FunctionBias(grape_a, (layout.query, layout.key, factor * query, factor * key), "qkqk")

    def _gate(self, x: Tensor, vector: Tensor) -> Float[Tensor, "batch head position"]:
        direction = F.normalize(at_least_float32(vector), dim=-1)
        return F.softplus((x * direction[:, None]).sum(-1) * self.shape.head_dim**-0.5)


@registered
def grape_a(rows: Index, columns: Index, query: Tensor, key: Tensor, query_slope: Tensor, key_slope: Tensor) -> Tensor:
    """-|query - key| (slope of the query + slope of the key)."""
    slope = query_slope[:, :, rows, None] + key_slope[:, :, None, columns]
    return -(query[:, None, rows, None] - key[:, None, None, columns]).abs().to(slope.dtype) * slope
