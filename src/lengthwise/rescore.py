"""What replaces the sum of content and bias as the scores of attention, described as a bias is.

    scores = rescore(content, bias)            for whole rows of keys and all heads at once

Content is the capped, scaled product of queries and keys; both it and the bias are 0 where the mask hides a key. A
Rescore holds the tensors it is made of, so that kernels can compute it in tiles, forward and backward, and compiled
graphs see one node.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.bias import Description, described, has_float64
from lengthwise.errors import check_tensor, describe

LEAK = 0.01
"""The slope of LeakyReLU below 0, torch's own."""


class Rescore(Description, ABC):
    """The scores of one call of attention, from its content and its bias."""

    in_float64: ClassVar[bool] = False
    """Whether torch should compute it in float64: a network of large scores, which are sums in an order that depends on
    how many rows there are, loses in float32 what a softmax shows."""

    def apply(
        self,
        content: Float[Tensor, "batch head row key"],
        bias: Float[Tensor, "batch head row key"],
        q: Float[Tensor, "batch head row dim"],
        k: Float[Tensor, "batch head key dim"],
        mask: Bool[Tensor, "#batch #head row key"],
        rows: slice = slice(None),
    ) -> Float[Tensor, "batch head row key"]:
        """`scores`, in float64 where it should be and the device has it; the result is in content's dtype."""
        if not self.in_float64 or not has_float64(content.device):
            return self.scores(content, bias, q, k, mask, rows)
        return self.scores(content.double(), bias.double(), q, k, mask, rows).to(content.dtype)

    @abstractmethod
    def scores(
        self,
        content: Float[Tensor, "batch head row key"],
        bias: Float[Tensor, "batch head row key"],
        q: Float[Tensor, "batch head row dim"],
        k: Float[Tensor, "batch head key dim"],
        mask: Bool[Tensor, "#batch #head row key"],
        rows: slice = slice(None),
    ) -> Float[Tensor, "batch head row key"]:
        """The scores of some whole rows, of all heads; hidden places may hold anything finite.

        q has those rows, k all keys as many as heads; `rows` are their numbers, for arguments with one entry a query.
        """


@described
@dataclass(frozen=True, eq=False)
class HeadNetwork(Rescore):
    """scores = A + B + f([A; B]): A the content, B the bias, f a small network along the heads, as in DAPE.

    f is Linear(2 heads, hidden) - LeakyReLU - Linear(hidden, heads) at each query and key; with a kernel of 3 both
    layers also see the key's two neighbours in its row. What the mask hides is 0 before either layer.
    """

    in_float64 = True

    weight_in: Float[Tensor, "hidden two_heads kernel"]
    bias_in: Float[Tensor, " hidden"]
    weight_out: Float[Tensor, "head hidden kernel"]
    bias_out: Float[Tensor, " head"]

    def __post_init__(self) -> None:
        check_tensor("weight_in", self.weight_in, ("hidden", "2 heads", "kernel"), "floating-point")
        hidden, inputs, kernel = self.weight_in.shape
        check_tensor("bias_in", self.bias_in, (hidden,), "floating-point")
        check_tensor("weight_out", self.weight_out, (inputs // 2, hidden, kernel), "floating-point")
        check_tensor("bias_out", self.bias_out, (inputs // 2,), "floating-point")
        if inputs % 2 or kernel not in (1, 3):
            raise ValueError(
                f"a HeadNetwork must have 2 heads inputs and a kernel of 1 or 3, got {inputs} and {kernel}"
            )

    def scores(
        self, content: Tensor, bias: Tensor, q: Tensor, k: Tensor, mask: Tensor, rows: slice = slice(None)
    ) -> Tensor:
        """A + B + f([A; B])."""
        # It sees all heads of a pair at once: a pair counts if some head sees it.
        mask = mask.any(1, keepdim=True)
        hidden = F.leaky_relu(_along_heads(self.weight_in, self.bias_in, torch.cat([content, bias], 1)), LEAK)
        return content + bias + _along_heads(self.weight_out, self.bias_out, hidden.masked_fill(~mask, 0))


def _along_heads(
    weight: Float[Tensor, "out inner kernel"], bias: Float[Tensor, " out"], x: Float[Tensor, "batch inner row key"]
) -> Float[Tensor, "batch out row key"]:
    """One layer: a product along the second axis, summed over the keys that the kernel sees.

    Not a convolution: inductor keeps the heads of one last in memory, and then writes past the end of a reduction over
    the keys of fewer heads than a vector is wide.
    """
    reach, keys = weight.shape[2] // 2, x.shape[3]
    padded = F.pad(x, (reach, reach))
    total = bias.to(x.dtype)[:, None, None].expand(x.shape[0], -1, *x.shape[2:])
    for tap in range(weight.shape[2]):
        total = total + torch.einsum("oi,birk->bork", weight[:, :, tap].to(x.dtype), padded[..., tap : tap + keys])
    return total


@described
@dataclass(frozen=True, eq=False)
class ContextualPositions(Rescore):
    """scores = content + bias + q . e(position), positions counted from the query back over gates, as in CoPE.

    gate[i, j]     = sigmoid(content[i, j])                    0 where the mask hides j
    position[i, j] = sum of gate[i, l] over l >= j             at most positions - 1
    e between two columns of the table by interpolation; the table is shared by the heads
    """

    table: Float[Tensor, "dim position"]

    def __post_init__(self) -> None:
        check_tensor("table", self.table, ("dim", "position"), "floating-point")
        if self.table.shape[1] < 2:
            raise ValueError(f"contextual positions must have a table of 2 or more, got {self.table.shape[1]}")

    def scores(
        self, content: Tensor, bias: Tensor, q: Tensor, k: Tensor, mask: Tensor, rows: slice = slice(None)
    ) -> Tensor:
        """Content and bias plus the query's own score of each contextual position."""
        gates = content.sigmoid().masked_fill(~mask, 0)
        position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.table.shape[1] - 1)
        of_table = q @ self.table.to(q.dtype)
        # A NaN has no column; it reaches its row through the interpolation.
        columns = (whole.nan_to_num(0).long() for whole in (position.floor(), position.ceil()))
        below, above = (of_table.gather(-1, column) for column in columns)
        return content + bias + torch.lerp(below, above, position - position.floor())


@described
@dataclass(frozen=True, eq=False)
class ScoreFunction(Rescore):
    """scores = function(content, bias, q, k, mask, rows, *arguments): anything else, by blocks of whole rows.

    A block has the first keys up to the last that its rows see, or all of them.

    `function` is pure and lives at the top of a module; everything that may need a gradient is in `arguments`.
    Decorated with `lw.registered` it also works in compiled graphs.
    """

    function: Callable[..., Float[Tensor, "batch head row key"]]
    arguments: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"function must be a function of content, bias, q, k, mask and rows, got {describe(self.function)}"
            )

    def scores(
        self, content: Tensor, bias: Tensor, q: Tensor, k: Tensor, mask: Tensor, rows: slice = slice(None)
    ) -> Tensor:
        """What the function gives."""
        return self.function(content, bias, q, k, mask, rows, *self.arguments)
