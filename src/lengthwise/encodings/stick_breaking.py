"""Stick-breaking attention (Tan et al. 2024, section 2): every query breaks a stick, from its nearest key backwards.

    weight[i, j] = sigmoid(z[i, j]) * product of (1 - sigmoid(z[i, l])) over j < l < i             z = content + bias

Recency comes from the order alone, and what is left of the stick goes nowhere. A query does not see itself, unless
`attend_current`. It is a softmax with a sink: log weight as the score, and log of the rest r[i] as the sink. The sink
must not depend on the row, so both are raised by -log r[i], where the sink is 0; where r is below the rounding of 1 its
exact size cannot matter, and the raise stops. So it goes with no other sink and no logit scale. Causal only. Sums are
float64, and rows are rescored whole, in plain matrices block by block: tens of times as slow as a fused kernel.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lengthwise.bias import at_least_float32, has_float64, registered
from lengthwise.encodings.base import AttentionShape, Encoding, State, Tokens
from lengthwise.errors import check_flag
from lengthwise.rescore import ScoreFunction
from lengthwise.token_layout import TokenLayout

HIDDEN = -1e9
"""The score of what is not seen: finite, and 0 after any softmax with a sink of 0."""


class StickBreaking(Encoding):
    """Keys take their share of what nearer keys have left."""

    paper = "Tan et al. 2024, arXiv 2410.17980"
    by_head = ()
    two_sided = False

    def __init__(self, shape: AttentionShape, *, attend_current: bool = False) -> None:
        super().__init__(shape)
        check_flag("attend_current", attend_current)
        self.attend_current = attend_current

    def rescore(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> ScoreFunction:
        """The logarithm of each weight, raised by that of the rest."""
        nearest = layout.query_slots() + (1 if self.attend_current else 0)
        return ScoreFunction(stick_breaking, (nearest,))

    def sink(self, x: Tokens) -> Float[Tensor, " head"]:
        """0: what the rest of the stick is raised to."""
        return at_least_float32(x.new_zeros(self.shape.heads))


@registered
def stick_breaking(
    content: Tensor, bias: Tensor, q: Tensor, k: Tensor, mask: Tensor, rows: slice, nearest: Tensor
) -> Tensor:
    """log sigmoid(z) + sum of log(1 - sigmoid(z)) over nearer keys - log of the rest, for keys before `nearest`.

    As log sigmoid(z) = z + log(1 - sigmoid(z)), that is z and a sum that begins at the key itself.
    """
    before = torch.arange(content.shape[-1], device=content.device) < nearest[rows, None]
    seen = mask & before
    z = content + bias
    smallest = -math.log(torch.finfo(z.dtype).eps)
    left = (-F.softplus(z, threshold=smallest)).where(seen, 0)
    wide = torch.float64 if has_float64(z.device) else z.dtype
    down_to = left.flip(-1).cumsum(-1, dtype=wide).flip(-1)
    raised = (-left.sum(-1, keepdim=True, dtype=wide)).clamp(max=smallest)
    return (z + down_to + raised).to(z.dtype).where(seen, HIDDEN)
