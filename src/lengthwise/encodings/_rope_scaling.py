"""How RoPE's frequencies are stretched to reach beyond the training length: one class a rule.

    linear         frequency / factor                                          Chen et al. 2023, arXiv 2306.15595
    ntk            base * factor ** (d / (d - 2))                              bloc97 2023
    dynamic        the same, with a factor that grows with the sequence        emozilla 2023
    yarn           fast pairs kept, slow pairs divided, a ramp between         Peng et al. 2023, arXiv 2309.00071
    longrope       a divisor per pair, one list within and one beyond          Ding et al. 2024, arXiv 2402.13753
    llama3         as yarn, the ramp in wavelengths                            Dubey et al. 2024, arXiv 2407.21783
    proportional   the slowest pairs do not turn at all                        Barbero et al. 2024, arXiv 2410.06205

d is head_dim. Every rule gives what transformers' modeling_rope_utils gives for one pass without padding.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lengthwise.bias.constants import constant
from lengthwise.errors import LARGEST, check_number, describe
from lengthwise.token_layout import Positions

Frequencies = Float[Tensor, "*position pair"]


@dataclass(frozen=True)
class RopeBase:
    """The frequencies before any stretching."""

    base: float
    dim: int
    train_length: int

    def exponents(self, device: torch.device) -> Float[Tensor, " pair"]:
        """2k / d."""
        return torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim

    def plain(self, device: torch.device) -> Float[Tensor, " pair"]:
        """base ** (-2k / d)."""
        return 1 / self.base ** self.exponents(device)


@dataclass(frozen=True)
class Scaling:
    """No stretching; the base of all rules."""

    rope_base: RopeBase
    length_dependent: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "rope_base" or isinstance(value, bool) or value is None:
                continue
            name, lists = THEIR_NAMES.get(f.name, f.name), f.name in ("short_factor", "long_factor")
            if lists and not isinstance(value, tuple):
                raise ValueError(f"{name} must be a list of numbers, one per pair, got {describe(value)}")
            for single in value if isinstance(value, tuple) else (value,):
                check_number(name, single, "See the paper of the rule.", most=1.0 if f.name == "part" else LARGEST)

    def frequencies(self, length: Positions) -> Frequencies:
        """Radians per position, per pair; `length` is that of each token's document."""
        return self.rope_base.plain(length.device)

    @property
    def factor(self) -> float:
        """What cosine and sine are multiplied by."""
        return 1.0


@dataclass(frozen=True)
class Linear(Scaling):
    """Position interpolation."""

    stretch: float

    def frequencies(self, length: Positions) -> Frequencies:
        """All pairs slowed alike."""
        return self.rope_base.plain(length.device) / self.stretch


@dataclass(frozen=True)
class Ntk(Scaling):
    """NTK-aware: a larger base, so that fast pairs keep their speed."""

    stretch: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_pairs(self.rope_base)

    def frequencies(self, length: Positions) -> Frequencies:
        """Slow pairs slowed by the factor, fast ones hardly."""
        base = self.rope_base.base * self.stretch ** (self.rope_base.dim / (self.rope_base.dim - 2))
        return 1 / base ** self.rope_base.exponents(length.device)


@dataclass(frozen=True)
class DynamicNtk(Scaling):
    """NTK-aware, from the training length on, by as much as the sequence needs."""

    stretch: float
    length_dependent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_pairs(self.rope_base)

    def frequencies(self, length: Positions) -> Frequencies:
        """Each token's by the length of its document."""
        relative = length.clamp(min=self.rope_base.train_length).float()[..., None] / self.rope_base.train_length
        growth = self.stretch * relative - (self.stretch - 1)
        base = self.rope_base.base * growth ** (self.rope_base.dim / (self.rope_base.dim - 2))
        return 1 / base ** self.rope_base.exponents(length.device)


@dataclass(frozen=True)
class Yarn(Scaling):
    """Pairs that turn more than beta_fast times in the training length stay, below beta_slow they are divided."""

    stretch: float
    original_length: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def frequencies(self, length: Positions) -> Frequencies:
        """A ramp from the plain to the divided ones."""
        low, high = self._pair_turning(self.beta_fast), self._pair_turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rope_base.dim - 1)
        pairs = torch.arange(self.rope_base.dim // 2, dtype=torch.float32, device=length.device)
        divided = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        plain = self.rope_base.plain(length.device)
        return plain / self.stretch * divided + plain * (1 - divided)

    def _pair_turning(self, times: float) -> float:
        """The pair, as a real number, that turns so many times within the training length."""
        wavelength = (self.original_length or self.rope_base.train_length) / times
        return self.rope_base.dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(self.rope_base.base))

    @property
    def factor(self) -> float:
        """0.1 log(factor) + 1 if nothing else is said; a ratio of two such where both mscales are given."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.stretch) + 1 if self.stretch > 1 else 1.0


@dataclass(frozen=True)
class LongRope(Scaling):
    """A searched divisor per pair: short_factor within the training length, long_factor beyond."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    stretch: float = 1.0
    original_length: int | None = None
    attention_factor: float | None = None
    length_dependent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("short_factor", "long_factor"):
            if len(getattr(self, name)) != self.rope_base.dim // 2:
                raise ValueError(
                    f"{name} must have one number per pair of channels, {self.rope_base.dim // 2}, got "
                    f"{len(getattr(self, name))}"
                )

    def frequencies(self, length: Positions) -> Frequencies:
        """Each token's by whether its document is longer than the training length."""
        both = constant((tuple(self.short_factor), tuple(self.long_factor)), length.device, torch.float32)
        divisor = both[(length > self._original).long()]
        return 1 / (divisor * self.rope_base.base ** self.rope_base.exponents(length.device))

    @property
    def _original(self) -> int:
        return self.original_length or self.rope_base.train_length

    @property
    def factor(self) -> float:
        """sqrt(1 + log(factor) / log(original length)) if nothing else is said."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.stretch) / math.log(self._original)) if self.stretch > 1 else 1.0


@dataclass(frozen=True)
class Llama3(Scaling):
    """Short wavelengths stay, long ones are divided, those between are mixed."""

    stretch: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must be above low_freq_factor, got {self.high_freq_factor} and "
                f"{self.low_freq_factor}; Llama 3 has 4 and 1"
            )

    def frequencies(self, length: Positions) -> Frequencies:
        """By how often a pair turns within the training length."""
        plain = self.rope_base.plain(length.device)
        turns = (self.original_length or self.rope_base.train_length) * plain / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain * kept + plain / self.stretch * (1 - kept)


@dataclass(frozen=True)
class Proportional(Scaling):
    """p-RoPE: only the fastest part of the pairs turns."""

    stretch: float = 1.0
    part: float = 1.0

    def frequencies(self, length: Positions) -> Frequencies:
        """0 for the slowest pairs."""
        plain = self.rope_base.plain(length.device) / self.stretch
        turning = int(self.part * self.rope_base.dim // 2)
        return plain * (torch.arange(len(plain), device=length.device) < turning)


SCALINGS: dict[str, type[Scaling]] = {
    "default": Scaling,
    "linear": Linear,
    "ntk": Ntk,
    "dynamic": DynamicNtk,
    "yarn": Yarn,
    "longrope": LongRope,
    "llama3": Llama3,
    "proportional": Proportional,
}

# What the field's own dictionaries call our fields.
NAMES = {
    "factor": "stretch",
    "original_max_position_embeddings": "original_length",
    "partial_rotary_factor": "part",
}
THEIR_NAMES = {ours: theirs for theirs, ours in NAMES.items()}


def make_scaling(options: Mapping[str, object] | None, rope_base: RopeBase) -> Scaling:
    """A rule from a plain dictionary: "type" (or "rope_type") and the rule's own numbers, e.g. "factor"."""
    if not isinstance(options, Mapping | None):
        raise TypeError(
            f'scaling must be a dictionary such as {{"type": "yarn", "factor": 8.0}}, got {describe(options)}'
        )
    given = {name: value for name, value in (options or {"type": "default"}).items() if value is not None}
    kind = given.pop("type", given.pop("rope_type", None))
    if not isinstance(kind, str) or kind not in SCALINGS:
        known = ", ".join(map(repr, SCALINGS))
        raise ValueError(f"unknown rope scaling {kind!r}; its 'type' must be one of {known}")
    rule = SCALINGS[kind]
    own = {f.name: f for f in fields(rule) if f.name != "rope_base"}
    values = {NAMES.get(name, name): tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    missing = [THEIR_NAMES.get(name, name) for name, f in own.items() if f.default is MISSING and name not in values]
    wrong = [name for name in given if NAMES.get(name, name) not in own]
    if missing or wrong:
        known = ", ".join(repr(THEIR_NAMES.get(name, name)) for name in own) or "none"
        fault = f"lacks {missing[0]!r}" if missing else f"does not know {wrong[0]!r}"
        raise ValueError(f"rope scaling {kind!r} {fault}; known: {known}")
    return rule(rope_base, **values)


def _check_pairs(rope_base: RopeBase) -> None:
    if rope_base.dim <= 2:
        raise ValueError(
            f"NTK scaling must have two pairs of channels or more, for its d / (d - 2), got head_dim {rope_base.dim}; "
            "'linear' has no such limit"
        )
