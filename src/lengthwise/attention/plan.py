"""What passes between `attend` and a backend: a backend plans a call or refuses it in words, then runs its plan.

A backend is a module with

    plan(call) -> Plan | Refusal
    run(call, plan) -> (out, lse)          lse may be None where the call does not ask for it

Whatever a plan finds out it holds, so that running it computes nothing twice. Backends share the modules of this folder
and never import one another.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

Output = tuple[Float[Tensor, "batch head query value"], Float[Tensor, "batch head query"] | None]


class Plan:
    """How a backend will run a call; a subclass holds what it found out."""


@dataclass(frozen=True)
class Refusal:
    """Why a backend cannot take a call."""

    reasons: tuple[str, ...]

    @classmethod
    def because(cls, *reasons: str) -> "Refusal":
        """With the reasons in words."""
        return cls(reasons)
