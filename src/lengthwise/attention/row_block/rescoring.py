"""Attention whose scores are rescored: blocks of whole rows of all heads, each recomputed in the backward pass.

What rescores may hold parameters of its own, so autograd must see it: every block is a checkpoint.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lengthwise.attention.call import Call
from lengthwise.attention.reference import of_heads, scored, softmax
from lengthwise.attention.row_block.visible import Visible, rows_that_see
from lengthwise.bias import EVERYTHING, Bias, DistanceBias, at_least_float32

SCORES = 2**22
"""How many scores a block may have."""


def attend(call: Call) -> Float[Tensor, "batch head query value"]:
    """The output, one block of rows after the other."""
    tainted = _tainted(call)
    k, v = (x if tainted is None else torch.where(x.isfinite(), x, 0) for x in (call.k, call.v))
    count = max(1, SCORES // max(1, call.batch * call.heads * call.keys))
    blocks = [slice(row, min(row + count, call.queries)) for row in range(0, call.queries, count)]
    run = [
        checkpoint(_block, call, rows, k, v, use_reentrant=False) if call.needs_grad else _block(call, rows, k, v)
        for rows in blocks
    ]
    out = torch.cat(run, 2) if run else call.q.new_zeros(*call.q.shape[:3], call.v.shape[3])
    if tainted is not None:
        seen = rows_that_see(Visible(call), tainted).repeat_interleave(call.group, 1)
        out = out + torch.zeros_like(seen, dtype=out.dtype).masked_fill(seen, torch.nan)[..., None]
    return out


def _tainted(call: Call) -> Bool[Tensor, "batch kv_head key"] | None:
    """Which keys or their values are not finite; None if all are."""
    if call.is_seen_finite:
        return None
    tainted = ~(call.k.isfinite().all(-1) & call.v.isfinite().all(-1))
    return tainted if tainted.any() else None


def _block(call: Call, rows: slice, k: Tensor, v: Tensor) -> Tensor:
    """Some rows as the reference defines them."""
    k, v = (of_heads(x, call.group) for x in (k, v))
    *_, scores = scored(call, k, None if call.bias is None else _rows_of(call.bias, rows), rows)
    return (softmax(scores) @ v).to(call.dtype)


def _rows_of(bias: Bias, rows: slice) -> Tensor:
    """Some rows of a bias, by operations whose gradient is always summed in the same order."""
    if not isinstance(bias, DistanceBias):
        return bias.tile(rows, EVERYTHING)
    index = (bias.query[:, rows, None] - bias.key[:, None] - bias.first).clamp(0, bias.table.shape[1] - 1)
    return F.embedding(index, at_least_float32(bias.table).T).permute(0, 3, 1, 2)
