"""A short causal convolution over a state: each channel by itself, along the tokens, within its own document.

What is cached is the input of the convolution, so that it needs no cache of its own: it is worked anew where it is
used, over all keys. A window's cache would cut its reach, so encodings that use it have `windowed` False.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lengthwise.bias import at_least_float32
from lengthwise.token_layout import TokenLayout


def convolved(
    numbers: Float[Tensor, "batch head key channel"], weight: Float[Tensor, "head channel tap"], layout: TokenLayout
) -> Float[Tensor, "batch head key channel"]:
    """out[t] = sum of weight[tap] * numbers[t - (taps - 1) + tap]; nothing is before the first token of a document."""
    weight = at_least_float32(weight)
    if layout.ring is None:
        return _convolved(numbers, weight, layout)
    outs = []
    for (own, first), before in zip(layout.ring.pieces, layout.ring.before(numbers, weight.shape[2] - 1), strict=True):
        earlier = before.shape[2]
        near = slice(first - earlier, first + own.stop - own.start)
        every = torch.cat([before, numbers[:, :, own]], 2)
        outs.append(_convolved(every, weight, layout.whole.block(near, near))[:, :, earlier:])
    return torch.cat(outs, 2)


def _convolved(
    numbers: Float[Tensor, "batch head key channel"], weight: Float[Tensor, "head channel tap"], layout: TokenLayout
) -> Float[Tensor, "batch head key channel"]:
    taps, keys = weight.shape[2], numbers.shape[2]
    total = numbers * weight[:, None, :, -1]
    # Where a position does not rise a document begins, also under an explicit mask, which knows no documents.
    begins = F.pad(layout.key[:, 1:] <= layout.key[:, :-1], (1, 0))
    if layout.key_documents is not None:
        begins = begins | F.pad(layout.key_documents[:, 1:] != layout.key_documents[:, :-1], (1, 0))
    document = begins.cumsum(1)
    for back in range(1, taps):
        same = F.pad(document, (back, 0), value=-1)[:, :keys] == document
        before = F.pad(numbers, (0, 0, back, 0))[:, :, :keys].where(same[:, None, :, None], 0)
        total = total + before * weight[:, None, :, taps - 1 - back]
    return total


def reset_convolution(weight: nn.Parameter) -> None:
    """Torch's own start of a convolution: U(-1 / sqrt(taps), 1 / sqrt(taps))."""
    limit = weight.shape[2] ** -0.5
    nn.init.uniform_(weight, -limit, limit)
