"""A LevelBias in tiles: for keys behind a whole block of rows it rides in one channel of q and k and costs nothing.

    -slope[i] (query[i] - key[j]) = -slope[i] (query[i] - ref) + slope[i] (key[j] - ref),  key[j] <= ref <= query[i]

Both terms are negative, so nothing cancels, and `ref` is near both, so precision does not depend on how far the level
has climbed. Where a level stands between those of the rows, the difference is taken in the levels' own precision.
"""

import torch
from torch import Tensor

from lengthwise.attention.call import Call
from lengthwise.attention.row_block.terms import LOG2E, Term, Where
from lengthwise.bias import LevelBias, at_least_float32


class LevelTerm(Term):
    """bias[i, j] = -slope[i] * abs(query_level[i] - key_level[j])."""

    splits = True

    def __init__(self, bias: LevelBias, call: Call, dtype: torch.dtype) -> None:
        self.bias, self.dtype = bias, dtype
        self.query, self.key = bias.query_level.detach(), bias.key_level.detach()
        self.slope = at_least_float32(bias.slope.detach()).to(dtype).expand(-1, -1, call.queries)
        self.highest = self.key.cummax(-1).values
        self.channel_grad = bias.needs_grad
        shape = (call.batch, call.heads)
        queries, keys = (call.queries, call.keys) if self.channel_grad else (0, 0)
        self.d_query, self.d_slope, self.d_key = (self.slope.new_zeros(*shape, n) for n in (queries, queries, keys))
        self.reach: Tensor | None = None

    def slopes(self, batch: int, heads: slice) -> Tensor:
        """In units of log 2."""
        return (_at(self.slope, batch, heads) * LOG2E).expand(heads.stop - heads.start, -1)

    def tile(self, where: Where) -> Tensor | None:
        """The bias of a tile that the channels do not carry."""
        if where.far:
            return None
        slope = _at(self.slope, where.batch, where.absolute)[:, where.rows, None] * -LOG2E
        return slope * self._signed(where).abs()

    def diagonal(self, batch: int, heads: slice, slots: Tensor) -> Tensor:
        """0 where a level is its own key's."""
        way = (_at(self.query, batch, heads) - _at(self.key, batch, heads)[:, slots]).abs()
        return _at(self.slope, batch, heads) * way.to(self.dtype) * -LOG2E

    def aim(self, batch: int, heads: slice, rows: slice, keys: slice, shift: Tensor, level: Tensor) -> bool:
        """Set the channels to the highest level behind the rows."""
        query = _at(self.query, batch, heads)[:, rows]
        ref = _at(self.highest, batch, heads)[:, keys.stop - 1, None]
        if not (query >= ref).all():
            return False
        self.reach = (query - ref).to(self.dtype)
        shift -= _at(self.slope, batch, heads)[:, rows] * self.reach * LOG2E
        level[:, keys] = (_at(self.key, batch, heads)[:, keys] - ref).to(self.dtype)
        return True

    @property
    def fall(self) -> float:
        """The steepest slope over the whole way; levels and slopes may be anything, NaN means none."""
        if self.query.shape[2] == 0 or self.key.shape[2] == 0:
            return 0.0
        fall = float((self.slope.amax(-1) * (self.query.amax(-1) - self.key.amin(-1))).amax())
        return fall if fall > 0 else 0.0

    def own_bias(self, call: Call) -> Tensor:
        """0 where a level is its own key's."""
        own = self.key[..., int(call.start) : int(call.start) + call.queries]
        return self.slope * (self.query - own).abs().to(self.dtype) * -LOG2E

    def ceiling(self, rows: slice, width: int, count: int) -> Tensor:
        """From the highest level in a block; no bound where a slope is negative."""
        top = self.key[..., : count * width].unflatten(-1, (count, width)).amax(-1)
        way = (self.query[..., rows, None] - top[..., None, :]).to(self.dtype).clamp_(min=0)
        slope = self.slope[..., rows, None]
        return way * torch.where(slope >= 0, slope * -LOG2E, torch.inf)

    def steepness(self, call: Call) -> Tensor:
        """The slope."""
        return self.slope

    def collect(self, where: Where, d_scores: Tensor) -> None:
        """Row and column sums of a tile that the channels did not carry."""
        if not self.channel_grad or where.far:
            return
        signed = self._signed(where)
        slope = _at(self.slope, where.batch, where.absolute)[:, where.rows, None]
        b, heads, rows = where.batch, where.absolute, where.rows
        self.d_slope[b, heads, rows] -= (d_scores * signed.abs()).sum(-1)
        turned = d_scores * signed.sign() * slope
        self.d_query[b, heads, rows] -= turned.sum(-1)
        self.d_key[b, heads, where.columns] += turned.sum(-2)

    def collect_rows(self, batch: int, heads: slice, rows: slice, channels: Tensor) -> None:
        """From sum_j d_scores and sum_j d_scores (key - ref) over the far keys."""
        if self.reach is None:
            return
        d_bias, d_level = channels.unbind(-1)
        self.d_slope[batch, heads, rows] += d_level - self.reach * d_bias
        self.d_query[batch, heads, rows] -= _at(self.slope, batch, heads)[:, rows] * d_bias
        self.reach = None

    def collect_keys(self, batch: int, heads: slice, channel: Tensor) -> None:
        """From sum_i d_scores slope over the rows to which a key was far."""
        self.d_key[batch, heads] += channel / LOG2E

    def gradients(self) -> list[Tensor | None]:
        """Of levels and slopes, summed where they are shared."""
        if not self.channel_grad:
            return [None, None, None]
        found = (self.d_query, self.d_key, self.d_slope)
        return [
            d.sum_to_size(x.shape).to(x.dtype) if x.requires_grad else None
            for d, x in zip(found, self.bias.sources, strict=True)
        ]

    def _signed(self, where: Where) -> Tensor:
        query = _at(self.query, where.batch, where.absolute)[:, where.rows, None]
        return (query - _at(self.key, where.batch, where.absolute)[:, None, where.columns]).to(self.dtype)


def _at(x: Tensor, batch: int, heads: slice) -> Tensor:
    """Some heads of one sequence, or one head that stands for all."""
    x = x[batch if x.shape[0] > 1 else 0]
    return x[heads] if x.shape[0] > 1 else x
