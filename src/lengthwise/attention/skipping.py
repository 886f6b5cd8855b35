"""Whether keys that provably cannot matter are left out, and what proves it.

For a row i and a block of keys B behind it, with m the row's logit scale, 1 if it has none:

    weight of a key in B <= exp(upper - lower),   upper = m (|q_i| max|k_B| scale + largest bias in B)

`lower` is a score that the row really has, which bounds its log-sum-exp from below. Where the sum of count_B
exp(upper - lower) is below half a unit in the last place, and so is the same sum weighted by what the values and the
gradients of the block could add, leaving the block out changes nothing that the precision can show. A sink only lowers
what is left. NaN and infinity mean keep; no bound looks at a key that the row does not see; rows whose logit scale is
not positive are never skipped, and neither is anything where a band leaves out a row's own key.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_skipping: ContextVar[bool] = ContextVar("lengthwise_skipping", default=True)


def is_skipping() -> bool:
    """Whether skipping is on here; always so for a graph that is being compiled, which asks again where it runs."""
    return torch.compiler.is_compiling() or _skipping.get()


@contextmanager
def skipping(on: bool) -> Iterator[None]:
    """Inside, keys that provably cannot matter are left out, as by default, or never are."""
    token = _skipping.set(on)
    try:
        yield
    finally:
        _skipping.reset(token)
