"""Keys that provably cannot matter: the first key that every block of rows has to visit, per head.

For a row i and a block of keys B behind it, in units of log 2, with m the row's logit scale or 1:

    weight of a key in B <= 2^(upper - lower),   upper = m (|q_i| max|k_B| scale + largest bias in B)

Forward, `lower` is the row's score on its own key, which bounds its log-sum-exp from below; then the row's own weight
is the same for both sides and falls out: the blocks up to B may go if the sum of count_B 2^(upper - own) is below
SMALL, and so is the same sum weighted with max|v_B| / |v_i|. That is an error below SMALL of sum_j weight_j |v_j|,
the magnitude at which the row's output is rounded anyway. A sink only adds to what the row keeps.

Backward the log-sum-exp is known. A score's gradient is at most its weight times |d_out_i| |v_j| + |delta_i|, where
delta = d_lse - d_out . out; what a row loses is compared with what its own key contributes to d_q, and what a block of
keys loses to all rows behind it with what its own rows contribute to d_k and d_v. The gradient of a table is compared
as a whole: far entries may become 0.

All comparisons are written so that NaN and infinity mean keep, and no bound looks at a key that comes after the row.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention.call import AttentionCall
from lengthwise.attention.row_block.terms import LOG2E, Term
from lengthwise.bias import at_least_float32

SMALL = 0.25
"""In units of the precision's eps: half a unit in the last place of a number just below 1, 2^-25 in float32."""

WIDTH = 64
"""How many keys are bounded together, at least."""

BOUNDS = 2**20
"""How many bounds are alive at once."""


def first_keys(
    call: AttentionCall,
    term: Term,
    rows: int,
    d_out: Tensor | None = None,
    delta: Tensor | None = None,
    lse: Tensor | None = None,
) -> list[list[list[int]]] | None:
    """The first key to visit, by sequence, head and block of rows; None if none can be left out."""
    # Caps have no bounds here.
    if not call.skip or call.softcap is not None or not call.sees_own_keys:
        return None
    start = int(call.layout.start)
    eps = torch.finfo(at_least_float32(call.q[:0]).dtype).eps
    small = SMALL * eps
    steepest = 1.0 if call.logit_scale is None else float(call.logit_scale.detach().amax())
    if not term.fall * steepest * LOG2E >= -math.log2(eps / 2):
        # So little hardly ever makes a weight small enough: the bounds would cost more than they save.
        return None
    width = WIDTH * max(1, call.keys // (64 * WIDTH))
    count = min(call.keys, start + call.queries - 1) // width
    if count == 0:
        return None
    sides = _Sides(call, term, width, count)
    blocks = -(-call.queries // rows)
    step = max(1, BOUNDS // (call.batch * call.heads * rows * count)) * rows
    parts = [slice(row, min(row + step, call.queries)) for row in range(0, call.queries, step)]
    if d_out is None or delta is None or lse is None:
        good = torch.cat([sides.losses(part, rows) for part in parts], 2) <= small
    else:
        backward = _Backward(sides, d_out, delta, lse)
        losses = [backward.losses(part, rows) for part in parts]
        good = torch.cat([row for row, _ in losses], 2) <= small
        # A block of keys loses to this block of rows and to all behind it.
        lost = torch.cat([key for _, key in losses], 3).flip(3).cumsum(3).flip(3)
        good = good & (lost <= small * backward.kept[:, :, :, None]).all(0)
    behind = torch.arange(1, count + 1, device=good.device) * width
    begin = start + rows * torch.arange(blocks, device=good.device)
    good = good & (behind <= begin[:, None])
    kept: list[list[list[int]]] = (good.long().cumprod(-1).sum(-1) * width).tolist()
    return kept


class _Sides:
    """What is known of the rows and of the blocks of keys, O(length) numbers."""

    def __init__(self, call: AttentionCall, term: Term, width: int, count: int) -> None:
        self.call, self.term, self.width, self.count = call, term, width, count
        self.start = int(call.layout.start)
        rows = slice(self.start, self.start + call.queries)
        q, k, v = (at_least_float32(x) for x in (call.q, call.k, call.v))
        own_k = k[:, :, rows]
        if call.group > 1:
            own_k = own_k.repeat_interleave(call.group, 1)
        lengths = [x.norm(dim=-1).repeat_interleave(call.group, 1) for x in (k, v)]
        self.q = q.norm(dim=-1) * (abs(call.scale) * LOG2E)
        self.own_k, self.own_v = (x[:, :, rows] for x in lengths)
        self.own = (q * own_k).sum(-1) * (call.scale * LOG2E) + term.own_bias()
        self.factor: Tensor | None = None
        if call.logit_scale is not None:
            factor = at_least_float32(call.logit_scale.detach()).to(q.dtype)
            self.own = self.own * factor
            # A bound that is not positive is none: it becomes NaN, which means keep.
            self.factor = factor.where(factor > 0, torch.nan)[..., None]
        if call.layout.key_mask is None:
            self.keys = q.new_full((1, 1, 1, count), width)
        else:
            seen = call.layout.key_mask[:, None]
            self.keys = self.blocks(seen.to(q.dtype)).sum(-1)[:, :, None]
            self.own = self.own.masked_fill(~seen[:, :, rows], -torch.inf)
            lengths = [x * seen for x in lengths]
        self.k, self.v = (self.blocks(x).amax(-1)[:, :, None] for x in lengths)

    def blocks(self, x: Tensor) -> Tensor:
        """Keys in blocks."""
        return x[..., : self.count * self.width].unflatten(-1, (self.count, self.width))

    def upper(self, part: slice) -> tuple[Float[Tensor, "batch head row block"], Tensor]:
        """The largest score that a row can have in a block of keys; and by what its size is bounded, but for 1."""
        bias, content = self.term.ceiling(part, self.width, self.count), self.q[:, :, part, None] * self.k
        if self.factor is None:
            return bias + content, -bias.clamp(max=0)
        return (bias + content) * self.factor[:, :, part], content - bias.clamp(max=0)

    def losses(self, part: slice, rows: int) -> Tensor:
        """What rows would lose with the blocks up to each, relative to what they keep, by block of rows."""
        lost = self.upper(part)[0].sub_(self.own[:, :, part, None]).exp2_().mul_(self.keys)
        lost.mul_((self.v / self.own_v[:, :, part, None]).clamp_(min=1))
        return _largest(lost.cumsum(-1), rows)


class _Backward:
    """The same with what the backward pass knows."""

    def __init__(self, sides: _Sides, d_out: Tensor, delta: Tensor, lse: Tensor) -> None:
        self.sides, self.lse = sides, lse
        self.above, self.delta = at_least_float32(d_out).norm(dim=-1), delta.abs()
        weight = torch.exp2(sides.own - lse)
        self.row = weight * (self.above * sides.own_v + self.delta)
        # To d_v, d_k and the level: what the row of every key of a block contributes, 0 where there is no such row.
        steepness = torch.ones_like(sides.q) * sides.term.steepness()
        self.factors = [torch.ones_like(sides.q), sides.q, steepness]
        if sides.factor is not None:
            self.factors[1:] = [x * sides.factor[..., 0].abs() for x in self.factors[1:]]
        own = [weight * self.above, *(self.row * factor for factor in self.factors[1:])]
        self.kept = torch.stack([self._by_key(x) for x in own])

    def _by_key(self, x: Tensor) -> Tensor:
        call, start = self.sides.call, self.sides.start
        of_keys = torch.zeros(*x.shape[:2], call.keys, dtype=x.dtype, device=x.device)
        of_keys[:, :, start : start + call.queries] = x
        return self.sides.blocks(of_keys).amax(-1)

    def losses(self, part: slice, rows: int) -> tuple[Tensor, Tensor]:
        """The same for the backward pass, and what every block of keys would lose, by block of rows."""
        sides = self.sides
        lse, above, delta, row = (x[:, :, part, None] for x in (self.lse, self.above, self.delta, self.row))
        upper, size = sides.upper(part)
        share = upper.sub_(lse).exp2_()
        lost = share * (above * sides.v + delta)
        # The gradient of a slope or a logit scale is larger the larger a score is.
        of_row = lost * sides.keys * (sides.k / sides.own_k[:, :, part, None]).clamp(min=1) * (1 + size)
        # Rows that nothing is wanted of lose nothing.
        idle = _largest(above, rows) + _largest(delta, rows) == 0
        of_row = _largest(of_row.cumsum(-1) / row, rows).masked_fill(idle, 0)
        of_keys = [share * above, *(lost * factor[:, :, part, None] for factor in self.factors[1:])]
        return of_row, torch.stack([_total(x, rows) for x in of_keys])


def _largest(x: Tensor, rows: int) -> Tensor:
    """The largest in every block of rows, along the second axis from the end."""
    return torch.stack([block.amax(-2) for block in x.split(rows, -2)], -2)


def _total(x: Tensor, rows: int) -> Tensor:
    return torch.stack([block.sum(-2) for block in x.split(rows, -2)], -2)


def share_skipped(call: AttentionCall, firsts: list[list[list[int]]] | None, rows: int) -> float:
    """How much of the work that causality leaves is left out, 0 to 1."""
    if firsts is None:
        return 0.0
    start = int(call.layout.start)
    high = [min(call.keys, start + min(row + rows, call.queries)) for row in range(0, call.queries, rows)]
    skipped = sum(first for heads in firsts for blocks in heads for first in blocks)
    return skipped / max(1, sum(high) * call.batch * call.heads)
