"""Transformers' caches: an encoding's state in them, and windows of which they hold the nearest keys alone.

The state of a layer is kept by a second layer of the same kind, its twin, whose keys are the state's numbers: what a
cache does to keys (crop, reorder, repeat, slide, offload) happens to the state by transformers' own code. The twin has
its own heads and dtype: as many as there are queries', in float32 or better, whatever the keys have.

A dynamic layer of transformers copies all its keys for every new token. Ours has room behind them, and writes the new
one there: the same numbers, and the class is all that a cache shows of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from lengthwise.encodings.base import State
from lengthwise.token_layout import Slot, TokenLayout, Window

Numbers = Float[Tensor, "batch head position number"]
OtherNumbers = Float[Tensor, "_ _ _ _"]
"""Of other tokens, and perhaps of other sizes."""


ROOM = 128
"""So many slots are behind the tokens of a dynamic layer each time that they are copied."""


@dataclass
class Room:
    """The memory that tokens lie in the front of. Each slot is written once, whoever holds the tokens before it."""

    address: int
    filled: int
    slots: int

    def takes(self, tokens: Numbers, new: OtherNumbers) -> bool:
        """Whether the new ones can be written behind the tokens: these are all that was ever written here."""
        count, rows = tokens.shape[2], tokens.stride(1)
        here = tokens.data_ptr() == self.address and rows == self.slots * tokens.shape[3]
        return here and count == self.filled and count + new.shape[2] <= self.slots and _alike(tokens, new)


def _alike(tokens: Numbers, new: OtherNumbers) -> bool:
    return (
        (tokens.shape[:2], tokens.shape[3], tokens.dtype, tokens.device)
        == (new.shape[:2], new.shape[3], new.dtype, new.device)
        # Outside of inference mode, tensors that were made in it cannot be written.
        and (torch.is_inference_mode_enabled() or not tokens.is_inference())
    )


def _appended(tokens: Numbers, new: OtherNumbers, room: Room | None) -> tuple[OtherNumbers, Room | None]:
    """The tokens with new ones behind them, and the room that they lie in."""
    count = tokens.shape[2] + new.shape[2]
    if room is None or not room.takes(tokens, new):
        if tokens.numel() == 0 or not _alike(tokens, new):
            return torch.cat([tokens, new], 2), None
        longer = tokens.new_empty(*tokens.shape[:2], count + ROOM, tokens.shape[3])
        room = Room(longer.data_ptr(), count, count + ROOM)
        every = longer[:, :, :count]
        every[:, :, : tokens.shape[2]] = tokens
    else:
        room.filled = count
        every = tokens.as_strided((*tokens.shape[:2], count, tokens.shape[3]), tokens.stride())
    every[:, :, tokens.shape[2] :] = new
    return every, room


class GrowingLayer(DynamicLayer):
    """A dynamic layer with room behind its tokens, in passes without gradients."""

    rooms: tuple[Room | None, Room | None] = None, None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add new tokens; all keys and values."""
        few = key_states.shape[2] <= ROOM
        if not few or not self.get_seq_length() or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        assert self.keys is not None
        assert self.values is not None
        keys, values = self.rooms
        self.keys, keys = _appended(self.keys, key_states, keys)
        self.values, values = _appended(self.values, value_states, values)
        self.rooms = keys, values
        return self.keys, self.values


class StateLayer(CacheLayerMixin):
    """A cache layer, made of an empty one, that passes on to its twin whatever happens to it."""

    def __init__(self, layer: Any) -> None:
        for name, value in vars(layer).items():
            setattr(self, name, value)
        slots = getattr(layer, "max_cache_len", None)
        kind: Any = GrowingLayer if type(layer) is DynamicLayer else type(layer)
        self.twin = kind(max_cache_len=slots, sliding_window=getattr(layer, "sliding_window", slots))
        if getattr(layer, "record_past", False):
            self.twin.activate_past_recording()
        self.visible: Numbers | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, state: Numbers, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add new tokens; all keys and values. `state` of all of them is then in `visible`, until it is taken."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[safe-super]
        self.visible = self.twin.update(state, state[..., :0])[0]
        return keys, values

    def take(self) -> Numbers:
        """The state of the keys that the last update returned."""
        visible, self.visible = self.visible, None
        assert visible is not None
        return visible

    def offload(self) -> None:
        """Move to the CPU."""
        super().offload()
        self.twin.offload()

    def prefetch(self) -> None:
        """Move back."""
        super().prefetch()
        self.twin.prefetch()

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self.twin.reset()

    def reorder_cache(self, beam_idx: Any) -> None:
        """Sequences in another order."""
        super().reorder_cache(beam_idx)
        self.twin.reorder_cache(beam_idx)


class CroppedStateLayer(StateLayer):
    """One whose tokens can be taken off again."""

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens."""
        super().crop(tokens_to_remove)  # type: ignore[misc]
        self.twin.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence several times."""
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.twin.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some of the sequences."""
        super().batch_select_indices(indices)  # type: ignore[misc]
        self.twin.batch_select_indices(indices)


class DynamicStateLayer(CroppedStateLayer, GrowingLayer):
    """Grows with the tokens."""


class DynamicSlidingStateLayer(CroppedStateLayer, DynamicSlidingWindowLayer):
    """Grows up to a window."""

    def activate_past_recording(self) -> None:
        """Keep what leaves the window until the next `crop`."""
        super().activate_past_recording()
        self.twin.activate_past_recording()


class StaticStateLayer(StateLayer, StaticLayer):
    """Has all its room from the start."""


class StaticSlidingStateLayer(StateLayer, StaticSlidingWindowLayer):
    """Has the room of a window from the start."""


KINDS: dict[type, type[StateLayer]] = {
    DynamicLayer: DynamicStateLayer,
    GrowingLayer: DynamicStateLayer,
    DynamicSlidingWindowLayer: DynamicSlidingStateLayer,
    StaticLayer: StaticStateLayer,
    StaticSlidingWindowLayer: StaticSlidingStateLayer,
}


def fit_windows(cache: Cache, reaches: Sequence[int | None]) -> None:
    """Cut sliding layers that are still empty down to how far the model's layers reach; an error if one is too short.

    transformers knows one window for all layers, the longest.
    """
    layers: list[Any] = cache.layers
    for number, (layer, reach) in enumerate(zip(layers, reaches, strict=False)):
        window = _window(layer)
        if window is None or torch.compiler.is_compiling():
            continue
        if reach is not None and reach < window and int(layer.get_seq_length()) == 0:
            layers[number] = type(layer)(max_cache_len=reach, sliding_window=reach)
            if getattr(layer, "record_past", False):  # assisted decoding takes tokens back
                layers[number].activate_past_recording()
        elif reach is None or (reach > window and not layer.is_compileable):
            raise ValueError(
                f"layer {number} must keep {'all' if reach is None else reach} tokens, got a cache that keeps "
                f"{window}; make it with config=model.config"
            )


def cached_length(cache: Cache, reaches: Sequence[Any] = ()) -> tuple[Slot, int | None]:
    """How many tokens a cache has had, and how many it has room for; None if there is no end."""
    layers: list[Any] = cache.layers
    # Layers of linear attention, in hybrid models, have neither a window nor tokens.
    full = [number for number, layer in enumerate(layers) if getattr(layer, "is_sliding", True) is False]
    first = full[0] if full else next((n for n, layer in enumerate(layers) if hasattr(layer, "is_sliding")), 0)
    # A static cache hands out the counter that it goes on to raise.
    past = cache.get_seq_length(first)
    past = past.clone() if isinstance(past, Tensor) else past
    if not cache.is_compileable:
        return past, None
    if full:
        return past, layers[full[0]].max_cache_len
    # One that is shorter than the window of its layer has all of its room there.
    slots = [getattr(layer, "max_cache_len", reach) for layer, reach in zip(layers, reaches, strict=False)]
    rooms = [count for count, reach in zip(slots, reaches, strict=False) if count < reach]
    return past, min(rooms) if rooms else None


def cached_layout(cache: Cache, number: int, layout: TokenLayout, window: Window | None) -> TokenLayout:
    """The layout of the keys that a layer of the cache gives once the new tokens are in it."""
    if number >= len(cache.layers) or _window(cache.layers[number]) is None:
        return layout
    count, first = cache.get_mask_sizes(layout.query_count, number)
    if not isinstance(layout.query_start, Tensor):
        count = min(count, layout.key_count - first)
        readable = not torch.compiler.is_compiling() and layout.key.device.type == "cpu"
        if readable and first and layout.key_mask is not None and not isinstance(window, int):
            _check_padding(layout.key_mask, first, int(layout.query_start))
    return layout if first == 0 and count == layout.key_count else layout.keys(first, count)


def _check_padding(mask: Bool[Tensor, "#batch key"], first: int, past: int) -> None:
    """An error where padding takes the place of tokens that a band reaches: bands count tokens, caches count slots."""
    if bool((mask[:, :first].any(1) & ~mask[:, first:past].all(1)).any()):
        raise NotImplementedError(
            "chunks and bands count tokens, and a sliding cache has lost some to padding between them; pass "
            "past_key_values=DynamicCache(), which keeps all"
        )


def _window(layer: Any) -> int | None:
    """How many tokens a sliding layer keeps, itself included; None for one that keeps all."""
    return (
        getattr(layer, "sliding_window", None) or layer.max_cache_len if getattr(layer, "is_sliding", False) else None
    )


def remember(
    cache: Cache,
    layer: int,
    k: Float[Tensor, "batch kv_head query dim"],
    v: Float[Tensor, "batch kv_head query dim"],
    state: dict[str, Float[Tensor, "batch head query ..."]] | None,
) -> tuple[Tensor, Tensor, State | None]:
    """Add new tokens to the cache; keys, values and state of all slots that it has."""
    if not state:
        make_room(cache, layer)
        k, v = cache.update(k, v, layer)
        return k, v, state
    holder = _holder(cache, layer)
    k, v = cache.update(k, v, layer, state=_packed(state))
    return k, v, _unpacked(holder.take(), state)


def make_room(cache: Cache, layer: int) -> None:
    """See that a layer of the cache, if it is a plain dynamic one, does not copy all its keys for every new token."""
    if layer < len(cache.layers) and type(cache.layers[layer]) is DynamicLayer and not torch.compiler.is_compiling():
        cache.layers[layer].__class__ = GrowingLayer


def _holder(cache: Cache, layer: int) -> StateLayer:
    """The cache's layer, made one that can hold a state if it cannot yet."""
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= layer:
        cache.layers.append(cache.layer_class_to_replicate())
    found: Any = cache.layers[layer]
    if isinstance(found, StateLayer):
        return found
    if type(found) not in KINDS:
        raise NotImplementedError(
            f"expected a dynamic or a static cache for an encoding with a state, got a layer {type(found).__name__}: "
            "a quantised cache, for one, would round the state and with it every position"
        )
    if not torch.compiler.is_compiling() and int(found.get_seq_length()) > 0:
        raise ValueError(
            f"expected an empty cache or one filled by this model, got {int(found.get_seq_length())} tokens without "
            "the encoding's state"
        )
    holder = KINDS[type(found)](found)
    cache.layers[layer] = holder
    return holder


def _packed(state: State) -> Numbers:
    """All numbers of a token along one axis."""
    parts = [numbers.unsqueeze(-1) if numbers.ndim == 3 else numbers.flatten(3) for numbers in state.values()]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _unpacked(numbers: Numbers, like: dict[str, Tensor]) -> State:
    """The numbers by name, each with the axes that it has in `like`."""
    sizes = [part.shape[3:].numel() for part in like.values()]
    parts = [numbers] if len(sizes) == 1 else numbers.split_with_sizes(sizes, -1)
    return {
        name: part.unflatten(3, x.shape[3:]) if x.ndim > 3 else part.squeeze(3)
        for (name, x), part in zip(like.items(), parts, strict=True)
    }
