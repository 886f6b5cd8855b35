"""FIRE: functional interpolation for relative positions (Li et al. 2023, equations 4 and 19).

    bias[h, i, j] = f(psi(|i - j|) / (psi(max(L, n[i])) + 1e-6))[h]      psi(x) = log(|c| x + 1)

f is Linear(1, 32) - ReLU - Linear(32, heads); c starts at 0.1; L = |multiplier * threshold|, the multiplier from 1.
n[i] is i under causality; two-sided it is the distance from i to the further end of its document. Up to L the bias
depends on distance alone and is a table; beyond, it is a function of both positions. As f is made of straight lines
that meet where a hidden unit is 0, at most 33 of them say all of it.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lengthwise.bias import (
    Bias,
    DistanceBias,
    FunctionBias,
    Index,
    LineBias,
    registered_tile,
    wide,
    without_autocast,
)
from lengthwise.checks import check_number, check_whole
from lengthwise.encodings.base import Encoding, Geometry, Slot, State, Tokens, reset_linear
from lengthwise.encodings.kept import Kept
from lengthwise.encodings.positions import Positions, checked_positions, highest, reaches_beyond, run_ends


class Fire(Encoding):
    """A small network of one number, the distance relative to how far there is to look back."""

    paper = "Li et al. 2023, arXiv 2310.04418"
    kind = DistanceBias
    context_free = True

    def __init__(self, geometry: Geometry, *, hidden: int = 32, threshold: float = 512.0) -> None:
        super().__init__(geometry)
        check_whole("hidden", hidden, "The paper has 32.")
        check_number("threshold", threshold, "The paper has 512.")
        self.threshold = threshold
        self.c = nn.Parameter(torch.empty(1))
        self.multiplier = nn.Parameter(torch.empty(1))
        self.into = nn.Linear(1, hidden)
        self.out = nn.Linear(hidden, geometry.heads)
        self._limits, self._tables, self._lines = Kept(), Kept(), Kept()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """c = 0.1, L = threshold, the network as the rest of GPT-2, so that the bias starts near 0."""
        nn.init.constant_(self.c, 0.1)
        nn.init.constant_(self.multiplier, 1.0)
        reset_linear(self.into)
        reset_linear(self.out)

    def bias(
        self, x: Tokens, query: Positions, key: Positions, state: State | None = None, start: Slot | None = None
    ) -> Bias:
        """A table if every query is within L, else the function; a compiled graph cannot look and takes the latter."""
        query, key = checked_positions(query, key)
        causal, rows, reach = self.geometry.causal, query.shape[1], max(query.shape[1], key.shape[1])
        furthest = query if causal else torch.maximum(query, run_ends(query) - query)
        c, multiplier, into, out = wide(self.c), wide(self.multiplier), self.into, self.out
        layers = [wide(p) for p in (into.weight, into.bias, out.weight, out.bias)]
        limit = self._limits.table(lambda _: (multiplier * self.threshold).abs(), reach, rows, multiplier)
        function = partial(FunctionBias, fire_tile, (query, key, furthest, c, limit, *layers))
        if torch.compiler.is_compiling() or reaches_beyond(query, key, reach):
            return function()
        if highest(furthest) <= float(limit.detach()):
            make_table = partial(fire_table, causal=causal, network=(c, limit, *layers))
            table, first = self._tables.table(make_table, reach, rows, c, limit, *layers)
            return DistanceBias(table, query, key, first)
        if not causal or highest(query) >= reach:
            return function()
        make_lines = partial(fire_lines, c=c, limit=limit, layers=layers)
        curve, factors, *lines = self._lines.table(make_lines, reach, rows, c, limit, *layers)
        return function(LineBias(DistanceBias(curve, query, key), factors[query], *lines))


@registered_tile
def fire_tile(
    rows: Index,
    columns: Index,
    query: Tensor,
    key: Tensor,
    furthest: Tensor,
    c: Tensor,
    limit: Tensor,
    weight_in: Tensor,
    bias_in: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
) -> Tensor:
    """f(psi(distance) / (psi(max(L, n)) + 1e-6)) with heads second."""
    distance = (query[:, rows, None] - key[:, None, columns]).abs()
    scope = torch.maximum(furthest[:, rows, None].to(limit.dtype), limit)
    relative = torch.log1p(c.abs() * distance) / (torch.log1p(c.abs() * scope) + 1e-6)
    hidden = torch.addcmul(bias_in[:, None, None], weight_in[:, :, None], relative[:, None]).relu_()
    heads = weight_out @ hidden.flatten(2) + bias_out[:, None]
    return heads.unflatten(2, relative.shape[1:])


def fire_table(reach: int, *, causal: bool, network: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Up to L: one number per head and distance below `reach`, and the first distance."""
    first = 0 if causal else 1 - reach
    distances = torch.arange(first, reach, device=network[0].device)[None]
    origin = torch.zeros_like(distances)
    with without_autocast(distances):
        return fire_tile(slice(None), slice(0, 1), distances, origin, origin, *network)[0, :, :, 0], first


def fire_lines(
    reach: int, *, c: Tensor, limit: Tensor, layers: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """f as straight lines: psi of all distances below `reach`, factors of queries there, knots, slopes, intercepts."""
    weight_in, bias_in, weight_out, bias_out = layers
    curve = torch.log1p(c.abs() * torch.arange(reach, device=c.device))
    factors = 1 / (torch.maximum(curve, torch.log1p(c.abs() * limit)) + 1e-6)
    into = weight_in[:, 0]
    # A unit that does not look at its input has no knot: it is on or off throughout.
    knots, order = torch.where(into == 0, torch.inf, -bias_in / into).detach().sort()
    passed = torch.arange(len(knots) + 1, device=into.device)[:, None] > order.argsort()
    on = torch.where(into == 0, bias_in > 0, passed == (into > 0)).to(weight_out.dtype)
    # Not a matrix product, whose order of summing may depend on where in memory its factors lie.
    slope, intercept = ((weight_out[:, None] * (on * unit)).sum(-1) for unit in (into, bias_in))
    return curve[None], factors, knots, slope, intercept + bias_out[:, None]
