"""The kinds of bias that are asked for tile by tile: a function of rows and columns, and a matrix that is given."""

from collections.abc import Callable

import torch
from torch import Tensor

from lengthwise.attention.call import Call
from lengthwise.attention.row_block.terms import LOG2E, Term, Where
from lengthwise.bias import DenseBias, FunctionBias, at_least_float32


class FunctionTerm(Term):
    """bias[i, j] = function(rows, columns, *tensors); backward its graph lives for one tile."""

    whole = True

    def __init__(self, bias: FunctionBias, call: Call, dtype: torch.dtype) -> None:
        self.bias, self.dtype, self.batch = bias, dtype, call.batch
        self.learned = [i for i, x in enumerate(bias.tensors) if x.requires_grad]
        self.tensors = [x.detach() for x in bias.tensors]
        self.sums = {i: torch.zeros_like(self.tensors[i]) for i in self.learned}
        self.asked: tuple[slice, slice] | None = None
        self.value, self.pending = torch.empty(0), torch.empty(0)
        self.pull: Callable[[Tensor], tuple[Tensor, ...]] | None = None
        self.collected = 0

    def tile(self, where: Where) -> Tensor:
        """Made once for all sequences."""
        if self.asked != (where.rows, where.columns):
            self.asked = (where.rows, where.columns)
            self.value = self._value(where.rows, where.columns)
        return self.value[where.batch if self.value.shape[0] > 1 else 0]

    def _value(self, rows: slice, columns: slice) -> Tensor:
        """A tile for all sequences; where something is learned, with the way back."""

        def of_learned(*learned: Tensor) -> Tensor:
            tensors = list(self.tensors)
            for i, x in zip(self.learned, learned, strict=True):
                tensors[i] = x
            return self.bias.function(rows, columns, *tensors).to(self.dtype)

        if not self.learned:
            return of_learned() * LOG2E
        # Operators run below autograd, which torch.func does not mind.
        found = torch.func.vjp(of_learned, *(self.tensors[i] for i in self.learned))
        self.pull = found[1]
        return found[0] * LOG2E

    def collect(self, where: Where, d_scores: Tensor) -> None:
        """Add up over the sequences that share the tile, then once through the function."""
        if self.pull is None:
            return
        if self.collected == 0:
            self.pending = torch.zeros_like(self.value)
        own = self.pending[where.batch if self.value.shape[0] > 1 else 0]
        own += d_scores.sum_to_size(own.shape)
        self.collected += 1
        if self.collected == self.batch:
            for i, gradient in zip(self.learned, self.pull(self.pending), strict=True):
                self.sums[i] += gradient
            self.collected, self.asked, self.pull = 0, None, None

    def gradients(self) -> list[Tensor | None]:
        """Of the function's tensors."""
        return [self.sums.get(i) for i in range(len(self.tensors))]


class DenseTerm(Term):
    """bias[i, j] = value[i, j]."""

    def __init__(self, bias: DenseBias, dtype: torch.dtype) -> None:
        self.bias, self.dtype = bias, dtype
        self.d_value = torch.zeros_like(at_least_float32(bias.value)) if bias.needs_grad else None

    def tile(self, where: Where) -> Tensor:
        """A part of the matrix."""
        return at_least_float32(self._part(self.bias.value.detach(), where)).to(self.dtype) * LOG2E

    def collect(self, where: Where, d_scores: Tensor) -> None:
        """Into the same part of one matrix."""
        if self.d_value is not None:
            part = self._part(self.d_value, where)
            part += d_scores.sum_to_size(part.shape)

    def gradients(self) -> list[Tensor | None]:
        """The matrix's gradient."""
        return [None if self.d_value is None else self.d_value.to(self.bias.value.dtype)]

    def _part(self, x: Tensor, where: Where) -> Tensor:
        x = x[where.batch if x.shape[0] > 1 else 0]
        return (x[where.absolute] if x.shape[0] > 1 else x)[:, where.rows, where.columns]
