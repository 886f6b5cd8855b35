"""The term of a LevelBias: keys behind a whole block of rows ride in one channel of q and k."""

import torch
from torch import Tensor

from lengthwise.attention.call import AttentionCall
from lengthwise.attention.row_block.terms.base import LOG2E, Term, Where, part_of
from lengthwise.bias import LevelBias, at_least_float32


class LevelTerm(Term):
    """bias[i, j] = -slope[i] * curve(abs(query_level[i] - key_level[j])).

    For keys behind a whole block of rows a straight curve rides in one channel of q and k:

        -slope[i] (query[i] - key[j]) = -slope[i] (query[i] - ref) + slope[i] (key[j] - ref),  key[j] <= ref <= query[i]

    Both terms are negative, so nothing cancels, and `ref` is near both, so precision does not depend on how far the
    level has climbed. Where a level stands between those of the rows, the difference is taken in float64. Equal levels
    have a kink between them, at which the channels give a level the gradient of one side and a filled-in tile 0.
    """

    def __init__(self, bias: LevelBias, call: AttentionCall, dtype: torch.dtype) -> None:
        self.bias, self.dtype = bias, dtype
        self.start, self.queries = int(call.layout.start), call.queries
        self.query, self.key = _level(bias.query_level, bias.query_rest), _level(bias.key_level, bias.key_rest)
        self.slope = at_least_float32(bias.slope.detach()).to(dtype).expand(-1, -1, call.queries)
        self.straight = self.splits = bias.curve == "linear"
        self.highest = self.key.cummax(-1).values if self.splits and call.keys else self.key
        self.channel_grad = bias.needs_grad
        shape = (call.batch, call.heads)
        queries, keys = (call.queries, call.keys) if self.channel_grad else (0, 0)
        self.d_query, self.d_slope, self.d_key = (self.slope.new_zeros(*shape, n) for n in (queries, queries, keys))
        self.reach: Tensor | None = None
        self.fall = self._steepest_fall() if self.straight and call.batch and call.queries and call.keys else 0.0

    def _steepest_fall(self) -> float:
        """The steepest slope over the whole way; levels and slopes may be anything, NaN means none."""
        fall = float((self.slope.amax(-1) * (self.query.amax(-1) - self.key.amin(-1))).amax())
        return fall if fall > 0 else 0.0

    def slopes(self, batch: int, heads: slice) -> Tensor:
        """In units of log 2."""
        return (part_of(self.slope, batch, heads) * LOG2E).expand(heads.stop - heads.start, -1)

    def tile(self, where: Where) -> Tensor | None:
        """The bias of a tile that the channels do not carry."""
        if where.far:
            return None
        slope = part_of(self.slope, where.batch, where.absolute)[:, where.rows, None] * -LOG2E
        return slope * self._curve(self._difference(where))

    def diagonal(self, batch: int, heads: slice, slots: Tensor) -> Tensor:
        """0 where a level is its own key's."""
        difference = (part_of(self.query, batch, heads) - part_of(self.key, batch, heads)[:, slots]).to(self.dtype)
        return part_of(self.slope, batch, heads) * self._curve(difference) * -LOG2E

    def aim(self, batch: int, heads: slice, rows: slice, keys: slice, shift: Tensor, level: Tensor) -> bool:
        """Set the channels to the highest level behind the rows."""
        query = part_of(self.query, batch, heads)[:, rows]
        ref = part_of(self.highest, batch, heads)[:, keys.stop - 1, None]
        if not (query >= ref).all():
            return False
        self.reach = (query - ref).to(self.dtype)
        shift -= part_of(self.slope, batch, heads)[:, rows] * self.reach * LOG2E
        level[:, keys] = (part_of(self.key, batch, heads)[:, keys] - ref).to(self.dtype)
        return True

    def own_bias(self) -> Tensor:
        """0 where a level is its own key's."""
        own = self.key[..., self.start : self.start + self.queries]
        return self.slope * (self.query - own).abs().to(self.dtype) * -LOG2E

    def ceiling(self, rows: slice, width: int, count: int) -> Tensor:
        """From the highest level in a block; no bound where a slope is negative."""
        top = self.key[..., : count * width].unflatten(-1, (count, width)).amax(-1)
        way = (self.query[..., rows, None] - top[..., None, :]).to(self.dtype).clamp_(min=0)
        slope = self.slope[..., rows, None]
        return way * torch.where(slope >= 0, slope * -LOG2E, torch.inf)

    def steepness(self) -> Tensor:
        """The slope."""
        return self.slope

    def collect(self, where: Where, d_bias: Tensor) -> None:
        """Row and column sums of a tile that the channels did not carry."""
        if not self.channel_grad or where.far:
            return
        difference = self._difference(where)
        slope = part_of(self.slope, where.batch, where.absolute)[:, where.rows, None]
        b, heads, rows = where.batch, where.absolute, where.rows
        self.d_slope[b, heads, rows] -= (d_bias * self._curve(difference)).sum(-1)
        d_difference = d_bias * self._derivative(difference) * slope
        self.d_query[b, heads, rows] -= d_difference.sum(-1)
        self.d_key[b, heads, where.columns] += d_difference.sum(-2)

    def collect_rows(self, batch: int, heads: slice, rows: slice, channels: Tensor) -> None:
        """From sum_j d_scores and sum_j d_scores (key - ref) over the far keys."""
        if self.reach is None:
            return
        d_bias, d_level = channels.unbind(-1)
        self.d_slope[batch, heads, rows] += d_level - self.reach * d_bias
        self.d_query[batch, heads, rows] -= part_of(self.slope, batch, heads)[:, rows] * d_bias
        self.reach = None

    def collect_keys(self, batch: int, heads: slice, channel: Tensor) -> None:
        """From sum_i d_scores slope over the rows to which a key was far."""
        self.d_key[batch, heads] += channel / LOG2E

    def gradients(self) -> dict[str, Tensor]:
        """Of levels, their rests and slopes, summed where they are shared."""
        sums = {"query": self.d_query, "key": self.d_key, "slope": self.d_slope}
        learned = {name: x for name, x in self.bias.tensors().items() if x.requires_grad}
        # A level and its rest have the same gradient, each in memory of its own.
        return {
            name: sums[name.partition("_")[0]].sum_to_size(x.shape).to(x.dtype, copy=True)
            for name, x in learned.items()
        }

    def _difference(self, where: Where) -> Tensor:
        query = part_of(self.query, where.batch, where.absolute)[:, where.rows, None]
        return (query - part_of(self.key, where.batch, where.absolute)[:, None, where.columns]).to(self.dtype)

    def _curve(self, difference: Tensor) -> Tensor:
        return difference.abs() if self.straight else difference.square().log1p_()

    def _derivative(self, difference: Tensor) -> Tensor:
        return difference.sign() if self.straight else 2 * difference / (1 + difference.square())


def _level(level: Tensor | None, rest: Tensor | None) -> Tensor:
    """In float64, as one number."""
    assert level is not None
    level = level.detach().double()
    return level if rest is None else level + rest.detach()
