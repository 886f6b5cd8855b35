"""Attention in C++, compiled on first use where there is a compiler: CPU, eager mode, inside in float32.

tiles    blocks of rows and keys, forward and backward, for the kinds of bias whose structure it knows
decode   a few queries against many keys, without gradients: every kind, every mask
rescore  scores that a small network or contextual positions make, forward and backward
"""

import torch

from lengthwise.attention.backend import Output, Plan, Refusal
from lengthwise.attention.call import AttentionCall
from lengthwise.attention.native import build, decode, rescore, tiles


def plan(call: AttentionCall) -> Plan | Refusal:
    """The kernel for the call, or why there is none."""
    if torch.compiler.is_compiling():
        return Refusal.because("a compiled graph takes row_block, which it sees as one node")
    if call.q.device.type != "cpu":
        return Refusal.because("its kernels are for the CPU")
    if call.dtype == torch.float64:
        return Refusal.because("its kernels compute in float32")
    if call.layout.mask is not None:
        return Refusal.because("its kernels take no explicit mask")
    if fault := build.fault():
        return Refusal.because(f"there is no kernel here: {fault}")
    if call.rescore is not None:
        return rescore.plan(call)
    return decode.plan(call) if call.is_decoding else tiles.plan(call)


def run(call: AttentionCall, plan: Plan) -> Output:
    """The output and the log-sum-exp, with gradients for everything that is learned."""
    assert isinstance(plan, decode.DecodePlan | rescore.RescorePlan | tiles.TilesPlan)
    return plan.run(call)


def skipped_share(call: AttentionCall) -> float:
    """How much of the work that the masks leave is left out, 0 to 1; only tiles leave out any."""
    return 0.0 if call.rescore is not None or call.is_decoding else tiles.skipped_share(call)
