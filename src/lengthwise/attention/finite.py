"""What is not finite stays in the rows that see it.

In a product a weight of 0 does not stop an infinity. So what is not finite is taken out of keys and values, and the
rows that see it become NaN by a taint, which is 0 in all others.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.attention.call import AttentionCall
from lengthwise.bias import at_least_float32


def finite_inputs(call: AttentionCall) -> tuple[AttentionCall, Float[Tensor, "batch head query"] | None]:
    """The call with finite keys and values, and a taint to add to its rows; None where there is nothing to add."""
    if not call.visibility.hides or is_seen_finite(call):
        return call, None
    not_finite = tainted_keys(call)
    if can_be_read(call) and not bool(not_finite.any()):
        return call, None
    return replace(call, k=finite(call.k), v=finite(call.v)), taint(call, not_finite)


def can_be_read(call: AttentionCall) -> bool:
    """Whether numbers may be looked at: on the CPU in eager mode."""
    return not torch.compiler.is_compiling() and call.q.device.type == "cpu"


def is_seen_finite(call: AttentionCall) -> bool:
    """Whether a look shows keys and values to be finite; False where nobody may look.

    A sum shows whatever is not; one that overflows without it only takes the longer road.
    """
    if not can_be_read(call):
        return False
    with torch.no_grad():
        return bool((call.k.sum(dtype=torch.float32) + call.v.sum(dtype=torch.float32)).isfinite())


def tainted_keys(call: AttentionCall) -> Bool[Tensor, "batch kv_head key"]:
    """Which keys or their values are not finite."""
    return ~(call.k.isfinite().all(-1) & call.v.isfinite().all(-1))


def taint(call: AttentionCall, not_finite: Bool[Tensor, "batch kv_head key"]) -> Float[Tensor, "batch head query"]:
    """NaN for rows that see one of these keys, 0 for all others."""
    if call.layout.mask is not None:  # which may be another for every head
        not_finite = not_finite.repeat_interleave(call.group, 1)
    seen = (call.visibility.seen(not_finite) > 0).expand(call.batch, -1, -1)
    nans = torch.zeros_like(seen, dtype=at_least_float32(call.q[:0]).dtype).masked_fill(seen, torch.nan)
    return nans.repeat_interleave(call.heads // nans.shape[1], 1)


def finite(x: Tensor) -> Tensor:
    """x with 0 where it is not finite."""
    return torch.where(x.isfinite(), x, 0)
