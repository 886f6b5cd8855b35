"""Arrays as text for the browser: rounded as said, bytes of equal weight side by side, deflated, base64.

Side by side, signs and exponents of neighbours look alike and nearly vanish, and so do bits that rounding cleared. A
smooth table is sent as second differences of its bits, read as whole numbers: every float32 comes back to the last bit.
"""

import base64
import zlib
from typing import Any, Literal

import numpy as np

Side = Literal["nearest", "down", "up"]
MANTISSA = {4: 23, 8: 52}


def packed(x: np.ndarray, *, bits: int = 52, side: Side = "nearest", smooth: bool = False) -> dict[str, Any]:
    """What `numbers()` of numbers.js reads: float32, or float64 if that came; no number keeps more than `bits`.

    The error is at most 2 ** -(bits + 1) of the number, or twice that to one side.
    """
    x = np.ascontiguousarray(x, dtype=np.float64 if x.dtype == np.float64 else np.float32)
    # 0 - 0 has no minus sign, which a reader would take for a small number.
    words = rounded(x + x.dtype.type(0), bits, side)
    if smooth:
        words = differences(words)
    planes = words.reshape(-1, 1).view(np.uint8).T
    # In noise there is nothing to find but runs: looking for those alone is ten times as fast, and no larger.
    deflate = zlib.compressobj(strategy=zlib.Z_DEFAULT_STRATEGY if smooth else zlib.Z_RLE)
    deflated = deflate.compress(np.ascontiguousarray(planes).tobytes()) + deflate.flush()
    text = base64.b64encode(deflated).decode()
    return {"shape": list(x.shape), "bytes": x.itemsize, "smooth": smooth, "text": text}


def rounded(x: np.ndarray, bits: int, side: Side) -> np.ndarray:
    """The bit patterns of numbers rounded to so many bits after the first; infinities and NaN as they are."""
    words: Any = x.view(np.uint32 if x.itemsize == 4 else np.uint64)
    drop = MANTISSA[x.itemsize] - bits
    if drop <= 0:
        return words
    dropped, half = (words.dtype.type(value) for value in (2**drop - 1, 2 ** (drop - 1)))
    if side == "nearest":
        found = words + half
    else:
        # Cutting bits leads towards 0; one step more leads away from it, where the bound needs that.
        away = (x < 0) if side == "down" else (x > 0)
        found = np.where(away, words + dropped, words)
    return np.asarray(np.where(np.isfinite(x), found & ~dropped, words))


def differences(words: np.ndarray) -> np.ndarray:
    """Second differences along the last axis of float32 bit patterns, taken as whole numbers; small ones are small."""
    assert words.dtype == np.uint32, "only tables are smooth, and they are float32"
    signed = words.view(np.int32).astype(np.int64)
    whole = np.where(signed < 0, -(signed & 0x7FFFFFFF), signed)
    twice = np.diff(whole, n=1, axis=-1, prepend=0)
    twice = np.diff(twice, n=1, axis=-1, prepend=0).astype(np.int32)
    return ((twice << 1) ^ (twice >> 31)).view(np.uint32)
