"""How large tiles are and how many warps compute one, by kernel, precision, head width and card: no autotuning.

Chosen from the machine code that comes out, its registers, spills and shared memory; nobody has timed them.
"""

import os
from enum import Enum
from typing import NamedTuple

import torch

SMALL_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Capabilities of cards with 99 KB of shared memory a block."""

WIDEST = 128
"""The widest head."""

FEW_ROWS = 16
"""Up to so many queries are decoding: the keys are spread over the card."""

PROGRAMS_PER_PROCESSOR = 2
"""So many programs each multiprocessor should have in decoding."""

BOUNDED_ROWS = 64
"""How many rows are bounded together where keys are skipped; tiles are as many or a part or a multiple of it."""

BOUNDED_KEYS = 64
"""How many keys are bounded together, at least."""

SHORTEST = 2048
"""Of fewer keys none is skipped: the bounds would cost more than they save."""


class Load(Enum):
    """What a kernel keeps of every pair, besides its score."""

    LIGHT = "no bias, or one that none of the others says"
    GATHERED = "a table that is read by positions"
    CROWDED = "a table and a level, or a level with a curve"
    MASKED = "a table or a level, and tokens that are hidden by documents, padding or bands"
    HEAVY = "lines or profiles"


class Tile(NamedTuple):
    """Rows and keys of a tile, warps, and how many tiles are on their way at once."""

    rows: int
    keys: int
    warps: int
    stages: int


def is_interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU; decided once, when Triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """That of a card; None in the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def tile_for(kernel: str, dtype: torch.dtype, width: int, load: Load, capability: tuple[int, int] | None) -> Tile:
    """The tile of "forward", "decode", "rows", "keys", "bands" or "entries"; capability None is the interpreter."""
    if capability is None:
        return Tile(16 if kernel == "decode" else 32, 32, 4, 1)
    whole, wide = dtype == torch.float32, width > 64
    few, heavy, crowded = capability in SMALL_MEMORY, load == Load.HEAVY, load in (Load.CROWDED, Load.MASKED)
    if kernel == "entries":
        # One stage: a program reads sums that it wrote, and no load may come before its turn.
        return Tile(16, 16, 8, 1) if whole and wide else Tile(32, 32, 8 if whole else 4, 1)
    if kernel == "decode":
        return Tile(16, 32 if whole else 64, 4, 2)
    if whole and heavy and kernel == "rows":
        return Tile(16, 32, 8, 1)
    if whole and wide:
        many = heavy or capability[0] >= 9 or (load == Load.GATHERED and kernel == "forward")
        return Tile(32, 32, 16 if many else 8, 1)
    if kernel == "bands" and (whole or heavy or (wide and capability[0] not in (9, 10))):
        return Tile(32, 32, 4, 1)
    if whole:
        return Tile(32 if load == Load.MASKED and capability[0] == 10 else 64, 32, 8, 1)
    if kernel == "rows" and heavy and (capability[0] in (10, 12) or (wide and capability[0] == 9)):
        # Larger ones of lines spill on 9.0 and 12.0, and Triton 3.7 cannot compile them for 10.0.
        return Tile(32, 32, 4, 2)
    if kernel == "rows" and wide and load == Load.MASKED and capability[0] not in (9, 10):
        return Tile(32, 32, 4, 2)
    if heavy and kernel == "keys":
        return Tile(32, 32 if capability[0] == 12 else 64, 4, 2)
    if heavy:
        return Tile(64, 32, 8 if wide and (kernel == "rows" or capability[0] == 12) else 4, 2)
    if kernel == "forward":
        many = wide or capability[0] in (9, 10) or (crowded and not few)
        short = few or (wide and crowded and capability[0] == 10)
        return Tile(64 if short else 128, 64, 8 if many else 4, 2 if wide or few else 3)
    if kernel == "keys" and (few and not wide or wide and load == Load.MASKED and capability[0] in (9, 12)):
        return Tile(32, 32, 4, 2)
    if kernel == "rows" and wide and crowded and capability[0] == 9:
        return Tile(64, 32, 8, 2)
    if kernel == "keys" and capability[0] in (9, 10):
        return Tile(32, 64, 4, 2)
    if kernel in ("rows", "keys") and crowded and not wide and capability[0] != 10:
        # With eight warps instead, keys_kernel still spills up to 496 bytes on 8.0.
        return Tile(64, 32, 4, 2)
    return Tile(64, 64, 8 if wide or capability[0] == 10 else 4, 2)


def shares_of_keys(programs: int, tiles: int, device: torch.device) -> int:
    """Over how many programs the keys of a block of rows are spread in decoding."""
    processors = 4
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // max(programs, 1))
    return max(1, min(wanted, tiles))
