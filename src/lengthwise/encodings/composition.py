"""Several encodings as one: "rope+fox", "alibi+ssmax+sink", "kerple+dapev2".

    embed, rotate    one after the other, in the order of the names
    state            that of each part under its name: "fox.step"
    bias             summed
    logit_scale      multiplied
    sink             joined: log(exp(a) + exp(b)), the weight that both would take
    rescore          that of the one part that has one; it is given the sum of the biases

Options go by part: {"rope": {"base": 500_000.0}}.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lengthwise.bias import Bias, SumBias, at_least_float32
from lengthwise.encodings.base import AttentionShape, Encoding, Hook, Keys, Queries, State, Tokens, Zone
from lengthwise.errors import OptionError, describe
from lengthwise.rescore import Rescore
from lengthwise.token_layout import TokenLayout, Window


class Composition(Encoding):
    """Encodings that act together; `compose` makes a class of it for every list of names."""

    names: ClassVar[tuple[str, ...]]
    members: ClassVar[tuple[type[Encoding], ...]]

    def __init__(self, shape: AttentionShape, **options: Mapping[str, object]) -> None:
        super().__init__(shape)
        own = {
            name: member.from_options(name, shape, options.get(name) or {})
            for name, member in zip(self.names, self.members, strict=True)
        }
        self.parts = nn.ModuleDict(own)
        biased = [part for part in own.values() if part.overrides("bias")]
        self.kind = SumBias if len(biased) > 1 else biased[0].kind if biased else None
        self.context_free = bool(biased) and all(part.context_free for part in biased)
        self.length_dependent = any(part.length_dependent for part in own.values())
        self.symmetric = all(part.symmetric for part in own.values())

    @classmethod
    def from_options(cls, name: str, shape: AttentionShape, options: Mapping[str, object]) -> Encoding:
        """One with options by part."""
        for part, own in options.items():
            if part not in cls.names:
                raise OptionError(
                    f"the options of {name!r} go by part, {' or '.join(map(repr, cls.names))}, got {part!r}; e.g. "
                    f"{{{cls.names[0]!r}: {{...}}}}"
                )
            if not isinstance(own, Mapping):
                raise OptionError(f"the options of the part {part!r} must be a dictionary, got {describe(own)}")
        return cls(shape, **cast(Mapping[str, Any], options))

    @classmethod
    def overrides(cls, hook: Hook) -> bool:
        """Whether a part has that hook."""
        return any(member.overrides(hook) for member in cls.members)

    @classmethod
    def takes_window(cls, window: Window) -> bool:
        """Whether all parts do."""
        return all(member.takes_window(window) for member in cls.members)

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names of the parts, each of which has options of its own."""
        return cls.names

    def reset_parameters(self) -> None:
        """Those of all parts, as each of them says."""
        for _, part in self._parts():
            part.reset_parameters()

    def _pick_heads(self, chosen: list[int], total: int) -> None:
        for _, part in self._parts():
            part.shape = replace(part.shape, heads=len(chosen))
            part._pick_heads(chosen, total)

    def embed(self, x: Tokens, layout: TokenLayout) -> Tokens:
        """By all parts, one after the other."""
        for _, part in self._parts():
            x = part.embed(x, layout)
        return x

    def state(
        self,
        x: Tokens,
        key_mask: Bool[Tensor, "#batch position"] | None = None,
        *,
        q: Tensor | None = None,
        k: Tensor | None = None,
    ) -> State | None:
        """The states of all parts, each name behind that of its part."""
        states = {name: part.state(x, key_mask, **_own_qk(part, "state", q, k)) or {} for name, part in self._parts()}
        return {f"{name}.{key}": value for name, own in states.items() for key, value in own.items()} or None

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """By all parts, one after the other."""
        for name, part in self._parts():
            q, k = part.rotate(q, k, layout, _own(state, name))
        return q, k

    def zones(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> list[Zone]:
        """Those of the part that has several, turned by all others too."""
        zones = [Zone(q, k)]
        for name, part in self._parts():
            own = _own(state, name)
            zones = [
                turned._replace(window=turned.window or zone.window)
                for zone in zones
                for turned in part.zones(zone.q, zone.k, layout, own)
            ]
        return zones

    def bias(
        self,
        x: Tokens,
        layout: TokenLayout,
        state: State | None = None,
        *,
        q: Tensor | None = None,
        k: Tensor | None = None,
    ) -> Bias | None:
        """The sum of the biases of all parts."""
        every = [part.bias(x, layout, _own(state, name), **_own_qk(part, "bias", q, k)) for name, part in self._parts()]
        terms = tuple(bias for bias in every if bias is not None)
        return SumBias(terms) if len(terms) > 1 else terms[0] if terms else None

    def rescore(self, x: Tokens, layout: TokenLayout, state: State | None = None) -> Rescore | None:
        """That of the part that has one."""
        for name, part in self._parts():
            if part.overrides("rescore"):
                return part.rescore(x, layout, _own(state, name))
        return None

    def logit_scale(
        self, x: Tokens, layout: TokenLayout, *, window: Window | None = None
    ) -> Float[Tensor, "#batch #head #query"] | None:
        """The product of the factors of all parts."""
        own = {} if window is None else {"window": window}
        return _joined(torch.mul, [part.logit_scale(x, layout, **own) for _, part in self._parts()])

    def sink(self, x: Tokens) -> Float[Tensor, " head"] | Float[Tensor, "#batch head query"] | None:
        """One that takes as much weight as those of all parts together."""
        every = [part.sink(x) for _, part in self._parts()]
        sinks = [sink for sink in every if sink is not None]
        by_row = 3 in [sink.ndim for sink in sinks]
        spread = [at_least_float32(sink[None, :, None] if by_row and sink.ndim == 1 else sink) for sink in sinks]
        return _joined(torch.logaddexp, spread)

    @property
    def limit(self) -> int | None:
        """The least of its parts' limits."""
        return min((part.limit for _, part in self._parts() if part.limit is not None), default=None)

    @property
    def turns_by_state(self) -> bool:
        """Whether a part does."""
        return any(part.turns_by_state for _, part in self._parts())

    @property
    def rotates_late(self) -> bool:
        """Whether a part does."""
        return any(part.rotates_late for _, part in self._parts())

    def _parts(self) -> list[tuple[str, Encoding]]:
        return [(name, cast(Encoding, part)) for name, part in self.parts.items()]

    def __reduce__(self) -> tuple[Any, ...]:
        """By the names of the parts: pickle cannot find a class that was made while running."""
        return _unfilled, (self.names, self.members), self.__dict__


@functools.cache
def compose(names: tuple[str, ...], members: tuple[type[Encoding], ...]) -> type[Composition]:
    """The class of a composition, or an error where its parts cannot act together."""
    name = "+".join(names)
    if len(set(names)) != len(names):
        raise ValueError(f"each part of a composition must be there once, got {name!r}")
    parts = list(zip(names, members, strict=True))
    rescores = [own for own, member in parts if member.overrides("rescore")]
    if len(rescores) > 1:
        raise ValueError(
            f"at most one part of a composition can replace the scores, got {' and '.join(map(repr, rescores))} in "
            f"{name!r}"
        )
    # Who replaces the scores and has a sink, as stick-breaking does, gives logarithms of weights that sum to 1 with it.
    whole = [own for own, member in parts if member.overrides("rescore") and member.overrides("sink")]
    changing = [
        own
        for own, member in parts
        if own not in whole and (member.overrides("logit_scale") or member.overrides("sink"))
    ]
    if whole and changing:
        raise ValueError(
            f"{whole[0]!r} gives whole weights, of which no other part can scale or take any, got {changing[0]!r} in "
            f"{name!r}"
        )
    turning = [(own, member) for own, member in parts if member.overrides("rotate")]
    last = [own for own, member in turning if member.turns_last]
    if last and last != [turning[-1][0]]:
        raise ValueError(f"{last[0]!r} must be the last part that turns queries and keys, got {name!r}")
    reading = [own for own, member in parts if member.rescores_qk]
    if last and reading:
        raise ValueError(
            f"{reading[0]!r} reads queries and keys themselves, and after {last[0]!r} only their products have a "
            f"meaning, got {name!r}"
        )
    facts = {
        "names": names,
        "members": members,
        "paper": "; ".join(dict.fromkeys(member.paper for member in members)),
        "two_sided": all(member.two_sided for member in members),
        "turns_last": any(member.turns_last for member in members),
        "replaces_content": any(member.replaces_content for member in members),
        "uses_qk": tuple(dict.fromkeys(hook for member in members for hook in member.uses_qk)),
    }
    return type(name, (Composition,), facts)


def _unfilled(names: tuple[str, ...], members: tuple[type[Encoding], ...]) -> Composition:
    cls = compose(names, members)
    return cls.__new__(cls)


def _own(state: State | None, part: str) -> State | None:
    """The state of one part, as it named it."""
    prefix = f"{part}."
    own = {name.removeprefix(prefix): x for name, x in (state or {}).items() if name.startswith(prefix)}
    return own or None


def _own_qk(part: Encoding, hook: Hook, q: Tensor | None, k: Tensor | None) -> dict[str, Tensor]:
    return {} if q is None or k is None else part.own_qk(hook, q, k)


def _joined(join: Callable[[Tensor, Tensor], Tensor], every: Sequence[Tensor | None]) -> Tensor | None:
    present = [x for x in every if x is not None]
    return functools.reduce(join, present) if present else None
