"""FIRE: functional interpolation for relative positions (Li et al. 2023, equations 4 and 19).

    bias[h, i, j] = f(psi(|i - j|) / (psi(max(L, n[i])) + 1e-6))[h]      psi(x) = log(|c| x + 1)

f is Linear(1, 32) - ReLU - Linear(32, heads); c starts at 0.1; L = |multiplier * threshold|, the multiplier from 1.
n[i] is i under causality; two-sided it is the distance from i to the further end of its document. Up to L the bias
depends on distance alone and is a table; beyond, it is a function of both positions. As f is made of straight lines
that meet where a hidden unit is 0, at most 33 of them say all of it.

Two-sided, the sides are `alike`; or `apart`: then f sees -psi for keys after the query. The paper has causal models.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lengthwise.bias import (
    Bias,
    DistanceBias,
    FunctionBias,
    Index,
    LineBias,
    at_least_float32,
    registered,
    without_autocast,
)
from lengthwise.encodings._table_cache import TableCache, is_decoding, table_reach
from lengthwise.encodings.base import (
    AttentionShape,
    Encoding,
    Sides,
    State,
    Tokens,
    are_apart,
    check_sides,
    reset_linear,
)
from lengthwise.errors import check_int, check_number
from lengthwise.token_layout import TokenLayout


class Fire(Encoding):
    """A small network of one number, the distance relative to how far there is to look back."""

    paper = "Li et al. 2023, arXiv 2310.04418"
    by_head = ("out.weight", "out.bias")
    kind = DistanceBias
    context_free = True

    def __init__(
        self, shape: AttentionShape, *, hidden: int = 32, threshold: float = 512.0, sides: Sides = "alike"
    ) -> None:
        super().__init__(shape)
        self.symmetric = not are_apart(shape, sides)
        check_int("hidden", hidden, "The paper has 32.")
        check_number("threshold", threshold, "The paper has 512.")
        self.threshold = threshold
        self.c = nn.Parameter(torch.empty(1))
        self.multiplier = nn.Parameter(torch.empty(1))
        self.into = nn.Linear(1, hidden)
        self.out = nn.Linear(hidden, shape.heads)
        self._limits, self._tables, self._lines = TableCache(), TableCache(), TableCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """c = 0.1, L = threshold, the network as the rest of GPT-2, so that the bias starts near 0."""
        nn.init.constant_(self.c, 0.1)
        nn.init.constant_(self.multiplier, 1.0)
        reset_linear(self.into)
        reset_linear(self.out)

    def bias(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> Bias:
        """A table if every query is known to be within L, else straight lines; the function where positions have gaps.

        Where positions may not be read, in a compiled graph or on a device, it is straight lines always.
        """
        check_sides(layout, causal=self.shape.causal)
        causal, reach, decoding = self.shape.causal, table_reach(layout), is_decoding(layout)
        query, key, facts = layout.query, layout.key, layout.facts
        scope = fire_scope(layout, causal=causal)
        c, multiplier, into, out = at_least_float32(self.c), at_least_float32(self.multiplier), self.into, self.out
        layers = [at_least_float32(p) for p in (into.weight, into.bias, out.weight, out.bias)]
        limit = self._limits.table(lambda _: (multiplier * self.threshold).abs(), 1, multiplier, decoding=decoding)
        network = (c, limit, *layers)
        tile = fire_tile if self.symmetric else fire_sides_tile
        if reach is None:
            return FunctionBias(tile, (query, key, scope, *network), "qkq")
        if facts is not None and query.is_cpu and query.numel():
            # Of all tokens: processes that share a sequence must describe the same.
            furthest = facts.highest if causal else int(fire_scope(layout.whole, causal=causal).max())
            if furthest <= float(limit.detach()):
                make_table = partial(fire_table, tile=tile, causal=causal, network=network)
                table, first = self._tables.table(make_table, reach, *network, decoding=decoding)
                return DistanceBias(table, query, key, first)
        make_lines = partial(fire_lines, causal=causal, signed=not self.symmetric, c=c, layers=layers)
        curve, first, *lines = self._lines.table(make_lines, reach, *network, decoding=decoding)
        return LineBias(DistanceBias(curve, query, key, first), fire_factor(scope, c, limit), *lines)


def fire_scope(layout: TokenLayout, *, causal: bool) -> Int[Tensor, "#batch query"]:
    """The furthest that each query can see."""
    return layout.query if causal else torch.maximum(layout.query, layout.document_ends()[0] - layout.query)


@registered
def fire_tile(rows: Index, columns: Index, query: Tensor, key: Tensor, furthest: Tensor, *network: Tensor) -> Tensor:
    """f(psi(distance) / (psi(max(L, n)) + 1e-6)) with heads second."""
    distance = query[:, rows, None] - key[:, None, columns]
    return _network(_psi(distance, network[0]), furthest[:, rows, None], network)


@registered
def fire_sides_tile(
    rows: Index, columns: Index, query: Tensor, key: Tensor, furthest: Tensor, *network: Tensor
) -> Tensor:
    """The same with -psi for keys after the query."""
    distance = query[:, rows, None] - key[:, None, columns]
    return _network(_psi(distance, network[0], signed=True), furthest[:, rows, None], network)


def _psi(distance: Tensor, c: Tensor, *, signed: bool = False) -> Tensor:
    psi = torch.log1p(c.abs() * distance.abs())
    return distance.sign() * psi if signed else psi


def _network(psi: Tensor, furthest: Tensor, network: Sequence[Tensor]) -> Tensor:
    """f of psi of distances (batch, row, column), with heads second."""
    c, limit, weight_in, bias_in, weight_out, bias_out = network
    relative = psi / (torch.log1p(c.abs() * torch.maximum(furthest.to(limit.dtype), limit)) + 1e-6)
    hidden = torch.addcmul(bias_in[:, None, None], weight_in[:, :, None], relative[:, None]).relu_()
    heads = weight_out @ hidden.flatten(2) + bias_out[:, None]
    return heads.unflatten(2, relative.shape[1:])


def fire_table(
    reach: int, *, tile: Callable[..., Tensor], causal: bool, network: Sequence[Tensor]
) -> tuple[Tensor, int]:
    """Up to L: one number per head and distance below `reach`, and the first distance."""
    first = 0 if causal else 1 - reach
    distances = torch.arange(first, reach, device=network[0].device)[None]
    origin = torch.zeros_like(distances)
    with without_autocast(distances):
        return tile(slice(None), slice(0, 1), distances, origin, origin, *network)[0, :, :, 0], first


def fire_factor(scope: Int[Tensor, "#batch query"], c: Tensor, limit: Tensor) -> Tensor:
    """What psi of a distance is multiplied by: 1 / (psi(max(L, n)) + 1e-6) of each query."""
    return 1 / (torch.log1p(c.abs() * torch.maximum(scope.to(limit.dtype), limit)) + 1e-6)


def fire_lines(
    reach: int, *, causal: bool, signed: bool, c: Tensor, layers: Sequence[Tensor]
) -> tuple[Tensor, int, Tensor, Tensor, Tensor]:
    """f as straight lines: psi of all distances below `reach`, the first distance, knots, slopes, intercepts."""
    weight_in, bias_in, weight_out, bias_out = layers
    first = 0 if causal else 1 - reach
    curve = _psi(torch.arange(first, reach, device=c.device), c, signed=signed)
    into = weight_in[:, 0]
    # A unit that does not look at its input has no knot: it is on or off throughout.
    knots, order = torch.where(into == 0, torch.inf, -bias_in / into).detach().sort()
    passed = torch.arange(len(knots) + 1, device=into.device)[:, None] > order.argsort()
    on = torch.where(into == 0, bias_in > 0, passed == (into > 0)).to(weight_out.dtype)
    # Not a matrix product, whose order of summing may depend on where in memory its factors lie.
    slope, intercept = ((weight_out[:, None] * (on * unit)).sum(-1) for unit in (into, bias_in))
    return curve[None], first, knots, slope, intercept + bias_out[:, None]
