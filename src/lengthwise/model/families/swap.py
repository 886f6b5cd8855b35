"""A function of ours in the place of a model's attention, through transformers' attention interface, and out again.

    swap = swap_attention(model, {0: run, 1: run})      the layers of these numbers; the others compute what they did
    model(...)
    swap.undo()

`run(call)` gets what one layer knows of one forward pass, see `LayerCall`, and gives what `call.run` gives. Queries
and keys come to it unrotated, and not yet cached.

How it gets there, without a change to the model's code:
- a hook around the innermost transformers model makes one layout of the pass;
- the registered mask function returns that layout, so it rides in the place of the mask through every layer, also when
  a checkpointed layer is computed again after another pass has begun;
- a hook at every attention module takes it out of there, gives the module angles of 0 and a cache that gives the new
  keys back, and puts the call into the keywords that the module hands on to the registered attention function.
"""

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, EncoderDecoderCache, PreTrainedModel

from lengthwise.model.attention import Output
from lengthwise.model.cache import cached_layout, cached_length
from lengthwise.model.families.base import SWAPPED, check_configs, restore_implementations, set_implementation
from lengthwise.model.families.layer_call import SHARED, LayerCall, MaskPlace, NewTokens, Placed, Run, as_before
from lengthwise.model.families.modules import (
    Classes,
    attention_modules,
    is_causal,
    owner_of,
    restore_classes,
    swap_classes,
)
from lengthwise.model.layout import added_by, make_layout, with_mask
from lengthwise.token_layout import Band, Slot, TokenLayout, Window

CACHES = ("past_key_values", "layer_past")
"""What attention modules call their cache."""

T = TypeVar("T")

Waves = tuple[Tensor, Tensor]
Angles = Callable[[Any, "Placed", Waves], Waves | None]
"""Cosine and sine by which a module is to turn, laid out as its own; None for no rotation."""


def no_angles(module: Any, placed: Placed, own: Waves) -> None:
    """No rotation by the module."""


class _Current(Generic[T]):
    """What belongs to the pass that is under way: a context variable, or in a compiled graph, which knows none, an
    attribute."""

    def __init__(self, name: str) -> None:
        self.variable: ContextVar[T | None] = ContextVar(name, default=None)
        self.plain: T | None = None

    def set(self, value: T | None) -> None:
        if torch.compiler.is_compiling():
            self.plain = value
        else:
            self.variable.set(value)

    def get(self) -> T | None:
        return self.plain if torch.compiler.is_compiling() else self.variable.get()


_current: _Current[Placed] = _Current("placed")
_given_positions: _Current[Tensor] = _Current("given_positions")


def current_layout() -> TokenLayout | None:
    """The layout of the pass that is under way in a swapped model, for what acts as tokens enter."""
    placed = _current.get()
    return None if placed is None else placed.layout


class Swap:
    """A model's attention with functions of ours in some layers; `undo` leaves the model as it was."""

    def __init__(
        self,
        model: PreTrainedModel,
        runs: Mapping[int, Run],
        *,
        rotated: bool = False,
        angles: Angles = no_angles,
        described: Classes | None = None,
        undone_by: str = "unfit",
    ) -> None:
        self.model, self.undone_by, described = model, undone_by, described or {}
        modules = attention_modules(model, described)
        self.owner = owner_of(model, modules)
        unknown = set(runs) - set(range(len(modules)))
        if unknown:
            raise ValueError(f"a layer must be one of 0 to {len(modules) - 1}, got {sorted(unknown)[0]}")
        if (before := swap_of(model)) is not None:
            raise ValueError(
                f"{type(model).__name__} has attention of ours in place already; take it out first: "
                f"lw.{before.undone_by}(model)"
            )
        check_configs(model)
        self.classes = swap_classes(model, described)
        self.causal = is_causal(next(iter(modules.values())))
        self.names = tuple(inspect.signature(self.owner.forward).parameters)
        self.windows: list[int | None] = _cached_windows(self.owner.config, len(modules))
        self.handles = [
            self.owner.register_forward_pre_hook(self.enter, with_kwargs=True),
            self.owner.register_forward_hook(self.leave, always_call=True),
        ]
        self.drops_positions = "position_ids" not in inspect.signature(model.forward).parameters
        if self.drops_positions:
            self.handles.append(model.register_forward_pre_hook(self.carry_positions, with_kwargs=True))
        for number, module in enumerate(modules.values()):
            own = rotated or number not in runs
            run = runs.get(number, as_before)
            hook = _LayerHook(module, number, run, None if own else angles, undone_by=undone_by)
            self.handles.append(module.register_forward_pre_hook(hook.before, with_kwargs=True))
        self.implementations = set_implementation(model, SWAPPED)
        self.owner._lengthwise_swap = self  # type: ignore[assignment]

    def undo(self) -> None:
        """Hooks off, and the model's own attention back."""
        for handle in self.handles:
            handle.remove()
        restore_implementations(self.implementations)
        restore_classes(self.classes)
        del self.owner._lengthwise_swap

    def carry_positions(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take position_ids past a head that does not hand them on, such as those of BLOOM and MPT."""
        _given_positions.set(kwargs.get("position_ids"))
        return args, kwargs

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the layout of a pass."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            raise ValueError("expected either input_ids or inputs_embeds, got neither")
        mask, cache = given.get("attention_mask"), given.get("past_key_values")
        if isinstance(mask, dict):
            if any(isinstance(each, Tensor) and each.ndim == 4 for each in mask.values()):
                raise NotImplementedError(
                    f"expected one explicit mask for all layers, got one for each kind of them: {', '.join(mask)}"
                )
            # By kind of layer, as `generate` makes them; ours are the padding alone, all the same.
            mask = given["attention_mask"] = next(iter(mask.values()))
        if isinstance(mask, MaskPlace):
            # `generate` had it made, perhaps while a pass that was interrupted seemed to be under way.
            mask = given["attention_mask"] = mask.padding
        explicit = mask if isinstance(mask, Tensor) and mask.ndim == 4 else None
        if explicit is not None:
            mask = given["attention_mask"] = None
        past, capacity = self._cached(cache)
        positions = given.get("position_ids")
        if self.drops_positions:
            positions = _given_positions.get() if positions is None else positions
            _given_positions.set(None)
        layout = make_layout(
            tokens,
            attention_mask=mask,
            position_ids=positions,
            past=past,
            capacity=capacity,
            cached=cache is not None or (positions is not None and self._makes_cache(given)),
            causal=self.causal,
        )
        added = None
        if explicit is not None:
            layout = with_mask(layout, explicit, tokens.shape[0], explicit.shape[1], capacity)
            added = added_by(explicit, layout)
        weights = given.get("output_attentions")
        weights = self.owner.config.output_attentions if weights is None else weights
        _current.set(Placed(layout, added=added, weights=bool(weights)))
        return (), given

    def _cached(self, cache: Any) -> tuple[Slot, int | None]:
        if cache is None:
            return 0, None
        if isinstance(cache, EncoderDecoderCache) or not isinstance(cache, Cache):
            raise NotImplementedError(
                f"expected a cache of a decoder, such as DynamicCache(), got a {type(cache).__name__}"
            )
        return cached_length(cache, [window or 0 for window in self.windows])

    def _makes_cache(self, given: Mapping[str, Any]) -> bool:
        """Whether the model is about to make a cache of its own, which somebody may go on with."""
        wanted = given.get("use_cache")
        wanted = getattr(self.owner.config, "use_cache", False) if wanted is None else wanted
        return bool(wanted) and self.causal and not self.owner.training

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """The pass is over."""
        _current.set(None)


class _LayerHook:
    """What happens before one attention module."""

    def __init__(self, module: nn.Module, number: int, run: Run, angles: Angles | None, *, undone_by: str) -> None:
        self.names = tuple(inspect.signature(module.forward).parameters)
        self.number, self.run, self.angles, self.undone_by = number, run, angles, undone_by

    def before(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Take the layout out of the mask's place, angles and cache out of the module's hands."""
        given = dict(zip(self.names, args, strict=False)) | kwargs if args else kwargs
        placed = given.get("attention_mask")
        if not isinstance(placed, Placed):
            implementation = getattr(getattr(module, "config", None), "_attn_implementation", SWAPPED)
            if implementation != SWAPPED:
                raise ValueError(
                    f"attention of ours is in place, which needs the implementation {SWAPPED!r}, got "
                    f"{implementation!r}; call lw.{self.undone_by}(model) before model.set_attn_implementation"
                )
            raise NotImplementedError(
                f"{type(module).__name__} must be given the mask that its model makes, got "
                f"{type(placed).__name__}; a mask of its own cannot be told from positions"
            )
        layout = placed.layout
        cache = None
        for name in CACHES:
            if given.get(name) is not None:
                layout = cached_layout(given[name], getattr(module, "layer_idx", self.number), layout, placed.window)
                cache = given[name] = NewTokens(given[name])
        if placed.added is not None and layout is not placed.layout:
            raise NotImplementedError("an explicit mask of numbers needs a cache that keeps all keys")
        own, turned = given.get("position_embeddings"), False
        if own is not None and self.angles is not None:
            try:
                cos, sin = own
            except ValueError:
                raise NotImplementedError(
                    f"{type(module).__name__} must be given its angles as cosine and sine, got one {type(own).__name__}"
                ) from None
            # Who observes wants queries and keys before and after.
            angles = None if placed.observer is not None else self.angles(module, placed, own)
            turned = angles is not None
            flat = angles or placed.once(cos.shape, lambda: (torch.ones_like(cos), torch.zeros_like(sin)))
            given["position_embeddings"] = flat
        x = given.get("hidden_states")
        if x is None:
            raise NotImplementedError(
                f"{type(module).__name__} must be given hidden_states, got {', '.join(self.names[:3])}"
            )
        given["attention_mask"] = None
        known = {"number": self.number, "x": x, "layout": layout, "placed": placed}
        given["lengthwise"] = self.run, known | {"cache": cache, "turned": turned}
        return (), given


def swapped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    lengthwise: tuple[Run, dict[str, Any]] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Any = None,
    indices: Any = None,
    block_indices: Any = None,
    sinks: Any = None,
    **kwargs: Any,
) -> Output:
    """The attention function that transformers knows: what a layer's hook knows, with the queries, keys and values."""
    if lengthwise is None:
        if not any(isinstance(getattr(hook, "__self__", None), _LayerHook) for hook in _hooks(module)):
            raise ValueError(
                f"{type(module).__name__} has no attention of ours in place, but its config says {SWAPPED!r}: {SHARED}"
            )
        raise NotImplementedError(
            f"{type(module).__name__} does not hand its keywords on to the attention function, so nothing of ours "
            "gets there"
        )
    if not (attention_mask is position_bias is indices is block_indices is sinks is None):
        _refuse(module, attention_mask=attention_mask, position_bias=position_bias)
    factor = getattr(module, "scaling", None)
    if scaling == 1.0 and isinstance(factor, float) and factor != 1.0:
        # OPT and BART scale their queries themselves; encodings want them as they are.
        query, scaling = query / factor, factor
    run, known = lengthwise
    own: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sink": s_aux, "dropout": dropout}
    out, weights = run(LayerCall(module=module, q=query, k=key, v=value, **known, **own))
    return out.contiguous(), weights


def _hooks(module: nn.Module) -> list[Any]:
    return list(module._forward_pre_hooks.values())


def _refuse(module: nn.Module, *, attention_mask: Any, position_bias: Any) -> NoReturn:
    """What changes the scores, and would be lost."""
    name = type(module).__name__
    if position_bias is not None:
        raise NotImplementedError(
            f"{name} adds a bias of its own, which cannot be replaced; lw.accelerate describes that of T5 and its "
            "relatives"
        )
    if attention_mask is not None:
        raise NotImplementedError(f"{name} makes a mask of its own, which cannot be told from positions")
    raise NotImplementedError(f"{name} chooses keys or adds sinks in a manner of its own, which is unknown")


def swapped_mask(
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    use_vmap: bool = False,
    mask_function: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> MaskPlace:
    """The layout of the pass, for one kind of layer; outside of one, where `generate` prepares it, the padding."""
    placed = _current.get()
    if placed is None:
        return MaskPlace(padding=attention_mask)
    # What is cut off, documents that are packed, is in the layout; what is added is known to nobody.
    joined = not torch.compiler.is_compiling() and "or_masks" in getattr(mask_function, "__qualname__", "")
    if use_vmap or joined:
        raise NotImplementedError(
            f"{type(config).__name__} lays a mask of its own over the usual one, which is unknown"
        )
    # An explicit mask says all of what is seen.
    explicit = placed.layout.mask is not None
    window = None if explicit else _window(config, local_size, causal=placed.layout.causal)
    return replace(placed, window=window, padding=attention_mask)


def _window(config: Any, size: int | None, *, causal: bool) -> Window | None:
    """transformers' window as ours: two-sided it is one longer, and Llama 4's chunks are bands."""
    if size is None:
        return None
    if size == getattr(config, "attention_chunk_size", None) and size != getattr(config, "sliding_window", None):
        return Band(0, 1, chunk=size)
    return size if causal else size + 1


def _cached_windows(config: Any, count: int) -> list[int | None]:
    """How many tokens the cache of each layer keeps; None for all."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * count
    sizes = {
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    return [sizes.get(kind) for kind in kinds]


def swap_attention(
    model: PreTrainedModel,
    runs: Mapping[int, Run],
    *,
    rotated: bool = False,
    angles: Angles = no_angles,
    described: Classes | None = None,
    undone_by: str = "unfit",
) -> Swap:
    """Put functions of ours in the place of the attention of some layers, by number.

    Layers without one compute what they did, and keep their own rotation; with `rotated` all layers keep it. `angles`
    can give the others some to turn by, where that is what an encoding wants. `described` has classes that take such
    functions in families with attention code of their own; `undone_by` is the function of ours that takes them out.
    """
    return Swap(model, runs, rotated=rotated, angles=angles, described=described, undone_by=undone_by)


def swap_of(model: nn.Module) -> Swap | None:
    """What is in place in a model, if anything is."""
    modules: Any = model.modules()
    return next((module._lengthwise_swap for module in modules if hasattr(module, "_lengthwise_swap")), None)


AttentionInterface.register(SWAPPED, swapped_attention)
AttentionMaskInterface.register(SWAPPED, swapped_mask)
