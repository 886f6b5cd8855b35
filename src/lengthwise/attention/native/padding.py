"""Channels as the kernels read them: float32, up to a multiple of what their registers hold."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

CHANNELS = 16
"""The kernel reads heads in pieces of so many channels."""


def padded(x: Float[Tensor, "batch head position dim"]) -> Float[Tensor, "batch head position wider"]:
    """float32 with zeros up to a multiple of the channels that the kernel's registers hold."""
    missing = padded_size(x.shape[3]) - x.shape[3]
    x = F.pad(x.float(), (0, missing)) if missing else x.float()
    return x.contiguous()


def padded_size(dim: int) -> int:
    """So many channels as `padded` gives."""
    return -(-dim // CHANNELS) * CHANNELS
