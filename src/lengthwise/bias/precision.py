"""Enough precision for positions: float32 or better, and running sums in float64 or as two float32."""

from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.token_layout import Ring

NO_CONTEXT = nullcontext()


def at_least_float32(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The same numbers in float32 or better: half precision cannot hold a position."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Full precision on x's device; nothing at all where there is no autocast: in decoding even that would be felt."""
    device = "cpu" if x.is_cpu else x.device.type
    if device != "cpu" and not torch.amp.is_autocast_available(device):
        return NO_CONTEXT
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else NO_CONTEXT


def has_float64(device: torch.device) -> bool:
    """Whether a device can add in float64; Apple's cannot."""
    return device.type != "mps"


def widest_dtype(device: torch.device) -> torch.dtype:
    """The floating-point numbers with most digits that a device has."""
    return torch.float64 if has_float64(device) else torch.float32


def running_sums(step: Float[Tensor, "*rest key"], ring: Ring | None = None) -> tuple[Tensor, Tensor | None]:
    """The sums of the steps up to each, in float64 or, without it, as float32 and what that rounded away.

    `ring` is the layout's: where several processes share a sequence, the sums are over the tokens of all of them.
    """
    if ring is not None:
        return ring.running_sums(step), None
    if has_float64(step.device):
        return float64_sums(step), None
    return two_float_sums(step)


def float64_sums(step: Float[Tensor, "*rest key"]) -> Float[Tensor, "*rest key"]:
    """Running sums in float64; on a device by doubling, since cumsum's bits differ there from run to run."""
    return step.cumsum(-1, dtype=torch.float64) if step.device.type == "cpu" else doubled_sums(step.double())


def doubled_sums(step: Float[Tensor, "*rest key"]) -> Float[Tensor, "*rest key"]:
    """Running sums in log(n) additions, always in the same order, and so are those of its gradient."""
    reach = 1
    while reach < step.shape[-1]:
        step = step + torch.nn.functional.pad(step, (reach, 0))[..., : step.shape[-1]]
        reach *= 2
    return step


def two_float_sums(step: Float[Tensor, "*rest key"]) -> tuple[Tensor, Tensor]:
    """Running sums as two float32, by doubling: log(n) additions, each with what it rounds away kept beside it."""
    high, low = step.float(), torch.zeros_like(step, dtype=torch.float32)
    reach = 1
    while reach < step.shape[-1]:
        before_high = torch.nn.functional.pad(high, (reach, 0))[..., : step.shape[-1]]
        before_low = torch.nn.functional.pad(low, (reach, 0))[..., : step.shape[-1]]
        total = high + before_high
        other = total - high
        error = (high - (total - other)) + (before_high - other)
        rest = error + low + before_low
        high = total + rest
        low = rest - (high - total)
        reach *= 2
    return high, low


def two_floats(level: Float[Tensor, "*shape"]) -> tuple[Tensor, Tensor]:
    """A float64 number as two float32, itself and its rest, for kernels that stay in float32."""
    high = level.float()
    return high, (level - high.to(level.dtype)).float()
