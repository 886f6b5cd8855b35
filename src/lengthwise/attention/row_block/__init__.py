"""Exact attention for every kind of bias in tiles, forward and backward: nothing with queries x keys numbers is alive.

Plain PyTorch inside two operators, so that torch.compile and torch.export see one node each, with lengths left open
where the caller leaves them open. Tried on CPU; on other devices untested.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention.call import Call
from lengthwise.attention.row_block import few_rows, operators, rescoring
from lengthwise.attention.row_block.operation import skipped_share
from lengthwise.bias import DenseBias, DistanceBias, FunctionBias, LevelBias

__all__ = ["attend", "objections", "skipped_share", "skipping", "skips"]

_skip = True


def objections(call: Call) -> list[str]:
    """Why this backend cannot take the call; nothing if it can."""
    reasons = []
    if not isinstance(call.bias, (DistanceBias, LevelBias, FunctionBias, DenseBias, type(None))):
        reasons.append(f"it does not know the structure of a {type(call.bias).__name__}")
    if torch.compiler.is_compiling():
        if isinstance(call.bias, FunctionBias) and not operators.registered_name(call.bias.function):
            name = call.bias.function.__name__
            reasons.append(f"a compiled graph can only name a registered tile: decorate {name} with registered")
        if call.rescore is not None:
            reasons.append("a compiled graph cannot name the function that rescores")
    return reasons


def attend(call: Call) -> Float[Tensor, "batch head query value"]:
    """The output, with gradients for everything that is learned."""
    if call.rescore is not None:
        return rescoring.attend(call)
    if few_rows.suits(call):
        return few_rows.attend(call)
    return operators.attend(call, skip=_skip).to(call.dtype)


def skips() -> bool:
    """Whether far keys that provably cannot matter are skipped."""
    return _skip


@contextmanager
def skipping(on: bool) -> Iterator[None]:
    """Inside, far keys that provably cannot matter are skipped, as by default, or never are."""
    global _skip
    before, _skip = _skip, on
    try:
        yield
    finally:
        _skip = before
