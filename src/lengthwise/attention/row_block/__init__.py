"""Exact attention for every call in tiles, forward and backward: nothing with queries x keys numbers is alive.

Plain PyTorch inside two operators, see custom_op beside this folder, so that torch.compile and torch.export see one
node each, with lengths left open where the caller leaves them open. It is the backend of compiled graphs, of float64,
of biases that are functions and of machines without a compiler. Read in this order:

passes      forward and backward over the tiles of a call, or over whole rows where scores are rescored
tiles       a call cut in tiles
terms       how each kind of bias enters a tile, and how its gradient returns
bounds      the keys that provably cannot matter

Tried on the CPU; on other devices untested.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lengthwise.attention import custom_op, decode
from lengthwise.attention.backend import Output, Plan, Refusal
from lengthwise.attention.call import AttentionCall
from lengthwise.attention.row_block import passes
from lengthwise.attention.row_block.passes import skipped_share

__all__ = ["plan", "run", "skipped_share"]


def _forward(call: AttentionCall, _notes: custom_op.Notes) -> tuple[Tensor, Tensor]:
    return passes.forward(call.with_known_start())


def _backward(call: AttentionCall, _notes: custom_op.Notes, *saved: Tensor) -> dict[str, Tensor]:
    return passes.backward(call.with_known_start(), *saved)


OPERATORS = custom_op.operators("row_block", _forward, _backward)


@dataclass(frozen=True)
class RowBlockPlan(Plan):
    """Whether whole rows at once are cheaper than tiles."""

    whole_rows: bool


def plan(call: AttentionCall) -> Plan | Refusal:
    """Every call but one that a compiled graph cannot name."""
    if torch.compiler.is_compiling():
        functions = [function.__name__ for function in custom_op.nameless_functions(call)]
        if functions:
            return Refusal.because(
                f"a compiled graph can only name a registered function: decorate {functions[0]} with lw.registered"
            )
    return RowBlockPlan(whole_rows=call.is_decoding)


def run(call: AttentionCall, plan: Plan) -> Output:
    """The output and the log-sum-exp, with gradients for everything that is learned."""
    assert isinstance(plan, RowBlockPlan)
    return decode.run(call) if plan.whole_rows else custom_op.attend(OPERATORS, call)
