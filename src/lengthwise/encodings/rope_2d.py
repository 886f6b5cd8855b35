"""RoPE on a grid (Heo et al. 2024, section 3): channels turn by the column and by the row of a token.

    axial-rope   half of the pairs turn by  column * base ** (-4k / head_dim),  the other half by  row * the same
    mixed-rope   every pair turns by  column * f[h, k] + row * g[h, k],  both learned

base is 100 for axial-rope and 10 for mixed-rope, whose heads start as axial ones, each turned by a drawn angle.
Pairs are interleaved channels, as in the authors' code. Positions have rows and columns, or are counted along rows of
`columns` tokens. Where the authors do not turn a class token, give it row and column 0. Two-sided as causal.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lengthwise.bias import at_least_float32
from lengthwise.encodings._cells import Cells, cells_of, checked_columns
from lengthwise.encodings._rotary import check_even, check_turned, turn, waves_of
from lengthwise.encodings.base import AttentionShape, Encoding, Keys, Queries, State
from lengthwise.errors import check_number
from lengthwise.token_layout import TokenLayout

PAPER = "Heo et al. 2024, arXiv 2403.13298"


class AxialRope(Encoding):
    """Some pairs turn by the column, the others by the row."""

    paper = PAPER
    by_head: tuple[str | tuple[str, int], ...] = ()

    def __init__(self, shape: AttentionShape, *, base: float = 100.0, columns: int | None = None) -> None:
        super().__init__(shape)
        check_even("rope on a grid", shape)
        check_number("base", base, "The authors have 100, mixed 10.")
        self.base, self.columns = base, checked_columns(columns, shape)

    def axial(self, device: torch.device | None = None) -> Float[Tensor, "2 pair"]:
        """Radians per row and per column, of each pair: one of the two is 0."""
        pairs = self.shape.head_dim // 2
        wave = self.base ** (-2 * torch.arange(pairs - pairs // 2, dtype=torch.float32, device=device) / pairs)
        by_column = torch.cat([wave, torch.zeros(pairs // 2, device=device)])
        return torch.stack([torch.cat([torch.zeros_like(wave), wave[: pairs // 2]]), by_column])

    def frequency(self, device: torch.device) -> Float[Tensor, "#head 2 pair"]:
        """Radians per row and per column, of each head and pair."""
        return self.axial(device)[None]

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Both turned by their rows and columns."""
        frequency = self.frequency(q.device)
        check_turned(q, k, layout, self.shape, own_heads=frequency.shape[0] > 1, axes=True)
        return tuple(  # type: ignore[return-value]
            turn(x, waves_of(_angles(cells, frequency), frequency.dtype), "interleaved")
            for x, cells in zip((q, k), cells_of(layout, self.columns), strict=True)
        )


def _angles(cells: Cells, frequency: Tensor) -> Tensor:
    """(batch, head, position, pair); not a matrix product, which autocast and TF32 would round."""
    row, column = cells[:, None, :, :, None].to(frequency.dtype).unbind(3)
    return row * frequency[:, 0, None] + column * frequency[:, 1, None]


class MixedRope(AxialRope):
    """Every pair turns in a direction of its own, which is learned."""

    paper = PAPER
    by_head = ("direction",)
    tables = ("direction",)

    def __init__(self, shape: AttentionShape, *, base: float = 10.0, columns: int | None = None) -> None:
        super().__init__(shape, base=base, columns=columns)
        self.direction = nn.Parameter(torch.empty(shape.heads, 2, shape.head_dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Axial frequencies, turned by an angle that is drawn for each head."""
        angle = 2 * math.pi * torch.rand(self.shape.heads, 1, device=self.direction.device)
        by_row, by_column = self.axial(self.direction.device)
        along_row, along_column = (
            torch.stack([angle.sin(), angle.cos()], 1),
            torch.stack([angle.cos(), -angle.sin()], 1),
        )
        with torch.no_grad():
            self.direction.copy_(along_row * by_column + along_column * by_row)

    def frequency(self, device: torch.device) -> Float[Tensor, "head 2 pair"]:
        """As learned."""
        return at_least_float32(self.direction)
