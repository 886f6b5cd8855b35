"""What a filled-in matrix would cost, so that a length that cannot fit is refused before the machine is full."""

import os
import sys

import torch

from lengthwise.attention.call import Call
from lengthwise.bias import wide


def objections(call: Call, matrices: int) -> list[str]:
    """A refusal if so many matrices of (batch, head, query, key) are more than this machine's memory.

    A compiled graph may stand for many lengths, and is not asked.
    """
    if call.q.device.type != "cpu" or torch.compiler.is_compiling():
        return []
    need = matrices * call.batch * call.heads * call.queries * call.keys * wide(call.q[:0]).element_size()
    have = total_bytes()
    if need <= have:
        return []
    return [
        f"filled in, {call.queries:,} x {call.keys:,} scores of {call.batch * call.heads} heads take "
        f"{need / 1e9:,.1f} GB and this machine has {have / 1e9:,.1f} GB; row_block never fills them in"
    ]


def total_bytes() -> int:
    """The machine's memory; more than any machine has where Python cannot tell, as on Windows."""
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
