"""What the functions of a kernel look up: tensors with room for more, of sizes that the kernel may know.

Lengths are open in a kernel, but what its functions look up has as many entries as the next power of two (`room`): a
kernel serves all lengths up to it, and torch's CPU kernel cannot be compiled with open lookups.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lengthwise.attention.call import AttentionCall

LEAST_ROOM = 512
Entry = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""entry(batch, head, query, key) of a bias or a mask, all of them single numbers to the compiler."""


def room(length: int) -> int:
    """The next power of two; a compiled graph of any length looks up as many entries as there are."""
    return length if torch.compiler.is_compiling() else max(LEAST_ROOM, 1 << (length - 1).bit_length())


def looked_up(x: Tensor, axes: int = 1) -> Tensor:
    """With room along the last axes."""
    return F.pad(x, [size for length in x.shape[: -axes - 1 : -1] for size in (0, room(length) - length)])


def static(x: Tensor) -> Tensor:
    """Of a size that the kernel may know. The mark stays on a tensor, so it is put on another one of the same."""
    if not torch.compiler.is_compiling():
        x = x.view_as(x)
        torch._dynamo.mark_static(x)
    return x


def per_sequence(x: Tensor, call: AttentionCall) -> Tensor:
    return static(looked_up(x).expand(call.batch, -1))


def per_head(x: Tensor, call: AttentionCall) -> Tensor:
    return static(looked_up(x).expand(call.batch, call.heads, -1))


def per_pair(x: Tensor, call: AttentionCall) -> Tensor:
    return static(looked_up(x, axes=2).expand(call.batch, call.heads, -1, -1))


def number(x: int | Tensor, call: AttentionCall) -> Tensor:
    """As a tensor: a kernel would know a plain number, or torch's CPU kernel could not be compiled with an open one."""
    return x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.int64, device=call.q.device)
