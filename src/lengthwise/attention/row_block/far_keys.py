"""Far keys that provably cannot matter: the first key that every block of rows has to visit, per head.

For a row i and a block of keys B behind it, in units of log 2:

    weight of a key in B <= 2^(upper - lower),   upper = |q_i| max|k_B| scale + largest bias in B

Forward, `lower` is the row's score on its own key, which bounds its log-sum-exp from below; then the row's own weight
is the same for both sides and falls out: the blocks up to B may go if the sum of count_B 2^(upper - own) is below
SMALL, and so is the same sum weighted with max|v_B| / |v_i|. That is an error below SMALL of sum_j weight_j |v_j|,
the magnitude at which the row's output is rounded anyway.

Backward the log-sum-exp is known. A weight's gradient is at most |d_out_i| |v_j| + |d_out_i . out_i|; what a row loses
is compared with what its own key contributes to d_q, and what a block of keys loses to all rows behind it with what its
own rows contribute to d_k and d_v. The gradient of a table is compared as a whole: far entries may become 0.

All comparisons are written so that NaN and infinity mean keep, and no bound looks at a key that comes after the row.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention.call import Call
from lengthwise.attention.row_block.terms import LOG2E, Term
from lengthwise.attention.row_block.visible import Visible
from lengthwise.bias import at_least_float32

SMALL = 0.25
"""In units of the precision's eps: half a unit in the last place of a number just below 1, 2^-25 in float32."""

WIDTH = 64
"""How many keys are bounded together, at least."""

BOUNDS = 2**20
"""How many bounds are alive at once."""


def first_keys(
    visible: Visible,
    term: Term,
    rows: int,
    d_out: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> list[list[list[int]]] | None:
    """The first key to visit, by sequence, head and block of rows; None if none can be left out."""
    call = visible.call
    outside = visible.start < 0 or visible.start + call.queries > call.keys
    if not call.causal or call.queries == 0 or outside:
        return None
    eps = torch.finfo(at_least_float32(call.q).dtype).eps
    small = SMALL * eps
    if term.fall * LOG2E < -math.log2(eps / 2):
        # So little hardly ever makes a weight small enough: the bounds would cost more than they save.
        return None
    width = WIDTH * max(1, call.keys // (64 * WIDTH))
    count = min(call.keys, visible.start + call.queries - 1) // width
    if count == 0:
        return None
    sides = _Sides(visible, term, width, count)
    blocks = -(-call.queries // rows)
    step = max(1, BOUNDS // (call.batch * call.heads * rows * count)) * rows
    parts = [slice(row, min(row + step, call.queries)) for row in range(0, call.queries, step)]
    if d_out is None or out is None or lse is None:
        good = torch.cat([sides.losses(part, rows) for part in parts], 2) <= small
    else:
        way = _Backward(sides, d_out, out, lse)
        found = [way.losses(part, rows) for part in parts]
        good = torch.cat([row for row, _ in found], 2) <= small
        # A block of keys loses to this block of rows and to all behind it.
        lost = torch.cat([key for _, key in found], 3).flip(3).cumsum(3).flip(3)
        good = good & (lost <= small * way.kept[:, :, :, None]).all(0)
    behind = torch.arange(1, count + 1, device=good.device) * width
    begin = visible.start + rows * torch.arange(blocks, device=good.device)
    good = good & (behind <= begin[:, None])
    kept: list[list[list[int]]] = (good.long().cumprod(-1).sum(-1) * width).tolist()
    return kept


class _Sides:
    """What is known of the rows and of the blocks of keys, O(length) numbers."""

    def __init__(self, visible: Visible, term: Term, width: int, count: int) -> None:
        call = visible.call
        self.visible, self.term, self.width, self.count = visible, term, width, count
        rows = slice(visible.start, visible.start + call.queries)
        q, k, v = (at_least_float32(x) for x in (call.q, call.k, call.v))
        own_k = k[:, :, rows]
        if call.group > 1:
            own_k = own_k.repeat_interleave(call.group, 1)
        lengths = [x.norm(dim=-1).repeat_interleave(call.group, 1) for x in (k, v)]
        self.q = q.norm(dim=-1) * (abs(call.scale) * LOG2E)
        self.own_k, self.own_v = (x[:, :, rows] for x in lengths)
        self.own = (q * own_k).sum(-1) * (call.scale * LOG2E) + term.own_bias(call)
        if call.key_mask is None:
            self.keys = q.new_full((1, 1, 1, count), width)
        else:
            seen = call.key_mask[:, None]
            self.keys = self._blocks(seen.to(q.dtype)).sum(-1)[:, :, None]
            self.own = self.own.masked_fill(~seen[:, :, rows], -torch.inf)
            lengths = [x * seen for x in lengths]
        self.k, self.v = (self._blocks(x).amax(-1)[:, :, None] for x in lengths)

    def _blocks(self, x: Tensor) -> Tensor:
        return x[..., : self.count * self.width].unflatten(-1, (self.count, self.width))

    def upper(self, part: slice) -> Float[Tensor, "batch head row block"]:
        """The largest score that a row can have in a block of keys."""
        return torch.addcmul(self.term.ceiling(part, self.width, self.count), self.q[:, :, part, None], self.k)

    def losses(self, part: slice, rows: int) -> Tensor:
        """What rows would lose with the blocks up to each, relative to what they keep, by block of rows."""
        lost = self.upper(part).sub_(self.own[:, :, part, None]).exp2_().mul_(self.keys)
        lost.mul_((self.v / self.own_v[:, :, part, None]).clamp_(min=1))
        return _largest(lost.cumsum(-1), rows)


class _Backward:
    """The same with what the backward pass knows."""

    def __init__(self, sides: _Sides, d_out: Tensor, out: Tensor, lse: Tensor) -> None:
        self.sides, self.lse = sides, lse
        up = at_least_float32(d_out)
        self.up, self.drop = up.norm(dim=-1), (up * at_least_float32(out)).sum(-1).abs()
        weight = torch.exp2(sides.own - lse)
        self.row = weight * (self.up * sides.own_v + self.drop)
        # To d_v, d_k and the level: what the row of every key of a block contributes, 0 where there is no such row.
        self.factors = [torch.ones_like(sides.q), sides.q, sides.term.steepness(sides.visible.call).expand_as(sides.q)]
        own = [weight * self.up, *(self.row * factor for factor in self.factors[1:])]
        self.kept = torch.stack([self._by_key(x) for x in own])

    def _by_key(self, x: Tensor) -> Tensor:
        call, start = self.sides.visible.call, self.sides.visible.start
        of_keys = torch.zeros(*x.shape[:2], call.keys, dtype=x.dtype, device=x.device)
        of_keys[:, :, start : start + call.queries] = x
        return self.sides._blocks(of_keys).amax(-1)

    def losses(self, part: slice, rows: int) -> tuple[Tensor, Tensor]:
        """The same for the backward pass, and what every block of keys would lose, by block of rows."""
        sides = self.sides
        q, lse, up, drop, row = (x[:, :, part, None] for x in (sides.q, self.lse, self.up, self.drop, self.row))
        bias = sides.term.ceiling(part, sides.width, sides.count)
        share = torch.addcmul(bias, q, sides.k).sub_(lse).exp2_()
        lost = share * (up * sides.v + drop)
        # The slope's gradient is larger the further away a key is: by the bias itself, relative to the slope.
        of_row = lost * sides.keys * (sides.k / sides.own_k[:, :, part, None]).clamp(min=1) * (1 - bias.clamp(max=0))
        of_row = _largest(of_row.cumsum(-1) / row, rows).masked_fill(_largest(up, rows) == 0, 0)
        of_keys = [share * up, *(lost * factor[:, :, part, None] for factor in self.factors[1:])]
        return of_row, torch.stack([_total(x, rows) for x in of_keys])


def _largest(x: Tensor, rows: int) -> Tensor:
    """The largest in every block of rows, along the second axis from the end."""
    return torch.stack([block.amax(-2) for block in x.split(rows, -2)], -2)


def _total(x: Tensor, rows: int) -> Tensor:
    return torch.stack([block.sum(-2) for block in x.split(rows, -2)], -2)


def share_skipped(call: Call, firsts: list[list[list[int]]] | None, rows: int) -> float:
    """How much of the work that causality leaves is left out, 0 to 1."""
    if firsts is None:
        return 0.0
    start = int(call.start)
    high = [min(call.keys, start + min(row + rows, call.queries)) for row in range(0, call.queries, rows)]
    skipped = sum(first for heads in firsts for blocks in heads for first in blocks)
    return skipped / max(1, sum(high) * call.batch * call.heads)
