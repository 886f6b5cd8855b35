"""Terms by distance, where positions follow the slots: a strip, and products that are read along their diagonals."""

import torch
from torch import Tensor

from lengthwise.attention.call import AttentionCall
from lengthwise.attention.row_block.terms.base import LOG2E, Term, Where, part_of
from lengthwise.bias import DistanceBias, QueryDistanceBias, at_least_float32


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
        own = part_of(self.rows, where.batch, where.absolute)[:, self._own_tokens(where)]
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
