"""An encoding's state inside transformers' own caches: as extra channels of the keys.

Caches know keys and values alone, and crop, reorder and repeat them; a state that rides in the keys goes along. Values
are widened only for a static cache that was made ahead of time, which has one width for both. A float32 number does
not fit into a half-precision channel, so there it rides in three: what one rounds away, the next one holds, raised by
as many bits as the first has so that it does not sink below the smallest number.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import QuantizedLayer

from lengthwise.encodings.base import State

HALVES = {torch.bfloat16: 8, torch.float16: 11}
"""How many bits of precision a half-precision number has."""

PARTS = 3
"""So many half-precision channels hold a float32 number: 24 bits."""


def channels(numbers: int, dtype: torch.dtype) -> int:
    """How many channels so many numbers per token and head take."""
    return numbers * (PARTS if dtype in HALVES else 1)


def remember(
    cache: Cache,
    layer: int,
    k: Float[Tensor, "batch head query dim"],
    v: Float[Tensor, "batch head query dim"],
    state: State | None,
    keys: int,
) -> tuple[Tensor, Tensor, State | None]:
    """Add new tokens to the cache; keys, values and state of the first `keys` slots, old and new."""
    if not state:
        k, v = cache.update(k, v, layer)
        return _filled(k, keys), _filled(v, keys), state
    if layer < len(cache.layers) and isinstance(cache.layers[layer], QuantizedLayer):
        raise NotImplementedError(
            "a quantised cache would round the encoding's state and with it every position; it came with an encoding "
            "that has one. Use a dynamic or a static cache."
        )
    dim, width, dtype = k.shape[-1], channels(1, k.dtype), k.dtype
    k = torch.cat([k, *(split(numbers, dtype) for numbers in state.values())], -1)
    k, v = cache.update(k, _as_wide_as_made(cache, layer, v, k.shape[-1] - dim), layer)
    k, *parts = _filled(k, keys).split_with_sizes([dim, *(width for _ in state)], -1)
    v = _filled(v, keys)
    return k, v if v.shape[-1] == dim else v[..., :dim], dict(zip(state, map(join, parts), strict=True))


def _filled(x: Tensor, keys: int) -> Tensor:
    """Without the room that a static cache has behind."""
    return x if x.shape[2] == keys else x[:, :, :keys]


def _as_wide_as_made(cache: Cache, layer: int, v: Tensor, extra: int) -> Tensor:
    """The values, widened if the cache was made ahead of time for keys with a state; an error if without."""
    made = cache.layers[layer] if layer < len(cache.layers) else None
    keys, values = (getattr(made, name, None) for name in ("keys", "values"))
    if keys is None or values is None or keys.ndim != 4:
        return v
    dim = v.shape[-1]
    if keys.shape[-1] != dim + extra:
        raise ValueError(
            f"keys with the encoding's state are {dim + extra} wide; the cache was made for {keys.shape[-1]}. Make it "
            "with the widths of model._get_static_cache_init_shape(), or leave out early_initialization."
        )
    return v if values.shape[-1] == dim else F.pad(v, (0, values.shape[-1] - dim))


def split(x: Float[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape part"]:
    """x as channels of a dtype, none of it lost.

    >>> x = torch.tensor([0.1, 1234.5678])
    >>> torch.equal(join(split(x, torch.bfloat16)), x)
    True
    """
    if dtype not in HALVES:
        return (x if x.dtype == dtype else x.to(dtype)).unsqueeze(-1)
    parts: list[Tensor] = []
    for _ in range(PARTS):
        parts.append(x.to(dtype))
        x = (x - parts[-1].to(x.dtype)) * 2 ** HALVES[dtype]
    return torch.stack(parts, -1)


def join(parts: Float[Tensor, "*shape part"]) -> Float[Tensor, "*shape"]:
    """The numbers that `split` took apart, in float32 or better."""
    if parts.dtype not in HALVES:
        return parts.squeeze(-1)
    raised = 2.0 ** -(HALVES[parts.dtype] * torch.arange(PARTS, device=parts.device, dtype=torch.float64))
    return (parts.double() * raised).sum(-1).float()
