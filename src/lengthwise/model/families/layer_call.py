"""What one attention layer knows of one forward pass, and what rides to it in the place of the mask."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn
from transformers import Cache

from lengthwise.bias import Bias
from lengthwise.encodings import AttentionShape, Encoding
from lengthwise.model.attention import CAPTURE, NAME, Output, attend_options, lengthwise_attention
from lengthwise.model.encoded import encoded_attention
from lengthwise.token_layout import TokenLayout, Window

Run = Callable[["LayerCall"], Output]
"""What is computed in the place of a layer's attention."""

Observer = Callable[["LayerCall", Tensor, Tensor, Tensor, Tensor, dict[str, Any]], None]
"""Gets a call, the queries, keys and values that met, the output, and what else `attend` was given."""

_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Report every call of our attention, of passes that begin while the context is open."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def _observer_of_pass() -> Observer | None:
    return None if torch.compiler.is_compiling() else _observer.get()


SHARED = "it is shared with a fitted or stretched model, or a copy of its config; give each model a config of its own"


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskPlace:
    """What stands in the place of a mask, which no attention but ours can use."""

    ndim: ClassVar[int] = 0
    """Families look at the axes of a mask before they add to it."""

    padding: Tensor | None = None
    """The mask of which this took the place: all that is left of it once a pass is over."""

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """MPT makes its mask one of booleans."""
        return self

    def contiguous(self) -> Self:
        """`generate` lays out the masks that it prepares."""
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise ValueError(f"a model without attention of ours runs under a config with it: {SHARED}")


@dataclass(frozen=True, eq=False)
class Placed(MaskPlace):
    """What rides in the place of the mask: where the tokens of this pass stand, and how far a kind of layer sees."""

    layout: TokenLayout
    window: Window | None = None
    added: Bias | None = None
    """What an explicit mask of numbers adds."""
    weights: bool = False
    """Whether the caller wants the weights of attention."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """What layers of this pass need not compute again; not in compiled graphs."""
    observer: Observer | None = field(default_factory=_observer_of_pass)
    """Who wants to know of every call."""

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes, once a pass for every key."""
        if torch.compiler.is_compiling():
            return make()
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One attention layer in one forward pass. `q`, `k` and `v` are of the new tokens alone, (batch, head, token, dim).

    They are unrotated, but for layers that compute what they did. `scale`, `window`, `softcap` and `sink` are the
    layer's own, as `attend` takes them.
    """

    module: Any
    number: int
    x: Tensor
    """What enters the attention module: (batch, token, width)."""
    layout: TokenLayout
    """Of all keys that this layer has once the new ones are cached."""
    placed: Placed
    """What all layers of the pass have in common."""
    cache: "NewTokens | None"
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    dropout: float = 0.0
    turned: bool = False
    """Whether the module has turned queries and keys by the angles that it was given in the place of its own."""

    @property
    def window(self) -> Window | None:
        """How far the layer sees by itself."""
        return self.placed.window

    def new_tokens(self) -> TokenLayout:
        """The layout of the new tokens alone."""
        layout: TokenLayout = self.placed.once("new", self.placed.layout.new_tokens)
        return layout

    def run(
        self, encoding: Encoding, *, bias: Bias | None = None, window: Window | None = None, spread: int = 1
    ) -> Output:
        """The layer's attention with an encoding; a bias or a window that is given takes the place of its own."""
        observer = self.placed.observer
        return encoded_attention(
            encoding,
            self.x,
            self.q,
            self.k,
            self.v,
            module=self.module,
            attention=lengthwise_attention if observer is None else self._reporting(observer),
            implementation=NAME if observer is None else CAPTURE,
            layout=self.layout,
            new_tokens=self.new_tokens,
            cache=None if self.cache is None else self.cache.whole,
            layer=0 if self.cache is None else self.cache.number,
            window=self.window if window is None else window,
            scale=self.scale,
            softcap=self.softcap,
            sink=self.sink,
            bias=bias,
            added=self.placed.added,
            turned=self.turned,
            spread=spread,
            output_attentions=self.placed.weights,
        )

    def _reporting(self, observer: Observer) -> Callable[..., Output]:
        def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, **options: Any) -> Output:
            out, weights = lengthwise_attention(module, q, k, v, mask, **options)
            observer(self, q, k, v, out, attend_options(options))
            return out, weights

        return attention


PLAIN = Encoding(AttentionShape(1, 1, 1, 1))
"""An encoding that does nothing, in layers of any shape."""


def as_before(call: LayerCall) -> Output:
    """What a layer computes by itself."""
    return call.run(PLAIN)


def check_no_dropout(module: nn.Module, dropout: float, other_way: str) -> None:
    """An error if a module is about to train with dropout of its attention weights, which would be lost."""
    if dropout:
        own = next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("lengthwise."))
        raise NotImplementedError(
            f"{own.__name__} trains with attention dropout {dropout}, which there is not here; set it to 0 in the "
            f"config, or {other_way}"
        )


class NewTokens(Cache):
    """A cache that gives a layer its new keys and values back: they are cached once our function has had them."""

    def __init__(self, cache: Cache) -> None:
        self.whole, self.layers, self.number = cache, cache.layers, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new tokens as they are."""
        self.number = layer_idx
        return key_states, value_states
