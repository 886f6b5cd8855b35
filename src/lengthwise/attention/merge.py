"""Attention over parts of the keys joined into attention over all of them."""

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.bias import at_least_float32
from lengthwise.errors import describe

Part = tuple[Float[Tensor, "batch head query value"], Float[Tensor, "batch head query"]]
"""The output and the log-sum-exp of `attend(..., return_lse=True)`."""


def merge(*parts: Part) -> Part:
    """(out, lse) of all keys from those of parts that share no key; exact, with gradients.

    Parts that see nothing have lse -inf and add nothing; two of them give 0 and -inf. A sink belongs to exactly one
    part.

    """
    if not parts:
        raise ValueError("merge needs one (out, lse) or more, got none")
    for part in parts:
        if not (isinstance(part, tuple) and len(part) == 2 and part[0].shape[:3] == part[1].shape):
            raise ValueError(f"merge takes (out, lse) as attend(..., return_lse=True) gives them, got {describe(part)}")
    lses = torch.stack([lse for _, lse in parts])
    empty = (lses == -torch.inf).all(0)
    # A row of nothing but -inf would make NaN of its gradient.
    safe = lses.masked_fill(empty, 0)
    lse = safe.logsumexp(0)
    shares = (safe - lse).exp().masked_fill(empty, 0)
    out = sum(share[..., None] * at_least_float32(part) for share, (part, _) in zip(shares, parts, strict=True))
    assert isinstance(out, Tensor)
    return out.to(parts[0][0].dtype), lse.masked_fill(empty, -torch.inf)
