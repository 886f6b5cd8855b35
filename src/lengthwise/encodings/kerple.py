"""KERPLE: kernelised relative biases (Chi et al. 2022, equations 4 and 5).

    kerple         bias[h, i, j] = -p[h] log(1 + a[h] |i - j|)     our p, a are the paper's r1, r2
    kerple-power   bias[h, i, j] = -a[h] |i - j| ** p[h]           0 < p <= 2

p ~ U[0, 2) and a ~ U[0, 1) per head, none below 0.01. The authors hold them there by clamping the weights in place at
every forward; here they are FLOOR + softplus(raw), or a sigmoid between two ends, which training, compilation and
weight averaging cannot break.

Two-sided, the sides are `alike`; or `apart`: then each head has p and a for keys before the query and others for those
after it. The paper is about causal models alone.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lengthwise.bias import Bias, DistanceBias, Index, at_least_float32, registered
from lengthwise.encodings._table_cache import TableCache, bias_of_distance, by_side
from lengthwise.encodings.base import AttentionShape, Encoding, Sides, State, Tokens, are_apart
from lengthwise.token_layout import TokenLayout

FLOOR = 0.01

Numbers = Float[Tensor, "head *side"]
"""One a head, or two: before the query, and after it."""


class _Kernel(Encoding):
    """A falling function of distance with two learned numbers per head."""

    paper = "Chi et al. 2022, arXiv 2205.09921"
    by_head = ("raw_p", "raw_a")
    kind = DistanceBias
    context_free = True
    tables = ("raw_p", "raw_a")
    tile_function: ClassVar[Callable[..., Tensor]]
    sides_function: ClassVar[Callable[..., Tensor]]
    """The same where each side has numbers of its own."""

    def __init__(self, shape: AttentionShape, *, sides: Sides = "alike") -> None:
        super().__init__(shape)
        self.symmetric = not are_apart(shape, sides)
        numbers = (shape.heads,) if self.symmetric else (shape.heads, 2)
        self.raw_p = nn.Parameter(torch.empty(numbers))
        self.raw_a = nn.Parameter(torch.empty(numbers))
        self._tables = TableCache()
        self.reset_parameters()

    @property
    @abstractmethod
    def p(self) -> Numbers:
        """The kernel's first number, positive."""

    @property
    def a(self) -> Numbers:
        """The kernel's second number, positive."""
        return FLOOR + F.softplus(at_least_float32(self.raw_a))

    def bias(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> Bias:
        """A table with one number per distance, or the function itself where positions have gaps."""
        function = type(self).tile_function if self.symmetric else type(self).sides_function
        made_of, causal = (self.raw_p, self.raw_a), self.shape.causal
        return bias_of_distance(self._tables, function, lambda: (self.p, self.a), layout, *made_of, causal=causal)


def _distance(rows: Index, columns: Index, query: Tensor, key: Tensor) -> Tensor:
    """|query - key| as (batch, 1, row, column), to be spread over the heads."""
    return (query[:, None, rows, None] - key[:, None, None, columns]).abs()


@registered
def kerple_log(rows: Index, columns: Index, query: Tensor, key: Tensor, p: Tensor, a: Tensor) -> Tensor:
    """-p log(1 + a d)."""
    distance = _distance(rows, columns, query, key).to(p.dtype)
    return -p[:, None, None] * torch.log1p(a[:, None, None] * distance)


@registered
def kerple_power(rows: Index, columns: Index, query: Tensor, key: Tensor, p: Tensor, a: Tensor) -> Tensor:
    """-a d ** p; the power is taken of at least 1 and dropped at 0, where its gradient would be NaN."""
    distance = _distance(rows, columns, query, key)
    power = distance.clamp(min=1).to(p.dtype) ** p[:, None, None]
    return -a[:, None, None] * power.where(distance > 0, 0)


@registered
def kerple_log_sides(rows: Index, columns: Index, query: Tensor, key: Tensor, p: Tensor, a: Tensor) -> Tensor:
    """The logarithm with numbers for each side."""
    return by_side(kerple_log, rows, columns, query, key, p, a)


@registered
def kerple_power_sides(rows: Index, columns: Index, query: Tensor, key: Tensor, p: Tensor, a: Tensor) -> Tensor:
    """The power with numbers for each side."""
    return by_side(kerple_power, rows, columns, query, key, p, a)


class KerpleLog(_Kernel):
    """The logarithmic kernel, the one of the CABLE paper's figures."""

    tile_function = staticmethod(kerple_log)
    sides_function = staticmethod(kerple_log_sides)

    @property
    def p(self) -> Numbers:
        """How steep: the paper's r1."""
        return FLOOR + F.softplus(at_least_float32(self.raw_p))

    def reset_parameters(self) -> None:
        """p ~ U[0, 2), a ~ U[0, 1)."""
        with torch.no_grad():
            self.raw_p.copy_(_inverse_softplus(2 * torch.rand_like(self.raw_p)))
            self.raw_a.copy_(_inverse_softplus(torch.rand_like(self.raw_a)))


class KerplePower(_Kernel):
    """The power kernel; beyond p = 2 it would not be a kernel any more."""

    tile_function = staticmethod(kerple_power)
    sides_function = staticmethod(kerple_power_sides)

    @property
    def p(self) -> Numbers:
        """The power, between FLOOR and 2."""
        return FLOOR + (2 - FLOOR) * torch.sigmoid(at_least_float32(self.raw_p))

    def reset_parameters(self) -> None:
        """p ~ U[0.01, 2), a ~ U[0, 1)."""
        with torch.no_grad():
            self.raw_p.copy_(torch.rand_like(self.raw_p).clamp(0.001, 0.999).logit())
            self.raw_a.copy_(_inverse_softplus(torch.rand_like(self.raw_a)))


def _inverse_softplus(value: Tensor) -> Tensor:
    """raw with FLOOR + softplus(raw) = value; values so low that their gradient would vanish are raised to 0.02."""
    return torch.log(torch.expm1(value.clamp(min=2 * FLOOR) - FLOOR))
