"""What every term has: no bias at all, and where a tile lies."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

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


def part_of(x: Tensor, batch: int, heads: slice) -> Tensor:
    """Some heads of one sequence, or one head that stands for all."""
    x = x[batch if x.shape[0] > 1 else 0]
    return x[heads] if x.shape[0] > 1 else x
