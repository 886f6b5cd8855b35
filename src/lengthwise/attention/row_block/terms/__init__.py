"""How each kind of bias enters a tile of scores, and how the gradient of the scores returns to it.

StripTerm   a DistanceBias whose positions follow the slots: views of one strip, no copy
SkewTerm    a QueryDistanceBias whose positions do: a product with a window of the profiles, read along its diagonals
LevelTerm   a LevelBias: keys behind a whole block of rows cost nothing, they ride in one channel of q and k
DenseTerm   a DenseBias: parts of the matrix
TileTerm    any other kind, by its own `tile` and torch.func.vjp

A term answers for some heads of one sequence, and in units of log 2 like the scores it is added to.
"""

from lengthwise.attention.call import AttentionCall
from lengthwise.attention.row_block.terms.base import LOG2E, Term, Where
from lengthwise.attention.row_block.terms.distance import SkewTerm, StripTerm
from lengthwise.attention.row_block.terms.general import DenseTerm, TileTerm
from lengthwise.attention.row_block.terms.level import LevelTerm
from lengthwise.bias import DenseBias, DistanceBias, LevelBias, QueryDistanceBias, at_least_float32, has_float64

__all__ = ["LOG2E", "Term", "Where", "make_term"]


def make_term(call: AttentionCall) -> Term:
    """How the bias of a call enters its tiles."""
    dtype = at_least_float32(call.q[:0]).dtype
    match call.bias:
        case None:
            return Term()
        case DistanceBias() if (offsets := call.slot_offsets(call.bias)) is not None:
            return StripTerm(call.bias, call, offsets, dtype)
        case QueryDistanceBias() if (offsets := call.slot_offsets(call.bias)) is not None:
            return SkewTerm(call.bias, call, offsets, dtype)
        # Steps that are learned are summed under torch.func, tile by tile.
        case LevelBias(step=step) if has_float64(call.q.device) and not (step is not None and step.requires_grad):
            return LevelTerm(call.bias.summed(), call, dtype)
        case DenseBias():
            return DenseTerm(call.bias, dtype)
        case _:
            return TileTerm(call.bias, call, dtype)
