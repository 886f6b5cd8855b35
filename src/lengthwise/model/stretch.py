"""Stretch a RoPE model beyond the length that it was trained at, without training: lw.stretch(model, "self-extend:8").

    yarn:8, linear:8, ntk:8, dynamic:8, llama3:8    a scaling of its angles; a mapping for all numbers of a rule
    rerope:W                  every distance from W on is W                           Su 2023, kexue.fm/9708
    leaky-rerope:W:K          beyond W distances grow K times more slowly             Su 2023, kexue.fm/9708
    self-extend:G[:W]         beyond W, by default L / 4, tokens count in groups      Jin et al. 2024, arXiv 2401.01325
    dca[:C[:S]]               chunks of C; between chunks no distance is above S      An et al. 2024, arXiv 2402.17463
    lm-infinite:W[:N]         the nearest W keys, and the first N, at distance W      Han et al. 2023, arXiv 2308.16137
    streaming:W[:N]           the nearest W keys, and the first N, without the gap    Xiao et al. 2023, arXiv 2309.17453
    window[:W]                the nearest W keys, by default L: the control, which uses no far text at all
    logn                      scores times max(1, log n / log L); also behind another: "rerope:1024+logn"

L is the trained length. With d = query - key, both counted in real tokens of the own document, a method is a list of
bands, in each of which queries and keys turn by positions of their own; the bands are merged by log-sum-exp, exactly.
Keys are cached unrotated. Layers that see no further than L by a window of their own stay as they are.
"""

import copy
import difflib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar

from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from lengthwise.encodings._rope_scaling import SCALINGS, make_scaling
from lengthwise.encodings._rotary import Waves, turn
from lengthwise.encodings.base import Encoding, Keys, Queries, State, Tokens, Zone
from lengthwise.encodings.composition import Composition
from lengthwise.encodings.length_scales import LogN
from lengthwise.encodings.registry import build, find
from lengthwise.encodings.rope import Rope
from lengthwise.errors import OptionError, check_int, describe
from lengthwise.model.attention import NAME, Output, attend_zones
from lengthwise.model.families.layers import AttentionLayer, attention_layers
from lengthwise.model.families.swap import LayerCall, Swap, swap_attention
from lengthwise.model.modeling import LengthwiseAttention, LengthwisePreTrainedModel
from lengthwise.model.schedule import LayerSpec
from lengthwise.token_layout import Band, TokenLayout, Window

RECORD = "_lengthwise_stretched"
"""Where a model keeps what was done to it."""
LOG_N = "logn"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Llama 3's own, for "llama3:8"."""

Index = Int[Tensor, "#batch _"]
"""Tokens by their number in their own document."""


@dataclass(frozen=True)
class Turning:
    """By which positions queries and keys turn where they meet in a band: number / divisor; None is position 0."""

    band: Band
    query: Index
    key: Index | None
    divisor: int = 1


@dataclass(frozen=True)
class Method(ABC):
    """Bands, from the numbers behind a method's name and the trained length."""

    usage: ClassVar[str]
    """How it is written."""
    train_length: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name == "train_length":
                check_int(f"{field.name} of {self.usage!r}", value)
        if self.near is not None and self.near > self.train_length:
            raise OptionError(
                f"{self.usage!r} must leave distances below the trained length, {self.train_length:,}, as they are, "
                f"got {self.near:,}"
            )

    @property
    @abstractmethod
    def near(self) -> int | None:
        """Up to where distances stay as they are, if that must be below the trained length."""

    @abstractmethod
    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """The bands, which share no pair."""


@dataclass(frozen=True)
class PlainWindow(Method):
    """The nearest keys alone: what every other method must beat where far text matters."""

    usage: ClassVar[str] = "window[:W]"
    window: int | None = None

    @property
    def near(self) -> None:
        """A window beyond the trained length is a question that can be asked."""
        return None

    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """One band."""
        return [Turning(Band(0, self.window or self.train_length), query, key)]


@dataclass(frozen=True)
class ReRope(Method):
    """min(d, W)."""

    usage: ClassVar[str] = "rerope:W"
    window: int

    @property
    def near(self) -> int:
        """W."""
        return self.window

    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """Far keys do not turn, and their queries turn as at W."""
        return [_near(self.window, query, key), Turning(Band(self.window), _constant(self.window, query), None)]


@dataclass(frozen=True)
class LeakyReRope(Method):
    """d, beyond W it is W + (d - W) / K."""

    usage: ClassVar[str] = "leaky-rerope:W:K"
    window: int
    factor: int

    @property
    def near(self) -> int:
        """W."""
        return self.window

    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """W + (i - j - W) / K = ((i + (K - 1) W) - j) / K: whole numbers over K."""
        shifted = query + (self.factor - 1) * self.window
        return [_near(self.window, query, key), Turning(Band(self.window), shifted, key, self.factor)]


@dataclass(frozen=True)
class SelfExtend(Method):
    """d, beyond W it is i // G - j // G + W - W // G."""

    usage: ClassVar[str] = "self-extend:G[:W]"
    group: int
    window: int | None = None

    @property
    def near(self) -> int:
        """W, as in the paper a quarter of the trained length."""
        return self.window or max(1, self.train_length // 4)

    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """Far positions are those of groups, moved so that they go on where near ones end."""
        grouped, shift = _floor(query, self.group), self.near - self.near // self.group
        return [_near(self.near, query, key), Turning(Band(self.near), grouped + shift, _floor(key, self.group))]


@dataclass(frozen=True)
class DualChunk(Method):
    """Keys stand at j mod C. In the same chunk queries stand at i mod C, in the next at min(i mod C + C, S), then at
    min(2 C - 1, S)."""

    usage: ClassVar[str] = "dca[:C[:S]]"
    chunk: int | None = None
    furthest: int | None = None

    @property
    def limit(self) -> int:
        """S, as in the published code three quarters of the trained length."""
        return self.furthest or max(1, 3 * self.train_length // 4)

    @property
    def near(self) -> int:
        """C, as in the published code a sixteenth of the trained length below S."""
        return self.chunk or max(1, self.limit - self.train_length // 16)

    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """Within a chunk, to the chunk before it, and to all others."""
        chunk, placed, keys = self.near, query.remainder(self.near), key.remainder(self.near)
        return [
            Turning(Band(0, 1, chunk=chunk), placed, keys),
            Turning(Band(1, 2, chunk=chunk), (placed + chunk).clamp(max=self.limit), keys),
            Turning(Band(2, chunk=chunk), _constant(min(2 * chunk - 1, self.limit), query), keys),
        ]


@dataclass(frozen=True)
class LmInfinite(Method):
    """The nearest W keys, and the first N of the text, whose distance is at most W."""

    usage: ClassVar[str] = "lm-infinite:W[:N]"
    window: int
    first: int = 10

    @property
    def near(self) -> int:
        """W."""
        return self.window

    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """The first keys, once they are far, are all at distance W."""
        far = Band(self.window, first=self.first)
        return [_near(self.window, query, key), Turning(far, _constant(self.window, query), None)]


@dataclass(frozen=True)
class Streaming(Method):
    """The nearest W keys, and the first N of the text; positions are counted in the keys that are left."""

    usage: ClassVar[str] = "streaming:W[:N]"
    window: int
    first: int = 4

    @property
    def near(self) -> int:
        """W and N: so many positions are used."""
        return self.window + self.first

    def turnings(self, query: Index, key: Index) -> list[Turning]:
        """Among N + W keys a query is the last, and the first ones stand where they always stood."""
        far = Band(self.window, first=self.first)
        return [_near(self.window, query, key), Turning(far, query.clamp(max=self.near - 1), key)]


METHODS: dict[str, type[Method]] = {
    method.usage.partition(":")[0].partition("[")[0]: method
    for method in (ReRope, LeakyReRope, SelfExtend, DualChunk, LmInfinite, Streaming, PlainWindow)
}
"""Methods of bands by name."""

CONTROL = "window"
"""The method that uses no far text."""


def _near(window: int, query: Index, key: Index) -> Turning:
    return Turning(Band(0, window), query, key)


def _constant(position: int, like: Index) -> Index:
    return like.new_full((1, 1), position)


def _floor(number: Index, divisor: int) -> Index:
    return number.div(divisor, rounding_mode="floor")


@dataclass(frozen=True)
class StretchSpec:
    """A way to stretch, read and checked as far as it can be without a model."""

    label: str
    """As it is written: "self-extend:8"."""
    method: type[Method] | None = None
    numbers: tuple[int, ...] = ()
    scaling: Mapping[str, object] | None = None
    logn: bool = False

    def bands(self, train_length: int) -> Method | None:
        """The method for a trained length."""
        return None if self.method is None else self.method(train_length, *self.numbers)


def parse_stretch(spec: "str | Mapping[str, object] | StretchSpec") -> StretchSpec:
    """A way to stretch from its name, or a scaling from the mapping that has all its numbers.

    >>> parse_stretch("yarn:8").scaling
    {'type': 'yarn', 'factor': 8.0}
    """
    if isinstance(spec, StretchSpec):
        return spec
    if isinstance(spec, Mapping):
        kind, factor = spec.get("type", spec.get("rope_type")), spec.get("factor")
        label = f"{kind}:{factor:g}" if isinstance(factor, int | float) else str(kind)
        return StretchSpec(label, scaling=dict(spec))
    if not isinstance(spec, str):
        raise OptionError(f"a way to stretch must be written such as 'self-extend:8', got {describe(spec)}")
    first, *more = [word.strip() for word in spec.split("+")]
    if more not in ([], [LOG_N]) or (first == LOG_N and more):
        raise OptionError(f"behind a way to stretch there can be '+{LOG_N}' and nothing else, got {spec!r}")
    if first == LOG_N:
        return StretchSpec(spec, logn=True)
    name, *words = first.split(":")
    logn = bool(more)
    if name in METHODS:
        return StretchSpec(spec, METHODS[name], _numbers(METHODS[name], words, first), logn=logn)
    if name in SCALINGS and name != "default":
        return StretchSpec(spec, scaling=_scaling(name, words, first), logn=logn)
    known = [*METHODS, *(kind for kind in SCALINGS if kind != "default"), LOG_N]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? Known" if near else "known"
    raise OptionError(f"unknown way to stretch {name!r}; {hint}: {', '.join(known)}")


def _numbers(method: type[Method], words: Sequence[str], spec: str) -> tuple[int, ...]:
    own = [field for field in fields(method) if field.name != "train_length"]
    needed = sum(field.default is MISSING for field in own)
    if not needed <= len(words) <= len(own) or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise OptionError(f"it must be written {method.usage}, with positive whole numbers, got {spec!r}")
    return tuple(int(word) for word in words)


def _scaling(name: str, words: Sequence[str], spec: str) -> dict[str, object]:
    try:
        (factor,) = map(float, words)
    except ValueError:
        raise OptionError(f"a scaling must be written TYPE:FACTOR, such as 'yarn:8', got {spec!r}") from None
    return {"type": name, "factor": factor, **(LLAMA3 if name == "llama3" else {})}


class StretchedRope(Encoding):
    """A layer's own RoPE where keys beyond the trained length meet queries in another way."""

    paper = "see lengthwise.model.stretch"

    def __init__(self, rope: Rope, spec: StretchSpec, train_length: int) -> None:
        super().__init__(replace(rope.shape, train_length=train_length))
        self.rope, self.method = _with_scaling(rope, spec.scaling, train_length), spec.bands(train_length)
        self.logn = LogN(self.shape) if spec.logn else None
        self.length_dependent = self.rope.length_dependent
        if self.method is not None and self.length_dependent:
            raise NotImplementedError(
                f"bands need angles that do not depend on the length, got a RoPE with the scaling "
                f"{type(self.rope.scaling).__name__}; a scaling such as 'yarn:8' can take its place"
            )

    @property
    def rotates_late(self) -> bool:
        """A key turns in every band anew."""
        return self.method is not None or self.rope.rotates_late

    def zones(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> list[Zone]:
        """Queries and keys as they meet in each band; by number in the document, whatever the positions are."""
        if self.method is None:
            return self.rope.zones(q, k, layout, state)
        query, key = layout.indices()
        return [
            Zone(
                turn(q, self._waves(turning.query, turning.divisor), self.rope.layout),
                self._turned_keys(k, turning),
                turning.band,
            )
            for turning in self.method.turnings(query, key)
        ]

    def _turned_keys(self, k: Keys, turning: Turning) -> Tensor:
        if turning.key is not None:
            return turn(k, self._waves(turning.key, turning.divisor), self.rope.layout)
        if self.rope.scaling.factor == 1:
            return k
        return turn(k, self._waves(_constant(0, turning.query), 1), self.rope.layout)

    def _waves(self, index: Index, divisor: int) -> Waves:
        angles = (index[..., None].float() * (self.rope.frequencies(index) / divisor))[:, None]
        return self.rope.scaling.factor * angles.cos(), self.rope.scaling.factor * angles.sin()

    def rotate(self, q: Queries, k: Keys, layout: TokenLayout, state: State | None = None) -> tuple[Tensor, Tensor]:
        """Both as they meet, where that is the same in all bands."""
        zones = self.zones(q, k, layout, state)
        if len(zones) > 1:
            raise NotImplementedError(
                "queries and keys of a stretched model meet in several bands, each with rotations of its own; call "
                "lw.unstretch(model) first"
            )
        return zones[0].q, zones[0].k

    def logit_scale(self, x: Tokens, layout: TokenLayout, *, window: Window | None = None) -> Tensor | None:
        """log n, if the spec says so."""
        return None if self.logn is None else self.logn.logit_scale(x, layout)

    def extra_repr(self) -> str:
        """The method and its numbers."""
        return repr(self.method)


def _with_scaling(rope: Rope, scaling: Mapping[str, object] | None, train_length: int) -> Rope:
    """The same RoPE with other frequencies; an error if they are scaled already."""
    if scaling is None:
        return rope
    if type(rope.scaling) is not SCALINGS["default"]:
        raise NotImplementedError(
            f"a scaling needs a RoPE without one, got {type(rope.scaling).__name__}; methods of bands, such as "
            "'self-extend:8', go with any"
        )
    scaled = copy.copy(rope)
    scaled.scaling = make_scaling(scaling, replace(rope.scaling.rope_base, train_length=train_length))
    scaled.length_dependent = scaled.scaling.length_dependent
    return scaled


@dataclass(frozen=True)
class Site:
    """Where one of our models has a RoPE: the module that holds it, under a name."""

    owner: nn.Module
    name: str
    rope: Rope
    reach: int | None
    """How far its layers see; None for all tokens."""

    def put(self, encoding: Encoding) -> None:
        """Another encoding in its place, under the same name."""
        self.owner._modules[self.name] = encoding


@dataclass(frozen=True)
class Replaced:
    """RoPEs of one of our models with others in their places."""

    sites: tuple[Site, ...]

    def undo(self) -> None:
        """The model's own back."""
        for site in self.sites:
            site.put(site.rope)


@dataclass(frozen=True)
class StretchedLayer:
    """What is computed in the place of a layer's attention in other people's models."""

    encoding: StretchedRope

    def __call__(self, call: LayerCall) -> Output:
        """Keys are cached unrotated where they turn anew in every band."""
        encoding, q, k, late = self.encoding, call.q, call.k, self.encoding.rotates_late
        if not late:
            q, k = encoding.rotate(q, k, call.layout.new_tokens())
        k, v, _ = call.remember(k, call.v)
        zones = encoding.zones(q, k, call.layout) if late else [Zone(q, k)]
        options: dict[str, Any] = {"logit_scale": encoding.logit_scale(call.x, call.layout)}
        if len(zones) == 1:
            own = {} if zones[0].window is None else {"window": zones[0].window}
            return call.attend(zones[0].q, zones[0].k, v, **options, **own)
        options |= {"scale": call.scale, "softcap": call.softcap, "sink": call.sink, "bias": call.added}
        return attend_zones(zones, v, layout=call.layout, weights=call.weights, **options)


@dataclass(frozen=True)
class Stretched:
    """What `lw.stretch` did to a model."""

    spec: StretchSpec
    train_length: int
    encodings: tuple[StretchedRope, ...]
    change: Replaced | Swap

    @property
    def length_dependent(self) -> bool:
        """Whether angles change as a sequence grows."""
        return any(encoding.length_dependent for encoding in self.encodings)


def stretch(
    model: PreTrainedModel, spec: str | Mapping[str, object] | StretchSpec, *, train_length: int | None = None
) -> PreTrainedModel:
    """Let a RoPE model read beyond its trained length by the method of that name; in place, `lw.unstretch` undoes it.

    train_length   by default what the model's config says

    Weights and config stay as they are, so a model that is saved is the plain one. An error leaves it untouched.
    """
    parsed = parse_stretch(spec)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"expected a model of transformers or of lengthwise.model, got {describe(model)}")
    if (before := stretched(model)) is not None:
        raise ValueError(f"the model is stretched by {before.spec.label!r} already; call lw.unstretch(model) first")
    length = trained_length(model) if train_length is None else train_length
    check_int("train_length", length)
    if isinstance(model, LengthwisePreTrainedModel):
        vars(model)[RECORD] = _stretch_ours(model, parsed, length)
    else:
        vars(model)[RECORD] = _stretch_theirs(model, parsed, length)
    return model


def unstretch(model: PreTrainedModel) -> PreTrainedModel:
    """Give a stretched model back as it was, bit for bit."""
    before = stretched(model)
    if before is None:
        raise ValueError(f"the model must have been stretched, got a {type(model).__name__} as it is")
    before.change.undo()
    del vars(model)[RECORD]
    return model


def stretched(model: nn.Module) -> Stretched | None:
    """How a model is stretched; None if it is not."""
    return vars(model).get(RECORD)


@contextmanager
def stretching(model: PreTrainedModel, spec: StretchSpec | None) -> Iterator[None]:
    """The model stretched inside, and as it was behind; None leaves it as it is."""
    if spec is None:
        yield
        return
    stretch(model, spec)
    try:
        yield
    finally:
        unstretch(model)


def trained_length(model: PreTrainedModel) -> int:
    """The length that a model was trained at, by its config."""
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if length is None:
        raise ValueError(f"the config of {type(model).__name__} does not say a trained length; pass train_length=")
    return int(length)


def has_rope(model: PreTrainedModel) -> bool:
    """Whether a layer of the model rotates queries and keys as `rope` does."""
    if isinstance(model, LengthwisePreTrainedModel):
        return bool(_sites(model))
    try:
        return any(layer.options is not None for layer in attention_layers(model))
    except NotImplementedError:
        return False


def _check_reach(model: PreTrainedModel, spec: StretchSpec, length: int, reaches: Sequence[int | None]) -> None:
    """An error unless some of these layers with RoPE, by how far they see, can be stretched."""
    if not any(_sees_beyond(reach, length) for reach in reaches):
        raise NotImplementedError(
            f"stretching needs RoPE in layers that see beyond the trained length, {length:,}, and "
            f"{type(model).__name__} has none"
        )
    if spec.method is not None and any(_sees_beyond(reach, length) and reach is not None for reach in reaches):
        raise NotImplementedError(
            f"bands go with layers that see all tokens, or no further than the trained length, {length:,}; got a "
            "window beyond it"
        )


def _sees_beyond(reach: int | None, length: int) -> bool:
    return reach is None or reach > length


def _stretch_ours(model: LengthwisePreTrainedModel, spec: StretchSpec, length: int) -> Stretched:
    if model.config._attn_implementation not in (NAME, "eager"):
        raise NotImplementedError(
            f"a stretched model runs under attention {NAME!r} or 'eager', got {model.config._attn_implementation!r}; "
            f"call model.set_attn_implementation({NAME!r}) first"
        )
    for layer in model.config.schedule:
        if spec.method is not None and "rope" in layer.encoding and find(layer.encoding).overrides("rescore"):
            raise NotImplementedError(
                "bands are merged by their log-sum-exp, which an encoding that replaces the scores does not have; got "
                f"{layer.encoding!r}"
            )
    every = _sites(model)
    _check_reach(model, spec, length, [site.reach for site in every])
    sites = tuple(site for site in every if _sees_beyond(site.reach, length))
    # All of them before the first is in place: an error leaves the model as it is.
    encodings = tuple(StretchedRope(site.rope, spec, length) for site in sites)
    for site, encoding in zip(sites, encodings, strict=True):
        site.put(encoding)
    return Stretched(spec, length, encodings, Replaced(sites))


def _sites(model: LengthwisePreTrainedModel) -> list[Site]:
    """Every RoPE of one of our models; layers that share it see as far as the furthest of them."""
    layers = [module for module in model.modules() if isinstance(module, LengthwiseAttention)]
    reaches = [model.config.schedule[layer.layer_idx].reach for layer in layers]
    owners: list[tuple[Any, int | None]] = list(zip(layers, reaches, strict=True))
    if model.config.share_encoding:
        numbers = [reach for reach in reaches if reach is not None]
        owners = [(model.base_model, max(numbers) if len(numbers) == len(reaches) else None)]
    sites = []
    for owner, reach in owners:
        encoding, name = owner.encoding, "encoding"
        if isinstance(encoding, Composition) and "rope" in encoding.names:
            owner, name, encoding = encoding.parts, "rope", encoding.parts["rope"]
        if isinstance(encoding, Rope):
            sites.append(Site(owner, name, encoding, reach))
    return sites


def _stretch_theirs(model: PreTrainedModel, spec: StretchSpec, length: int) -> Stretched:
    rotating = [layer for layer in attention_layers(model) if layer.rotates]
    reaches = {layer.number: LayerSpec(window=layer.window).reach for layer in rotating}
    _check_reach(model, spec, length, list(reaches.values()))
    if spec.method is not None and not all(layer.shape.causal for layer in rotating):
        raise NotImplementedError(f"bands are for causal models, got {type(model).__name__}, which sees later tokens")
    encodings = {
        layer.number: StretchedRope(_rope_of(layer), spec, length)
        for layer in rotating
        if _sees_beyond(reaches[layer.number], length)
    }
    swap = swap_attention(model, {number: StretchedLayer(encoding) for number, encoding in encodings.items()})
    return Stretched(spec, length, tuple(encodings.values()), swap)


def _rope_of(layer: AttentionLayer) -> Rope:
    """A layer's own RoPE; an error if it is of another kind."""
    rope = build(layer.encoding, layer.shape, layer.options or {})
    assert isinstance(rope, Rope)
    return rope
