"""What a filled-in matrix would cost, so that a length that cannot fit is refused before the machine is full."""

import os

import torch

from lengthwise.attention.call import AttentionCall
from lengthwise.attention.plan import Refusal
from lengthwise.bias import at_least_float32


def refusal(call: AttentionCall, matrices: int) -> Refusal | None:
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
