"""What a kernel is compiled for, and what it is given."""

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
ROOM = tl.constexpr(256)
"""More than any block: a strip has so many entries at both ends that no tile needs a clamp."""

STRIP, GATHERED = tl.constexpr(1), tl.constexpr(2)
"""How a table is read: by the slots, or by the positions that it holds."""
LINEAR, LOGARITHMIC = tl.constexpr(1), tl.constexpr(2)
"""Curves of levels."""
OF_QUERIES, OF_KEYS = tl.constexpr(1), tl.constexpr(2)
"""Whose vectors meet the profiles."""
INTERPRETED, NVIDIA, OTHER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What runs a kernel."""


class Flags(NamedTuple):
    """What a kernel is compiled for."""

    TABLE: int
    LEVEL: int
    FINE: bool
    """Whether levels' differences have more digits than float32 has: only there it is seen in the result."""
    LINE: bool
    PROFILE: int
    ZERO: bool
    """Whether profiles are 0 beyond their ends."""
    LOGIT: bool
    CAP: bool
    SINK: bool
    DOCUMENTS: bool
    PADDING: bool
    BANDS: int
    RANGES: bool
    """Whether what a block of rows sees is read; else order and window decide it."""
    DIM: int
    """The width of queries and keys."""
    VALUE: int
    D: int
    """The power of 2 that holds DIM, and under DV that of VALUE: narrower ones are filled up with zeros."""
    DV: int
    LINES: int
    PROFILES: int
    BM: int
    """Rows of a tile, and under BN its keys."""
    BN: int
    BE: int
    """So many entries of a table, and so many profiles, entries_kernel adds to at once."""
    TARGET: int
    WIDE: bool
    """Whether rows lie so far apart that 32 bits do not hold where the last is: with 32 heads of 128 side by side, and
    keys and values beside them, after 174,762 tokens."""
    SKIP: bool
    """Whether blocks of rows begin at keys of their own, `first`."""


class Given(NamedTuple):
    """What kernels read; None for what a call does not have."""

    q: Tensor
    k: Tensor
    v: Tensor
    bounds: Tensor
    """The least row - column that order and window let see, and how many numbers from it on."""
    ranges: Tensor | None
    """(batch, block of rows, 4): keys that some row sees, from and to; that all rows see, from and to."""
    query_documents: Tensor | None
    key_documents: Tensor | None
    key_mask: Tensor | None
    band_low: Tensor | None
    """(band, batch, query): keys of a band have numbers above it, and at most those of `band_high`."""
    band_high: Tensor | None
    band_key: Tensor | None
    logit_scale: Tensor | None
    sink: Tensor | None
    table: Tensor | None
    table_query: Tensor | None
    table_key: Tensor | None
    query_level: Tensor | None
    query_rest: Tensor | None
    key_level: Tensor | None
    key_rest: Tensor | None
    slope: Tensor | None
    curve: Tensor | None
    curve_query: Tensor | None
    curve_key: Tensor | None
    factor: Tensor | None
    knots: Tensor | None
    line_slope: Tensor | None
    line_start: Tensor | None
    mixes: Tensor | None
    """The vectors that meet the profiles, (batch, head, token, profile)."""
    profiles: Tensor | None
    profile_query: Tensor | None
    profile_key: Tensor | None
    first: Tensor | None
    """(batch, head, block of rows): the first key that has to be visited."""


class Sizes(NamedTuple):
    """Plain numbers; strides are in elements, and the last axis lies close.

    Triton compiles a kernel anew for each set of those that are 1 and those that 16 divides, so nothing is here that
    follows from the others. Decoding, where `keys` grows, is compiled for lengths that 16 divides and for all others.
    """

    batch: int
    heads: int
    group: int
    queries: int
    keys: int
    strip_batch: int
    """From one sequence's strip to the next; 0 if they share one."""
    strip_length: int
    table_length: int
    table_first: int
    curve_length: int
    curve_first: int
    profile_length: int
    profile_first: int
    scale: float
    """In units of log 2 where there is no cap, else of the cap."""
    cap: float
    plain_scale: float
    """That of a product of a query and a key, whatever follows."""
    q_batch: int
    q_head: int
    q_row: int
    k_batch: int
    k_head: int
    k_row: int
    v_batch: int
    v_head: int
    v_row: int


class Upstream(NamedTuple):
    """What the backward pass is given beside: gradients, in float32 but for the output's, and what forward left."""

    d_out: Tensor
    lse: Tensor
    """In units of log 2; inf for rows that have no weight to give."""
    drop: Tensor
    """d_out . out - d_lse"""
