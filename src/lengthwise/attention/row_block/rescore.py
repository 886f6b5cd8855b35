"""Attention whose scores are rescored: blocks of whole rows of all heads, each computed again in the backward pass.

A rescore looks at whole rows, and at all heads at once. Its gradient, like that of everything it is made of, comes from
torch.func.vjp of one block at a time, so that a compiled graph never sees inside.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lengthwise.attention.call import AttentionCall
from lengthwise.attention.decode import Rows, whole_rows
from lengthwise.bias import at_least_float32

SCORES = 2**22
"""How many scores a block may have."""


def forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of every row; -inf where a row sees nothing and has no sink."""
    dtype = at_least_float32(call.q[:0]).dtype
    out = call.q.new_empty(*call.q.shape[:3], call.v.shape[3], dtype=dtype)
    lse = call.q.new_empty(call.q.shape[:3], dtype=dtype)
    for rows in _blocks(call):
        out[:, :, rows], lse[:, :, rows] = whole_rows(call, rows)
    return out, lse


def backward(call: AttentionCall, d_out: Tensor, d_lse: Tensor) -> dict[str, Tensor]:
    """The gradients of q, k, v and of what is learned, by name."""
    constant = call.with_tensors({name: x.detach() for name, x in call.tensors().items()})
    needed = {name: x for name, x in call.tensors().items() if x.requires_grad or name in ("q", "k", "v")}
    learned = {name: at_least_float32(x.detach()) for name, x in needed.items()}
    sums = {name: torch.zeros_like(x) for name, x in learned.items()}
    for rows in _blocks(call):

        def block(own: dict[str, Tensor], rows: slice = rows) -> Rows:
            return whole_rows(constant.with_tensors(own), rows)

        # Operators run below autograd, which torch.func does not mind.
        pull = torch.func.vjp(block, learned)[1]
        (gradients,) = pull((d_out[:, :, rows], d_lse[:, :, rows]))
        for name, gradient in gradients.items():
            sums[name] += gradient
    return {name: total.to(needed[name].dtype) for name, total in sums.items()}


def _blocks(call: AttentionCall) -> Iterator[slice]:
    count = max(1, SCORES // max(1, call.batch * call.heads * call.keys))
    for row in range(0, call.queries, count):
        yield slice(row, min(row + count, call.queries))
