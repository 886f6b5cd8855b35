"""Positions on a grid: the row and column of each token, as patches of an image have them.

A layout's positions either have a last axis of two, row and column, or are counted along the rows, `columns` to a row.
"""

import math

import torch
from jaxtyping import Int
from torch import Tensor

from lengthwise.encodings.base import AttentionShape
from lengthwise.errors import check_int
from lengthwise.token_layout import Positions, TokenLayout

Cells = Int[Tensor, "#batch position 2"]


def checked_columns(columns: int | None, shape: AttentionShape) -> int:
    """As given, or those of a square that holds the training length."""
    if columns is None:
        return math.isqrt(shape.train_length - 1) + 1
    check_int("columns", columns, "Leave it out for a square that holds the training length.")
    return columns


def cells_of(layout: TokenLayout, columns: int) -> tuple[Cells, Cells]:
    """Row and column of each query and of each key."""
    query = _cells(layout.query, columns)
    return query, query if layout.key is layout.query else _cells(layout.key, columns)


def _cells(positions: Positions, columns: int) -> Cells:
    if positions.ndim == 2:
        return torch.stack([positions.div(columns, rounding_mode="floor"), positions.remainder(columns)], -1)
    if positions.ndim != 3 or positions.shape[2] != 2:
        raise ValueError(
            f"positions must be (batch, position), or (batch, position, 2) with rows and columns, got shape "
            f"{tuple(positions.shape)}"
        )
    return positions
