"""How each kind of bias enters a tile of scores, and how the gradient of the scores returns to it.

StripTerm   a DistanceBias whose positions follow the slots: views of one strip, no copy
SkewTerm    a QueryDistanceBias whose positions do: a product with a window of the profiles, read along its diagonals
LevelTerm   a LevelBias: keys behind a whole block of rows cost nothing, they ride in one channel of q and k
DenseTerm   a DenseBias: parts of the matrix
TileTerm    any other kind, by its own `tile` and torch.func.vjp

A term answers for some heads of one sequence, and in units of log 2 like the scores it is added to.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention.call import AttentionCall
from lengthwise.bias import (
    Bias,
    DenseBias,
    DistanceBias,
    LevelBias,
    QueryDistanceBias,
    at_least_float32,
    has_float64,
)

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Where:
    """One tile: a run among some heads of one sequence, some rows, some columns.

    `far` if all its keys lie behind all its rows and the channels of q and k carry the bias.
    """

    batch: int
    heads: slice
    run: slice
    rows: slice
    columns: slice
    far: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(head, row, column)."""
        return (
            self.run.stop - self.run.start,
            self.rows.stop - self.rows.start,
            self.columns.stop - self.columns.start,
        )

    @property
    def absolute(self) -> slice:
        """The heads among all heads."""
        return slice(self.heads.start + self.run.start, self.heads.start + self.run.stop)


class Term:
    """No bias at all, and what the kinds have in common."""

    flip = False
    """Rows go backwards in time within a block."""
    splits = False
    """Keys behind all rows of a block are given apart from the others, as `far`."""
    whole = False
    """A tile is made for all heads and all sequences at once."""
    channel_grad = False
    """The gradient comes out of the channels of q and k."""
    fall = 0.0
    """How far the bias can fall at most; 0 if there is no bound on it that a key could be skipped by."""

    def tile(self, where: Where) -> Tensor | None:
        """The bias of a tile, (head or 1, row, column); None for 0."""
        return None

    def diagonal(self, batch: int, heads: slice, slots: Tensor) -> Float[Tensor, "#head query"] | None:
        """The bias between every query and the key in its own slot, where it is cheap."""
        return None

    def landing(self, weights: Tensor) -> Tensor:
        """Where to write the gradient of a tile of scores: over the weights, unless the term has a better place."""
        return weights

    def collect(self, where: Where, d_bias: Tensor) -> None:
        """Take in the gradient of a tile."""

    def slopes(self, batch: int, heads: slice) -> Tensor | None:
        """What the channel of the queries carries."""
        return None

    def aim(self, batch: int, heads: slice, rows: slice, keys: slice, shift: Tensor, level: Tensor) -> bool:
        """Set the channels for the far keys of a block of rows; False if they cannot carry this bias."""
        return False

    def collect_rows(self, batch: int, heads: slice, rows: slice, channels: Tensor) -> None:
        """Take in the gradient of the queries' channels for a block of rows."""

    def collect_keys(self, batch: int, heads: slice, channel: Tensor) -> None:
        """Take in the gradient of the keys' channel."""

    def own_bias(self) -> Float[Tensor, "#batch #head #query"]:
        """The bias between every query and the key in its own slot."""
        raise NotImplementedError

    def ceiling(self, rows: slice, width: int, count: int) -> Float[Tensor, "#batch #head row block"]:
        """A bound on the bias between some rows and the first `count` blocks of `width` keys, all behind them."""
        raise NotImplementedError

    def steepness(self) -> Float[Tensor, "#batch #head #query"] | float:
        """How the gradient of a score enters that of the key's own part of the bias."""
        return 1.0

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the tensors of the bias that are learned, by name."""
        return {}


def make_term(call: AttentionCall) -> Term:
    """How the bias of a call enters its tiles."""
    dtype = at_least_float32(call.q[:0]).dtype
    match call.bias:
        case None:
            return Term()
        case DistanceBias() if (offsets := call.slot_offsets(call.bias)) is not None:
            return StripTerm(call.bias, call, offsets, dtype)
        case QueryDistanceBias() if (offsets := call.slot_offsets(call.bias)) is not None:
            return SkewTerm(call.bias, call, offsets, dtype)
        # Steps that are learned are summed under torch.func, tile by tile.
        case LevelBias(step=step) if has_float64(call.q.device) and not (step is not None and step.requires_grad):
            return LevelTerm(call.bias.summed(), call, dtype)
        case DenseBias():
            return DenseTerm(call.bias, dtype)
        case _:
            return TileTerm(call.bias, call, dtype)


class StripTerm(Term):
    """bias[i, j] = strip[last slot - slot i + j]: one strip per head, and per sequence where offsets differ.

    With rows backwards in time, row r and column c of a tile need strip[r + c]: a Hankel view of one vector, no copy.
    Its gradient is a sum along diagonals: written into a buffer whose rows are one longer, diagonals become columns.
    """

    flip = True

    def __init__(self, bias: DistanceBias, call: AttentionCall, offsets: tuple[int, ...], dtype: torch.dtype) -> None:
        self.bias, self.offsets = bias, offsets
        self.start = int(call.layout.start)
        self.last = self.start + call.queries - 1
        table = at_least_float32(bias.table.detach()).to(dtype).expand(call.heads, -1) * LOG2E
        distance = self.last - torch.arange(max(call.queries + call.keys - 1, 0), device=table.device)
        columns = [(distance + (offset - bias.first)).clamp(0, table.shape[1] - 1) for offset in offsets]
        self.strip = torch.stack([table[:, column] for column in columns])
        self.learned = bias.table.requires_grad
        self.d_strip = torch.zeros_like(self.strip) if self.learned else self.strip
        self.fall = float(bias.table.detach().amax() - bias.table.detach().amin())
        self.highest: Tensor | None = None
        self.skew = self.strip.new_zeros(0)
        self.skew_shape: tuple[int, ...] = ()

    def tile(self, where: Where) -> Tensor:
        """A view of the strip."""
        strip = self.strip[self._row(where.batch), where.absolute]
        return strip.as_strided(where.shape, (strip.stride(0), 1, 1), strip.storage_offset() + self._begin(where))

    def diagonal(self, batch: int, heads: slice, slots: Tensor) -> Tensor:
        """The entry of distance 0 in slots, or nearest to it, the same for all rows."""
        at = max(0, min(self.last, self.strip.shape[2] - 1))
        return self.strip[self._row(batch), heads, at : at + 1].clamp(min=-1e4).expand(-1, len(slots))

    def own_bias(self) -> Tensor:
        """The entry of distance 0 in slots."""
        return self.strip[:, :, self.last, None]

    def ceiling(self, rows: slice, width: int, count: int) -> Tensor:
        """The largest entry at the nearest key's distance or beyond."""
        if self.highest is None:
            self.highest = self.strip.cummax(-1).values
        slots = torch.arange(self.start + rows.start, self.start + rows.stop, device=self.strip.device)
        ends = torch.arange(1, count + 1, device=self.strip.device) * width - 1
        return self.highest[:, :, (self.last - slots[:, None] + ends).clamp(max=self.strip.shape[2] - 1)]

    def landing(self, weights: Tensor) -> Tensor:
        """Rows of a longer buffer, each one further to the right."""
        if not self.learned:
            return weights
        heads, rows, columns = weights.shape
        if self.skew_shape != (heads, rows, columns):
            size = heads * rows * (columns + rows)
            if self.skew.numel() < size:
                self.skew = self.skew.new_zeros(size)
            self.skew[:size].zero_()
            self.skew_shape = (heads, rows, columns)
        return self.skew.as_strided(weights.shape, (rows * (columns + rows), columns + rows + 1, 1))

    def collect(self, where: Where, d_bias: Tensor) -> None:
        """Sums along the diagonals of the buffer, which d_bias lies in."""
        if not self.learned:
            return
        heads, rows, columns = where.shape
        sums = self.skew[: heads * rows * (columns + rows)].view(heads, rows, columns + rows).sum(1)
        begin = self._begin(where)
        self.d_strip[self._row(where.batch), where.absolute, begin : begin + columns + rows - 1] += sums[:, :-1]

    def gradients(self) -> dict[str, Tensor]:
        """The table's gradient."""
        if not self.learned:
            return {}
        heads, length = self.strip.shape[1:]
        count = self.bias.table.shape[1]
        d_table = self.strip.new_zeros(heads, count)
        for offset, strip in zip(self.offsets, self.d_strip, strict=True):
            top = self.last + offset - self.bias.first  # the column that strip[0] is made of, before clamping
            beyond = min(max(top - count + 1, 0), length)
            inside = max(min(top + 1, length), beyond)
            d_table[:, top - inside + 1 : top - beyond + 1] += strip[:, beyond:inside].flip(1)
            d_table[:, -1] += strip[:, :beyond].sum(1)
            d_table[:, 0] += strip[:, inside:].sum(1)
        return {"table": d_table.sum_to_size(self.bias.table.shape).to(self.bias.table.dtype)}

    def _begin(self, where: Where) -> int:
        return self.last - (self.start + where.rows.stop - 1) + where.columns.start

    def _row(self, batch: int) -> int:
        return batch if len(self.offsets) > 1 else 0


class SkewTerm(Term):
    """bias[i, j] = rows[i] . profiles[:, distance of i and j], or with the rows of the keys.

    Some tokens of one side meet every distance that they have to a span of the other side in one product. In its rows
    the other side's tokens come one after the other, each row beginning one further to the left: a view with rows one
    shorter. The gradient is written through the same view, and two products take it back.
    """

    def __init__(
        self, bias: QueryDistanceBias, call: AttentionCall, offsets: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.bias, self.offsets, self.start = bias, offsets, int(call.layout.start)
        self.rows = at_least_float32(bias.rows.detach()).to(dtype)
        self.profiles = at_least_float32(bias.profiles.detach()).to(dtype)
        self.learned = [name for name in ("rows", "profiles") if getattr(bias, name).requires_grad]
        # For every head, even where heads share them; and for every sequence.
        shape = (call.batch, call.heads)
        self.d_rows, self.d_profiles = (
            self.rows.new_zeros(*shape, *x.shape[-2:]) if name in self.learned else self.rows.new_zeros(0)
            for name, x in (("rows", self.rows), ("profiles", self.profiles))
        )

    def tile(self, where: Where) -> Tensor:
        """A product, read along its diagonals."""
        own, window = self._meeting(where)
        return self._skewed(own @ (window * LOG2E), where)

    def collect(self, where: Where, d_bias: Tensor) -> None:
        """Written along the diagonals, the gradient of a product."""
        if not self.learned:
            return
        own, window = self._meeting(where)
        d_product = own.new_zeros(d_bias.shape[0], own.shape[1], window.shape[2])
        self._skewed(d_product, where).copy_(d_bias)
        batch, heads = where.batch, where.absolute
        if "rows" in self.learned:
            self.d_rows[batch, heads, self._own_tokens(where)] += d_product @ window.transpose(1, 2)
        if "profiles" in self.learned:
            index, outside = self._distances(where)
            d_window = own.transpose(1, 2) @ d_product
            if outside is not None:
                d_window.masked_fill_(outside, 0)
            self.d_profiles[batch, heads] += torch.zeros_like(self.d_profiles[batch, heads]).scatter_add_(
                2, index.expand_as(d_window), d_window
            )

    def gradients(self) -> dict[str, Tensor]:
        """Of rows and profiles, summed where they are shared."""
        totals = {"rows": self.d_rows, "profiles": self.d_profiles}
        return {
            name: totals[name].sum_to_size(getattr(self.bias, name).shape).to(getattr(self.bias, name).dtype)
            for name in self.learned
        }

    def _own_tokens(self, where: Where) -> slice:
        return where.rows if self.bias.side == "query" else where.columns

    def _meeting(self, where: Where) -> tuple[Tensor, Tensor]:
        """The vectors of a tile's tokens, (head or 1, token, profile), and the profiles at all their distances."""
        own = _at(self.rows, where.batch, where.absolute)[:, self._own_tokens(where)]
        profiles = self.profiles[where.absolute] if self.profiles.shape[0] > 1 else self.profiles
        index, outside = self._distances(where)
        window = profiles[:, :, index]
        return own, window if outside is None else window.masked_fill_(outside, 0)

    def _distances(self, where: Where) -> tuple[Tensor, Tensor | None]:
        """The columns of the profiles that a window consists of, and which of them are beyond their ends and 0.

        The first row of the product begins at the last of these that it needs, the last row at the first.
        """
        rows, columns = where.rows, where.columns
        count = rows.stop - rows.start + columns.stop - columns.start - 1
        offset = self.offsets[where.batch if len(self.offsets) > 1 else 0] + self.start - self.bias.first
        step = torch.arange(count, device=self.rows.device)
        if self.bias.side == "query":
            distance = offset + rows.stop - 1 - columns.start - step
        else:
            distance = offset + rows.start - (columns.stop - 1) + step
        index = distance.clamp(0, self.profiles.shape[2] - 1)
        return index, None if self.bias.beyond == "clamp" else distance != index

    def _skewed(self, product: Tensor, where: Where) -> Tensor:
        """(head or 1, row, column) of a product (head or 1, token, distance)."""
        heads, tokens, count = product.shape
        others = count - tokens + 1
        view = product.contiguous().as_strided((heads, tokens, others), (tokens * count, count - 1, 1), tokens - 1)
        return view if self.bias.side == "query" else view.transpose(1, 2)


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
        self.fall = self._steepest_fall() if self.straight and call.queries and call.keys else 0.0

    def _steepest_fall(self) -> float:
        """The steepest slope over the whole way; levels and slopes may be anything, NaN means none."""
        fall = float((self.slope.amax(-1) * (self.query.amax(-1) - self.key.amin(-1))).amax())
        return fall if fall > 0 else 0.0

    def slopes(self, batch: int, heads: slice) -> Tensor:
        """In units of log 2."""
        return (_at(self.slope, batch, heads) * LOG2E).expand(heads.stop - heads.start, -1)

    def tile(self, where: Where) -> Tensor | None:
        """The bias of a tile that the channels do not carry."""
        if where.far:
            return None
        slope = _at(self.slope, where.batch, where.absolute)[:, where.rows, None] * -LOG2E
        return slope * self._curve(self._difference(where))

    def diagonal(self, batch: int, heads: slice, slots: Tensor) -> Tensor:
        """0 where a level is its own key's."""
        difference = (_at(self.query, batch, heads) - _at(self.key, batch, heads)[:, slots]).to(self.dtype)
        return _at(self.slope, batch, heads) * self._curve(difference) * -LOG2E

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
        slope = _at(self.slope, where.batch, where.absolute)[:, where.rows, None]
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
        self.d_query[batch, heads, rows] -= _at(self.slope, batch, heads)[:, rows] * d_bias
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
        query = _at(self.query, where.batch, where.absolute)[:, where.rows, None]
        return (query - _at(self.key, where.batch, where.absolute)[:, None, where.columns]).to(self.dtype)

    def _curve(self, difference: Tensor) -> Tensor:
        return difference.abs() if self.straight else difference.square().log1p_()

    def _derivative(self, difference: Tensor) -> Tensor:
        return difference.sign() if self.straight else 2 * difference / (1 + difference.square())


def _level(level: Tensor | None, rest: Tensor | None) -> Tensor:
    """In float64, as one number."""
    assert level is not None
    level = level.detach().double()
    return level if rest is None else level + rest.detach()


def _at(x: Tensor, batch: int, heads: slice) -> Tensor:
    """Some heads of one sequence, or one head that stands for all."""
    x = x[batch if x.shape[0] > 1 else 0]
    return x[heads] if x.shape[0] > 1 else x


class DenseTerm(Term):
    """bias[i, j] = value[i, j]."""

    def __init__(self, bias: DenseBias, dtype: torch.dtype) -> None:
        self.value, self.dtype = bias.value, dtype
        self.d_value = torch.zeros_like(at_least_float32(bias.value)) if bias.needs_grad else None

    def tile(self, where: Where) -> Tensor:
        """A part of the matrix."""
        return at_least_float32(self._part(self.value.detach(), where)).to(self.dtype) * LOG2E

    def collect(self, where: Where, d_bias: Tensor) -> None:
        """Into the same part of one matrix."""
        if self.d_value is not None:
            part = self._part(self.d_value, where)
            part += d_bias.sum_to_size(part.shape)

    def gradients(self) -> dict[str, Tensor]:
        """The matrix's gradient."""
        return {} if self.d_value is None else {"value": self.d_value.to(self.value.dtype)}

    def _part(self, x: Tensor, where: Where) -> Tensor:
        return _at(x, where.batch, where.absolute)[:, where.rows, where.columns]


class TileTerm(Term):
    """bias[i, j] = bias.tile(rows, columns), for any kind; backward its graph lives for one tile."""

    whole = True

    def __init__(self, bias: Bias, call: AttentionCall, dtype: torch.dtype) -> None:
        self.dtype, self.batch = dtype, call.batch
        self.bias = bias.detached()
        self.learned = {name: x.detach() for name, x in bias.tensors().items() if x.requires_grad}
        self.sums = {name: torch.zeros_like(at_least_float32(x)) for name, x in self.learned.items()}
        self.place: tuple[slice, slice] | None = None
        self.value, self.pending = torch.empty(0), torch.empty(0)
        self.pull: Callable[[Tensor], tuple[dict[str, Tensor]]] | None = None
        self.collected = 0

    def tile(self, where: Where) -> Tensor:
        """Made once for all sequences."""
        if self.place != (where.rows, where.columns):
            self.place = (where.rows, where.columns)
            self.value = self._value(where.rows, where.columns)
        return self.value[where.batch if self.value.shape[0] > 1 else 0]

    def _value(self, rows: slice, columns: slice) -> Tensor:
        """A tile for all sequences; where something is learned, with the way back."""
        if not self.learned:
            return self.bias.tile(rows, columns).to(self.dtype) * LOG2E

        def of_learned(learned: dict[str, Tensor]) -> Tensor:
            return self.bias.rebuilt(learned).tile(rows, columns).to(self.dtype)

        # Operators run below autograd, which torch.func does not mind.
        with_pull = torch.func.vjp(of_learned, self.learned)
        self.pull = with_pull[1]
        return with_pull[0] * LOG2E

    def collect(self, where: Where, d_bias: Tensor) -> None:
        """Add up over the sequences that share the tile, then once through the function."""
        if self.pull is None:
            return
        if self.collected == 0:
            self.pending = torch.zeros_like(self.value)
        own = self.pending[where.batch if self.value.shape[0] > 1 else 0]
        own += d_bias.sum_to_size(own.shape)
        self.collected += 1
        if self.collected == self.batch:
            (gradients,) = self.pull(self.pending)
            for name, gradient in gradients.items():
                self.sums[name] += gradient
            self.collected, self.place, self.pull = 0, None, None

    def gradients(self) -> dict[str, Tensor]:
        """Of the tensors that are learned."""
        return {name: total.to(self.learned[name].dtype) for name, total in self.sums.items()}
