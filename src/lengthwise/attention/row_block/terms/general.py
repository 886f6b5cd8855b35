"""Terms of any bias: parts of a matrix that is there, and tiles that are computed when they are needed."""

from collections.abc import Callable

import torch
from torch import Tensor

from lengthwise.attention.call import AttentionCall
from lengthwise.attention.row_block.terms.base import LOG2E, Term, Where, part_of
from lengthwise.bias import Bias, DenseBias, at_least_float32


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
        return part_of(x, where.batch, where.absolute)[:, where.rows, where.columns]


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
