"""A few queries against many keys, as in decoding: one fused product with a row of bias, no tiles."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lengthwise.attention import reference
from lengthwise.attention.call import Call
from lengthwise.bias import at_least_float32

FEW = 4
"""Up to so many queries are a few, here and in the C++ kernel."""


def suits(call: Call) -> bool:
    """Whether the rows are so few that nothing is gained by cutting them."""
    return not torch.compiler.is_compiling() and call.queries <= FEW and not call.needs_grad


def attend(call: Call) -> Float[Tensor, "batch head query value"]:
    """The output; what is not finite is left to the reference, which keeps it to the rows that may see it."""
    q, k, v = (at_least_float32(x) for x in (call.q, call.k, call.v))
    row = None if call.bias is None else call.bias.dense().to(q.dtype)
    if call.forbids:
        may = call.mask()
        row = (q.new_zeros(()) if row is None else row).masked_fill(~may, -torch.inf)
    if row is not None:
        row = row.expand(call.batch, call.heads, -1, -1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=row, scale=call.scale, enable_gqa=call.group > 1)
    # A row that sees nothing may come back as anything, so calls that forbid are looked at as well.
    good = bool(out.sum().isfinite()) and (row is None or bool((row.amax(-1) > -torch.inf).all()))
    return out.to(call.dtype) if good else reference.attend(call)
