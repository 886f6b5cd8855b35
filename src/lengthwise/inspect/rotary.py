"""The kernel of a rotary head: how the mean query scores the mean key at every distance.

    kernel[d] = scale * R_d E[q] . E[k]          E over the tokens, before they are rotated

What a head would attend to if all tokens were alike: the positional part of an encoding that adds nothing.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.bias import at_least_float32
from lengthwise.model.families.base import AttentionRecord


def rotary_kernel(record: AttentionRecord) -> Float[Tensor, "head distance"] | None:
    """The kernel of every head; None where the layer does not rotate, or its rotation cannot be undone."""
    rotary = record.rotary
    unrotated = None if rotary is None else rotary.unrotated()
    if rotary is None or unrotated is None:
        return None
    queries = record.shape[2]
    means = [_mean(x, rotary.query_mask).expand(-1, -1, queries, -1) for x in unrotated]
    q, k = rotary.rotate(*means)
    at_zero = k[:, :, :1].repeat_interleave(q.shape[1] // k.shape[1], 1)
    return record.scale * (q * at_zero).sum(-1)[0].float().cpu()


def _mean(x: Float[Tensor, "batch head token dim"], mask: Bool[Tensor, "#batch token"] | None) -> Tensor:
    """The mean over tokens and sequences, (1, head, 1, dim)."""
    if mask is None:
        return at_least_float32(x).mean((0, 2), keepdim=True)
    real = mask.expand(x.shape[0], -1)[:, None, :, None]
    return at_least_float32(x).masked_fill(~real, 0).sum((0, 2), keepdim=True) / real.sum()
