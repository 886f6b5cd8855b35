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
Keys are cached unrotated. Layers that see no further than L by a window of their own stay as they are, and so do layers
without RoPE: but keys that a method drops are dropped there too, or the control would read far text.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lengthwise.encodings.base import Encoding
from lengthwise.encodings.composition import Composition
from lengthwise.encodings.registry import build, find
from lengthwise.encodings.rope import Rope
from lengthwise.errors import check_int, describe
from lengthwise.model.attention import NAME, Output
from lengthwise.model.families import classes_that_take_runs
from lengthwise.model.families.layer_call import PLAIN, LayerCall, check_no_dropout
from lengthwise.model.families.layers import AttentionLayer, attention_layers
from lengthwise.model.families.swap import Swap, swap_attention
from lengthwise.model.modeling import LengthwiseAttention, LengthwisePreTrainedModel
from lengthwise.model.schedule import LayerSpec
from lengthwise.model.stretch.rope import StretchedRope
from lengthwise.model.stretch.spec import StretchSpec, parse_stretch
from lengthwise.token_layout import Window

RECORD = "_lengthwise_stretched"
"""Where a model keeps what was done to it."""
NOT_CAUSAL = "bands are for causal models, got {}, which sees later tokens"


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
    windows: tuple[tuple[LengthwiseAttention, Window | None], ...] = ()
    """Layers without RoPE that got a window, and what they had."""

    def undo(self) -> None:
        """The model's own back."""
        for site in self.sites:
            site.put(site.rope)
        for layer, window in self.windows:
            layer.window = window


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


def _window_elsewhere(spec: StretchSpec, length: int, layers: Sequence[LayerSpec]) -> Window | None:
    """The window of layers without RoPE that see beyond the trained length; None where no key is dropped."""
    method = spec.bands(length)
    if method is None or not method.drops_keys or not layers:
        return None
    window = method.bands()
    for layer in layers:
        if layer.window is not None or not find(layer.encoding).takes_window(window):
            raise NotImplementedError(
                f"{spec.label!r} drops keys, so layers without RoPE must be able to have its window, got one with "
                f"{layer.label!r}"
            )
    return window


def _stretch_ours(model: LengthwisePreTrainedModel, spec: StretchSpec, length: int) -> Stretched:
    if model.config._attn_implementation not in (NAME, "eager"):
        raise NotImplementedError(
            f"a stretched model runs under attention {NAME!r} or 'eager', got {model.config._attn_implementation!r}; "
            f"call model.set_attn_implementation({NAME!r}) first"
        )
    if spec.method is not None and not model.config.causal:
        raise NotImplementedError(NOT_CAUSAL.format(type(model).__name__))
    for layer in model.config.schedule:
        rotates = "rope" in layer.encoding.split("+")
        if spec.method is not None and rotates and find(layer.encoding).overrides("rescore"):
            raise NotImplementedError(
                "bands are merged by their log-sum-exp, which an encoding that replaces the scores does not have; got "
                f"{layer.encoding!r}"
            )
    every, shared = _sites(model), model.config.share_encoding
    seen = model.config.schedule if every and shared else every
    reaches = [layer.reach for layer in seen]
    _check_reach(model, spec, length, reaches)
    if shared and not all(_sees_beyond(reach, length) for reach in reaches):
        raise NotImplementedError(
            f"layers that share one RoPE are stretched together, so that all must see beyond the trained length, "
            f"{length:,}; got a window within it"
        )
    sites = tuple(site for site in every if _sees_beyond(site.reach, length))
    # All of them before the first is in place: an error leaves the model as it is.
    encodings = tuple(StretchedRope(site.rope, spec, length) for site in sites)
    others = _layers_without_rope(model, length)
    window = _window_elsewhere(spec, length, [model.config.schedule[layer.layer_idx] for layer in others])
    change = Replaced(sites, tuple((layer, layer.window) for layer in others if window is not None))
    for site, encoding in zip(sites, encodings, strict=True):
        site.put(encoding)
    for module, _ in change.windows:
        module.window = window
    return Stretched(spec, length, encodings, change)


def _layers_without_rope(model: LengthwisePreTrainedModel, length: int) -> list[LengthwiseAttention]:
    """Those that see beyond the trained length."""
    layers = [module for module in model.modules() if isinstance(module, LengthwiseAttention)]
    specs = [model.config.schedule[layer.layer_idx] for layer in layers]
    return [
        layer
        for layer, spec in zip(layers, specs, strict=True)
        if "rope" not in spec.encoding.split("+") and _sees_beyond(spec.reach, length)
    ]


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
    every = attention_layers(model)
    rotating = [layer for layer in every if layer.rotates]
    reaches = {layer.number: LayerSpec(window=layer.window).reach for layer in every}
    _check_reach(model, spec, length, [reaches[layer.number] for layer in rotating])
    if spec.method is not None and not all(layer.shape.causal for layer in rotating):
        raise NotImplementedError(NOT_CAUSAL.format(type(model).__name__))
    encodings = {
        layer.number: StretchedRope(_rope_of(layer), spec, length)
        for layer in rotating
        if _sees_beyond(reaches[layer.number], length)
    }
    runs = {number: partial(_run, encoding=encoding) for number, encoding in encodings.items()}
    others = [layer for layer in every if not layer.rotates and _sees_beyond(reaches[layer.number], length)]
    window = _window_elsewhere(spec, length, [LayerSpec(window=layer.window) for layer in others])
    if window is not None:
        runs |= {layer.number: partial(_run, encoding=PLAIN, window=window) for layer in others}
    swap = swap_attention(model, runs, described=classes_that_take_runs(model), undone_by="unstretch")
    return Stretched(spec, length, tuple(encodings.values()), swap)


def _run(call: LayerCall, encoding: Encoding, window: Window | None = None) -> Output:
    check_no_dropout(call.module, call.dropout, "call model.eval()")
    return call.run(encoding, window=window)


def _rope_of(layer: AttentionLayer) -> Rope:
    """A layer's own RoPE; an error if it is of another kind."""
    rope = build(layer.encoding, layer.shape, layer.options or {})
    assert isinstance(rope, Rope)
    return rope
