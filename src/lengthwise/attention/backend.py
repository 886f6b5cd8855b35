"""What a backend is, and what all of them share. A backend is a module with

    plan(call) -> Plan | Refusal           how it will run the call, or why it cannot, in words
    run(call, plan) -> (out, lse)          lse may be None where the call does not ask for it

Whatever a plan finds out it holds, so that running it computes nothing twice. Backends share the modules of this folder
and never import one another.

A length whose filled-in matrices cannot fit is refused before the machine is full.

What is not finite stays in the rows that see it. In a product a weight of 0 does not stop an infinity. So what is not
finite is taken out of keys and values, and the rows that see it become NaN by a taint, which is 0 in all others.
"""

import os
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.attention.call import AttentionCall
from lengthwise.bias import at_least_float32
from lengthwise.errors import describe

Output = tuple[Float[Tensor, "batch head query value"], Float[Tensor, "batch head query"] | None]
Part = tuple[Float[Tensor, "batch head query value"], Float[Tensor, "batch head query"]]
"""The output and the log-sum-exp of `attend(..., return_lse=True)`."""


class Plan:
    """How a backend will run a call; a subclass holds what it found out."""


@dataclass(frozen=True)
class Refusal:
    """Why a backend cannot take a call."""

    reasons: tuple[str, ...]

    @classmethod
    def because(cls, *reasons: str) -> "Refusal":
        """With the reasons in words."""
        return cls(reasons)


def memory_refusal(call: AttentionCall, matrices: int) -> Refusal | None:
    """A refusal if so many matrices of (batch, head, query, key) are more than this machine's memory.

    A compiled graph may stand for many lengths, and is not asked.
    """
    if call.q.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    need = matrices * call.batch * call.heads * call.queries * call.keys * at_least_float32(call.q[:0]).element_size()
    have = total_bytes()
    if have is None or need <= have:
        return None
    return Refusal.because(
        f"filled in, {call.queries:,} x {call.keys:,} scores of {call.batch * call.heads} heads take "
        f"{need / 1e9:,.1f} GB and this machine has {have / 1e9:,.1f} GB; row_block never fills them in"
    )


def total_bytes() -> int | None:
    """The machine's memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # there is no sysconf on Windows
        return None


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


def merge(*parts: Part) -> Part:
    """(out, lse) of all keys from those of parts that share no key; exact, with gradients.

    Parts that see nothing have lse -inf and add nothing; two of them give 0 and -inf. A sink belongs to exactly one
    part.

    """
    if not parts:
        raise ValueError("merge needs one (out, lse) or more, got none")
    for part in parts:
        if not (isinstance(part, tuple) and len(part) == 2 and part[0].shape[:3] == part[1].shape):
            raise ValueError(f"merge takes (out, lse) as attend(..., return_lse=True) gives them, got {describe(part)}")
    out, lse = merge_stacked(
        torch.stack([at_least_float32(out) for out, _ in parts]), torch.stack([lse for _, lse in parts])
    )
    return out.to(parts[0][0].dtype), lse


def merge_stacked(
    outs: Float[Tensor, "part batch head query value"], lses: Float[Tensor, "part batch head query"]
) -> Part:
    """`merge` of parts that lie in one tensor, by as many operations whatever their number."""
    empty = (lses == -torch.inf).all(0)
    # A row of nothing but -inf would make NaN of its gradient.
    safe = lses.masked_fill(empty, 0)
    lse = safe.logsumexp(0)
    shares = (safe - lse).exp().masked_fill(empty, 0)
    return (shares[..., None] * outs).sum(0), lse.masked_fill(empty, -torch.inf)
