"""What is known of a family of models, and what one call of its attention looks like: the same for every family.

A `Family` stands for one model: which encoding it has, how many layers of which kind, how long a text may be, how its
attention is captured. A family is one file with one subclass; one with attention code of its own is a `HookedFamily`,
with hooks on its attention layers and on their last projection. Nothing here computes scores: see `lengthwise.inspect`.

    content = scale q k^T, capped
    scores  = logit_scale (content + bias), or what a rescore makes of both
    weights = softmax(scores) over the visible keys, and a sink where the model has one
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lengthwise.attention import AttentionCall
from lengthwise.bias import Bias, LevelBias, at_least_float32
from lengthwise.rescore import Rescore

Mask = Callable[[slice, slice], Bool[Tensor, "#batch 1 row column"]]
"""True where a key is visible, for some rows and columns."""

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Queries and keys rotated by the positions 0, 1, 2, ..."""

POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings")
"""What transformers calls a table of positions."""
Selected = Callable[[int, str], bool]
"""Whether a layer of a part is to be captured."""


@dataclass(frozen=True, eq=False)
class Rotary:
    """How a rotary layer rotates, and its queries and keys before that."""

    unrotated: Callable[[], tuple[Tensor, Tensor] | None]
    """None where the rotation cannot be undone."""
    rotate: Rotate
    query_mask: Bool[Tensor, "#batch query"] | None = None
    """False for padding."""


@dataclass(frozen=True, eq=False)
class AttentionRecord:
    """One call of one attention layer. `out` is the layer's own output, before its last projection."""

    layer: int
    q: Float[Tensor, "batch head query dim"]
    k: Float[Tensor, "batch kv_head key dim"]
    v: Float[Tensor, "batch kv_head key value"]
    out: Float[Tensor, "batch head query value"]
    scale: float
    mask: Mask
    causal: bool
    part: str = ""
    """"encoder", "decoder" or "cross" in models with several kinds of attention."""
    bias: Bias | None = None
    context_free: bool = False
    """Whether the bias is known to depend on positions alone."""
    rescore: Rescore | None = None
    softcap: float | None = None
    logit_scale: Float[Tensor, "#batch #head query"] | None = None
    sink: Float[Tensor, "#batch head #query"] | None = None
    rotary: Rotary | None = None
    call: AttentionCall | None = None
    """The call of `attend`, where it was one."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, head, query, key)."""
        batch, heads, queries, _ = self.q.shape
        return batch, heads, queries, self.k.shape[2]

    @property
    def has_bias(self) -> bool:
        """Whether there is a positional term: an additive bias, or what a rescore adds to the content."""
        return self.bias is not None or self.rescore is not None


def record_of(
    call: AttentionCall,
    layer: int,
    out: Float[Tensor, "batch query head value"],
    *,
    causal: bool,
    context_free: bool,
    rotary: Rotary | None,
) -> AttentionRecord:
    """A record of a call of `attend`; the output as attention functions give it, with heads third."""
    return AttentionRecord(
        layer=layer,
        q=call.q,
        k=call.k,
        v=call.v,
        out=out.transpose(1, 2),
        scale=call.scale,
        mask=call.visibility.mask,
        causal=causal,
        bias=call.bias,
        context_free=context_free,
        rescore=call.rescore,
        softcap=call.softcap,
        logit_scale=call.logit_scale,
        sink=call.sink,
        rotary=rotary,
        call=call,
    )


OnRecord = Callable[[AttentionRecord], None]


class Family(ABC):
    """One model, by what is known of its family."""

    reroutes: ClassVar[bool] = False
    """Whether transformers may choose another path while attention is captured: the output must then be compared."""

    described: ClassVar[Mapping[type[nn.Module], type[nn.Module]]] = {}
    """Classes of modules that fill in a bias, and those that describe it in their place: for `lw.accelerate`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @classmethod
    @abstractmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Whether the model is of this family."""

    @property
    @abstractmethod
    def encoding(self) -> str:
        """The name of the positional encoding; several are joined by "+", those of a schedule's layers by ","."""

    @property
    @abstractmethod
    def depths(self) -> Mapping[str, int]:
        """The number of layers by part; the part is "" where there is only one."""

    @property
    def max_length(self) -> int | None:
        """The longest sequence that the model has positions for; None if there is no end."""
        return None

    @abstractmethod
    def capture(self, on_record: OnRecord, selected: Selected) -> AbstractContextManager[None]:
        """Report every call of the selected layers while the context is open; the model is left as it was."""

    @property
    def causal(self) -> bool:
        """Whether what `position_bias` gives is for causal attention."""
        return True

    @property
    def undescribed(self) -> str | None:
        """Why the bias of this very model cannot be described; None if it can."""
        return None

    def prepare(self, modules: list[Any]) -> None:
        """Tell modules whose classes were swapped what they need of one another; most need nothing."""
        return

    def position_bias(self, layer: int, length: int) -> Bias | None:
        """A layer's bias where positions alone decide it and it can be had without a forward pass."""
        return None

    def check_attention(self, *supported: str, reason: str) -> None:
        """An error unless the model runs one of these attention implementations."""
        implementation = self.model.config._attn_implementation
        if implementation not in supported:
            names = " or ".join(map(repr, supported))
            raise NotImplementedError(
                f"{type(self.model).__name__} can be captured under attn_implementation {names}, got "
                f"{implementation!r}: {reason}"
            )


SWAPPED = "lengthwise_swapped"
ACCELERATED = "lengthwise_accelerated"
OURS = (SWAPPED, ACCELERATED)
"""The names under which transformers knows our attention and mask functions in models of others."""

Implementations = list[tuple[Any, str]]
"""Configs, each with the attention implementation that it had."""


def check_configs(model: nn.Module) -> None:
    """An error if attention of ours runs under a config of the model already: undoing both would spoil it for good."""
    modules: Any = model.modules()
    for module in modules:
        name = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if name in OURS:
            raise ValueError(
                f"{type(model).__name__} has a config under which attention of ours runs already, {name!r}; take it "
                "out of the model that shares it, and give each model a config of its own"
            )


def set_implementation(model: nn.Module, name: str) -> Implementations:
    """Choose an attention implementation by name, in every config of a model; what to restore afterwards."""
    modules: Any = model.modules()
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config in configs.values():
        config._attn_implementation_internal = name
    return before


def restore_implementations(before: Implementations) -> None:
    """Undo `set_implementation`."""
    for config, implementation in before:
        config._attn_implementation_internal = implementation


def position_table(model: nn.Module) -> nn.Embedding | None:
    """A model's learned or fixed table of positions, if it has one."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in POSITION_TABLES and isinstance(module, nn.Embedding):
            return module
    return None


def table_length(model: nn.Module) -> int | None:
    """The longest sequence that a model's table of positions has a row for; None without a table.

    OPT and BART leave the first rows out (`offset`), RoBERTa and MPNet begin after the row for padding.
    """
    table = position_table(model)
    if table is None:
        return None
    unused = 0 if table.padding_idx is None else table.padding_idx + 1
    return int(table.num_embeddings - getattr(table, "offset", unused))


def visible(mask: Tensor) -> Bool[Tensor, "*shape"]:
    """True where a mask of transformers shows a key: booleans as they are, numbers that are added unless huge."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def visible_keys(mask: Tensor | None, q: Tensor, k: Tensor, *, causal: bool) -> Bool[Tensor, "#batch 1 query key"]:
    """The visible keys of every query, from transformers' mask or, without one, from causality alone."""
    queries, keys = q.shape[2], k.shape[2]
    if mask is not None:
        return visible(mask)[..., :keys].expand(-1, -1, queries, -1)
    every = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=q.device)
    return every.tril(keys - queries) if causal else every


def sliced(shown: Bool[Tensor, "#batch 1 query key"]) -> Mask:
    """A mask that is there as a whole."""
    return lambda rows, columns: shown[:, :, rows, columns]


def split_heads(merged: Float[Tensor, "batch query width"], heads: int) -> Float[Tensor, "batch head query dim"]:
    """Heads side by side in the last axis, as an axis of their own."""
    return merged.unflatten(-1, (heads, -1)).transpose(1, 2)


def key_level_bias(levels: Float[Tensor, "batch head key"], queries: int) -> LevelBias:
    """What families with ALiBi add, level[j], less level[i]: the same to a softmax, and 0 on the diagonal.

    The numbers are taken as the model has them, rounded as it rounds them.
    """
    if (levels == levels[:1]).all():
        levels = levels[:1]
    one, levels = at_least_float32(levels.new_ones(1, 1, 1)), levels.double()
    return LevelBias(levels[..., levels.shape[-1] - queries :], levels, one)


Read = Callable[[Any, int, Mapping[str, Any], Tensor], AttentionRecord]
"""A record from an attention module, its layer, its arguments by name, and its output before the last projection."""


class HookedFamily(Family):
    """A family whose attention layers are modules of one class, which every layer of the model has once."""

    attention: type[nn.Module]
    projection: str | None = None
    """The name of the last projection; None where the layer's output is what goes into it."""

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Whether the model has such layers."""
        return any(isinstance(module, cls.attention) for module in model.modules())

    @property
    def layers(self) -> list[nn.Module]:
        """The attention layers in order."""
        return [module for module in self.model.modules() if isinstance(module, self.attention)]

    @property
    def depths(self) -> Mapping[str, int]:
        """One part."""
        return {"": len(self.layers)}

    def read(self, module: Any, layer: int, arguments: Mapping[str, Any], merged: Tensor) -> AttentionRecord:
        """A record of one call: `arguments` of the layer by name, `merged` its output before the last projection."""
        raise NotImplementedError

    @contextmanager
    def capture(self, on_record: OnRecord, selected: Selected) -> Iterator[None]:
        """Hook the selected layers."""
        with ExitStack() as stack:
            for layer, module in enumerate(self.layers):
                if selected(layer, ""):
                    stack.enter_context(captured_module(module, layer, self.projection, self.read, on_record))
            yield


@contextmanager
def captured_module(
    module: nn.Module, layer: int, projection: str | None, read: Read, on_record: OnRecord
) -> Iterator[None]:
    """Record every call of one attention module."""
    merged: list[Tensor] = []

    def before_projection(_: nn.Module, args: tuple[Any, ...]) -> None:
        merged[:] = args[:1]

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        arguments = signature(module.forward).bind(*args, **kwargs)
        arguments.apply_defaults()
        out = output[0] if projection is None else merged.pop()
        _refuse_cached_keys(module, arguments.arguments, queries=out.shape[1])
        on_record(read(module, layer, arguments.arguments, out))

    with ExitStack() as stack:
        if projection is not None:
            hook = getattr(module, projection).register_forward_pre_hook(before_projection)
            stack.callback(hook.remove)
        stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
        yield


def _refuse_cached_keys(module: nn.Module, arguments: Mapping[str, Any], *, queries: int) -> None:
    """An error where keys come out of a cache: a record is made from the tokens of this call."""
    for name in ("past_key_values", "layer_past"):
        cache = arguments.get(name)
        if cache is not None and cache.get_seq_length() > queries:
            raise NotImplementedError(
                f"{type(module).__name__} can be captured without cached keys only, got {cache.get_seq_length()} keys "
                f"for {queries} queries; pass the whole text with use_cache=False"
            )
