"""Where Lengthwise keeps what it can make again: tokenizers, token files and compiled kernels."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$LENGTHWISE_DATA, or the user's cache."""
    if chosen := os.environ.get("LENGTHWISE_DATA"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lengthwise"
