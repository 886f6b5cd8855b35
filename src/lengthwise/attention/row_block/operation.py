"""What runs inside the operators: keys and values made finite, a term for the bias, far keys left out, the tiles."""

from dataclasses import replace

import torch
from torch import Tensor

from lengthwise.attention.call import Call
from lengthwise.attention.row_block.backward import backward
from lengthwise.attention.row_block.distance_terms import distance_term
from lengthwise.attention.row_block.far_keys import first_keys, share_skipped
from lengthwise.attention.row_block.forward import forward
from lengthwise.attention.row_block.level_term import LevelTerm
from lengthwise.attention.row_block.terms import Term
from lengthwise.attention.row_block.tile_terms import DenseTerm, FunctionTerm
from lengthwise.attention.row_block.tiles import Tiles, sizes
from lengthwise.attention.row_block.visible import Visible, rows_that_see
from lengthwise.bias import DenseBias, DistanceBias, FunctionBias, LevelBias, at_least_float32


def run_forward(call: Call, *, skip: bool) -> tuple[Tensor, Tensor]:
    """The output in float32 or better and the log-sum-exp of every row."""
    clean = _clean(call)
    visible = Visible(clean)
    term = make_term(visible)
    out, lse = forward(Tiles(visible, term, _firsts(visible, term) if skip else None))
    if clean is not call:
        tainted = ~(call.k.isfinite().all(-1) & call.v.isfinite().all(-1))
        seen = rows_that_see(visible, tainted).repeat_interleave(call.group, 1)
        out.masked_fill_(seen[..., None], torch.nan)
    return out, lse


def run_backward(call: Call, d_out: Tensor, out: Tensor, lse: Tensor, *, skip: bool) -> list[Tensor | None]:
    """The gradients of q, k, v and of the tensors of the bias; None for those that need none."""
    clean = _clean(call)
    visible = Visible(clean)
    if clean is not call:
        # The output holds NaN for rows that saw what is not finite; the gradient is that of the finite rest.
        out, lse = forward(Tiles(visible, make_term(visible), None))
    term = make_term(visible)
    firsts = _firsts(visible, term, d_out, out, lse) if skip else None
    d_q, d_k, d_v = backward(Tiles(visible, term, firsts), d_out, out, lse)
    if call.group > 1:
        d_k, d_v = (x.unflatten(1, (-1, call.group)).sum(2) for x in (d_k, d_v))
    if clean is not call:
        d_k, d_v = (d.masked_fill_(~x.isfinite(), 0) for d, x in ((d_k, call.k), (d_v, call.v)))
    return [d_q.to(call.dtype), d_k.to(call.dtype), d_v.to(call.dtype), *term.gradients()]


def skipped_share(call: Call) -> float:
    """How much of the forward work that causality leaves is skipped in this call, 0 to 1."""
    clean = _clean(replace(call, start=int(call.start)))
    visible = Visible(clean)
    return share_skipped(clean, _firsts(visible, make_term(visible)), sizes(clean, whole=False)[0])


def _firsts(visible: Visible, term: Term, *known: Tensor) -> list[list[list[int]]] | None:
    return first_keys(visible, term, sizes(visible.call, whole=term.whole)[0], *known)


def make_term(visible: Visible) -> Term:
    """How the bias of a call enters its tiles."""
    call, dtype = visible.call, at_least_float32(visible.call.q).dtype
    match call.bias:
        case DistanceBias():
            return distance_term(call.bias, visible, dtype)
        case LevelBias():
            return LevelTerm(call.bias, call, dtype)
        case FunctionBias():
            return FunctionTerm(call.bias, call, dtype)
        case DenseBias():
            return DenseTerm(call.bias, dtype)
        case _:
            return Term()


def _clean(call: Call) -> Call:
    """The call with finite keys and values: in a product a weight of 0 does not stop an infinity."""
    if bool(call.k.sum(dtype=torch.float64).isfinite() & call.v.sum(dtype=torch.float64).isfinite()):
        return call
    return replace(call, k=call.k.nan_to_num(0, 0, 0), v=call.v.nan_to_num(0, 0, 0))
