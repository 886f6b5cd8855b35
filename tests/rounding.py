"""How far off a result may be, derived from its inputs and not from what some code happens to give.

    allowed = 2 |plain - exact|                     twice the error of the definition at the same precision,
            + eps sqrt(terms) |exact|               a sum in another order,
            + ROUNDINGS noise                       and what rounding the inputs once more would change

The last is what is left where terms cancel: a result near 0 is made of large numbers, each of which has a rounding.
It is drawn: every number of every input is changed by a random rounding, and the exact result computed again.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

EPS = torch.finfo(torch.float32).eps
DRAWS = 8
ROUNDINGS = 4
"""A number goes through about so many roundings on its way: as an input, in a product, in a score and in a weight."""


def rounding_noise(
    run: Callable[[Tensors], Tensors], inputs: Mapping[str, Tensor], eps: float = EPS
) -> dict[str, float]:
    """By the name of a result, the norm of its change under random roundings of the inputs, root mean square."""
    exact = run(dict(inputs))
    generator = torch.Generator().manual_seed(0)
    totals = dict.fromkeys(exact, 0.0)
    for _ in range(DRAWS):
        rounded = {
            name: x * (1 + eps * torch.randn(x.shape, generator=generator, dtype=torch.float64))
            for name, x in inputs.items()
        }
        for name, value in run(rounded).items():
            totals[name] += float((value - exact[name]).square().sum()) / DRAWS
    return {name: total**0.5 for name, total in totals.items()}


def assert_within_rounding(
    ours: Tensors, plain: Tensors, exact: Tensors, noise: Mapping[str, float], *, terms: int, eps: float = EPS
) -> None:
    """Every result by name, -inf where it should be; inside, numbers are rounded to `eps`, whatever comes out."""
    for name, truth in exact.items():
        got, theirs = ours[name], plain[name]
        assert got.shape == truth.shape, name
        assert got.dtype == theirs.dtype, name
        assert torch.equal(got == -torch.inf, truth == -torch.inf), name
        got, theirs, truth = (x.double().masked_fill(x == -torch.inf, 0) for x in (got, theirs, truth))
        size = float(truth.norm())
        half = torch.finfo(ours[name].dtype).eps if ours[name].dtype.itemsize < 4 else 0.0
        error, off = float((got - truth).norm()), float((theirs - truth).norm())
        allowed = 2 * off + (eps * terms**0.5 + half) * size + ROUNDINGS * noise[name]
        assert error <= allowed, f"{name} is off by {error:.3g} of {size:.3g}, allowed are {allowed:.3g}"
