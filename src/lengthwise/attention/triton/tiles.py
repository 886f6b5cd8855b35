"""How large tiles are and how many warps compute one, by kernel, precision, head width and card: no autotuning.

Chosen from the machine code that comes out, its registers, spills and shared memory; nobody has timed them.
"""

import os
from enum import Enum
from typing import NamedTuple

import torch

SMALL_MEMORY = ((8, 6), (8, 9))
"""Capabilities of the cards of the kind of 8.0 that have 99 KB of shared memory a block instead of 163."""

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
    SUMMED = "profiles of keys, whose gradient it adds up beside those of keys and values"


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


class Rule(NamedTuple):
    """The tile of the calls that these words fit; an empty one fits all."""

    tile: Tile
    kernels: str = ""
    precision: str = ""
    """float32, or half for 16 bits."""
    width: str = ""
    """wide is more than 64."""
    loads: str = ""
    cards: str = ""

    def fits(self, *words: str) -> bool:
        """Whether it is for a kernel, a precision, a width, a load and a card."""
        return all(not own or word in own.split() for own, word in zip(self[1:], words, strict=True))


RULES = (
    # One stage: a program of entries reads sums that it wrote, and no load may come before its turn.
    Rule(Tile(16, 16, 8, 1), "entries", "float32", "wide"),
    Rule(Tile(32, 32, 8, 1), "entries", "float32"),
    Rule(Tile(32, 32, 4, 1), "entries"),
    Rule(Tile(16, 32, 8, 2), "decode", "float32", "wide"),
    Rule(Tile(16, 32, 4, 2), "decode", "float32"),
    Rule(Tile(16, 64, 4, 2), "decode"),
    Rule(Tile(16, 16, 8, 1), "keys", "float32", "", "summed"),
    Rule(Tile(32, 32, 8, 1), "keys", "", "", "summed"),
    Rule(Tile(16, 32, 8, 1), "rows", "float32", "", "heavy"),
    Rule(Tile(32, 32, 16, 1), "", "float32", "wide", "heavy"),
    Rule(Tile(32, 32, 16, 1), "", "float32", "wide", "", "9 10 12"),
    Rule(Tile(32, 32, 16, 1), "forward", "float32", "wide", "gathered"),
    Rule(Tile(32, 32, 8, 1), "", "float32", "wide"),
    Rule(Tile(32, 32, 4, 1), "bands", "float32"),
    Rule(Tile(32, 32, 8, 1), "", "float32", "", "masked", "10"),
    Rule(Tile(64, 32, 8, 1), "", "float32"),
    Rule(Tile(32, 32, 4, 1), "bands", "half", "", "heavy"),
    Rule(Tile(32, 32, 4, 1), "bands", "half", "wide", "", "8.0 8.6 12"),
    # Larger ones of lines spill on 9.0 and 12.0, and Triton 3.7 cannot compile them for 10.0.
    Rule(Tile(32, 32, 4, 2), "rows", "half", "", "heavy", "10 12"),
    Rule(Tile(32, 32, 4, 2), "rows", "half", "wide", "heavy", "9"),
    Rule(Tile(64, 32, 8, 2), "rows", "half", "wide", "heavy"),
    Rule(Tile(32, 32, 4, 2), "keys", "half", "", "heavy", "12"),
    Rule(Tile(32, 64, 4, 2), "keys", "half", "", "heavy"),
    Rule(Tile(64, 32, 8, 2), "", "half", "wide", "heavy", "12"),
    Rule(Tile(64, 32, 4, 2), "", "half", "", "heavy"),
    Rule(Tile(32, 64, 4, 2), "forward", "half", "wide", "masked", "12"),
    Rule(Tile(64, 64, 8, 2), "forward", "half", "wide", "", "8.6 12"),
    Rule(Tile(64, 64, 4, 2), "forward", "half", "", "", "8.6 12"),
    Rule(Tile(64, 64, 8, 2), "forward", "half", "wide", "crowded masked", "10"),
    Rule(Tile(128, 64, 8, 2), "forward", "half", "wide"),
    Rule(Tile(128, 64, 8, 3), "forward", "half", "", "", "9 10"),
    Rule(Tile(128, 64, 8, 3), "forward", "half", "", "crowded masked"),
    Rule(Tile(128, 64, 4, 3), "forward", "half"),
    Rule(Tile(32, 32, 4, 2), "rows", "half", "wide", "masked", "8.0 8.6 12"),
    Rule(Tile(64, 32, 8, 2), "rows", "half", "wide", "crowded masked", "9"),
    Rule(Tile(32, 32, 4, 2), "keys", "half", "narrow", "", "8.6 12"),
    Rule(Tile(32, 32, 4, 2), "keys", "half", "wide", "masked", "9 12"),
    Rule(Tile(32, 64, 4, 2), "keys", "half", "", "", "9 10"),
    # With eight warps instead, keys_kernel still spills up to 496 bytes on 8.0.
    Rule(Tile(64, 32, 4, 2), "rows keys", "half", "narrow", "crowded masked", "8.0 8.6 9 12"),
    Rule(Tile(64, 64, 8, 2), "", "half", "wide"),
    Rule(Tile(64, 64, 8, 2), "", "half", "", "", "10"),
    Rule(Tile(64, 64, 4, 2)),
)
"""The first that fits counts. A smaller tile, or more warps, stands where the machine code of a larger one spilled."""


def tile_for(kernel: str, dtype: torch.dtype, width: int, load: Load, capability: tuple[int, int] | None) -> Tile:
    """The tile of "forward", "decode", "rows", "keys", "bands" or "entries"; capability None is the interpreter."""
    if capability is None:
        return Tile(16 if kernel == "decode" else 32, 32, 4, 1)
    precision = "float32" if dtype == torch.float32 else "half"
    words = kernel, precision, "wide" if width > 64 else "narrow", load.name.lower(), card_sort(capability)
    return next(rule.tile for rule in RULES if rule.fits(*words))


def card_sort(capability: tuple[int, int]) -> str:
    """The sort of card that the rules name: 8.0, 8.6, 9, 10 or 12."""
    major, _ = capability
    if major == 8:
        return "8.6" if capability in SMALL_MEMORY else "8.0"
    return "9" if major < 10 else "10" if major < 12 else "12"


def shares_of_keys(programs: int, tiles: int, device: torch.device) -> int:
    """Over how many programs the keys of a block of rows are spread in decoding."""
    processors = 4
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // max(programs, 1))
    return max(1, min(wanted, tiles))
