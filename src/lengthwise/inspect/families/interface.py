"""Every family that follows transformers' attention interface, by a probe that is registered there.

The probe calls the very function that the model would call, and sees what it is given: queries and keys after
rotation, the mask, the scaling and, in T5's kin, the bias. It needs two registrations: with the first alone the mask
becomes None.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lengthwise.bias import Bias, DenseBias, DistanceBias
from lengthwise.inspect.families.route import Route, See, Wanted
from lengthwise.inspect.record import Mask, Record
from lengthwise.inspect.rotary import kernel_of_turned

PROBES = {own: f"lengthwise_probe_{own}" for own in ("sdpa", "eager")}
"""The probe's names, by the implementation that it stands in for."""

CROSS = ("EncDecAttention", "encoder_attn", "cross_attn", "crossattention")
"""What layers that look across from decoder to encoder are called."""


def route(model: nn.Module) -> Route | None:
    """The way into a model of transformers whose attention can be chosen; None for any other."""
    if not isinstance(model, PreTrainedModel) or not model._can_set_attn_implementation():
        return None
    config = model.config.get_text_config()
    encoding = _encoding(model, config)
    if model.config.is_encoder_decoder:
        encoder = _number(model.config, "encoder_layers", "num_layers", "num_hidden_layers")
        decoder = _number(model.config, "decoder_layers", "num_decoder_layers", "num_layers", "num_hidden_layers")
        depths = {"decoder": decoder, "encoder": encoder, "cross": decoder}
    else:
        depths = {"": _number(config, "num_hidden_layers", "num_layers", "n_layer")}
    limit = None if encoding == "rope" else getattr(config, "max_position_embeddings", None)
    return Route(encoding, depths, watch, limit, in_path=True)


@contextmanager
def watch(model: nn.Module, see: See, wanted: Wanted) -> Iterator[None]:
    """Put the probe in the place of the model's attention, and its own back at the end."""
    assert isinstance(model, PreTrainedModel)
    own = model.config._attn_implementation
    if own not in PROBES:
        raise NotImplementedError(
            f"a model can be looked into under the attention {' or '.join(map(repr, PROBES))}; this one runs {own!r}. "
            "Call model.set_attn_implementation('sdpa') first."
        )
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    before = {key: config._attn_implementation for key, config in configs.items()}
    watcher = Watcher({id(m): name for name, m in model.named_modules()}, model.config.is_encoder_decoder, see, wanted)
    hooks = [m.register_forward_pre_hook(watcher.keep_waves, with_kwargs=True) for m in model.modules()]
    token = _watcher.set(watcher)
    try:
        model.set_attn_implementation(PROBES[own])
        yield
    finally:
        _watcher.reset(token)
        for hook in hooks:
            hook.remove()
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


@dataclass
class Watcher:
    """What the probe reports to, for one model and one forward pass."""

    names: dict[int, str]
    several: bool
    see: See
    wanted: Wanted
    calls: Counter[str] = field(default_factory=Counter)
    waves: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def keep_waves(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the angles that a layer is given: the attention function does not get them."""
        self.waves.pop(id(module), None)
        waves = kwargs.get("position_embeddings")
        if isinstance(waves, tuple) and len(waves) == 2 and all(isinstance(wave, Tensor) for wave in waves):
            self.waves[id(module)] = waves

    def take(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, **said: Any
    ) -> None:
        """Make a record of one call, if its layer is wanted."""
        part = _part(self.names.get(id(module), ""), self.several)
        number = getattr(module, "layer_idx", None)
        layer = number if isinstance(number, int) else self.calls[part]
        self.calls[part] += 1
        if not self.wanted(layer, part):
            return
        scale = said.get("scaling")
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
        may, causal = _mask(module, q, k, mask, said.get("is_causal"))
        waves = self.waves.get(id(module))
        bias = None if part == "cross" else as_described(said.get("position_bias"))
        record = Record(
            layer=layer,
            q=q,
            k=k,
            v=v,
            out=out.transpose(1, 2),
            scale=scale,
            mask=may,
            causal=causal,
            bias=bias,
            context_free=True,
            softcap=said.get("softcap"),
            sinks=said.get("s_aux"),
            rotated=None if waves is None else partial(kernel_of_turned, module, q, k, waves, scale=scale),
        )
        self.see(record, part)


_watcher: ContextVar[Watcher | None] = ContextVar("lengthwise watcher", default=None)


def _probe(own: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        attention = ALL_ATTENTION_FUNCTIONS["sdpa"] if own == "sdpa" else _eager_of(module)
        out, weights = attention(module, query, key, value, attention_mask, **kwargs)
        watcher = _watcher.get()
        if watcher is not None:
            watcher.take(module, query, key, value, attention_mask, out, **kwargs)
        return out, weights

    return probe


def _eager_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The eager attention of a module's own family, which lies beside it."""
    found = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if found is None:
        raise NotImplementedError(
            f"the eager attention of {type(module).__name__} must be 'eager_attention_forward' of its own file; there "
            "is none. Call model.set_attn_implementation('sdpa') first."
        )
    return found


def _mask(module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool | None) -> tuple[Mask, bool]:
    """Which keys rows may see, and whether none of them lies ahead."""
    queries, keys = q.shape[2], k.shape[2]
    if mask is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and queries > 1
        may = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=q.device)
        may = may.tril(keys - queries) if causal else may
    else:
        may = allowed(mask)[..., :keys].expand(-1, -1, queries, -1)
        causal = queries == keys and not bool(may.triu(1).any())
    return lambda rows, columns: may[:, :, rows, columns], causal


def allowed(mask: Tensor) -> Tensor:
    """True where a mask of transformers lets a query look: booleans say so, numbers are added and forbid if huge."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def as_described(dense: Tensor | None) -> Bias | None:
    """A filled-in bias as a table of distances where it is one, to the last bit."""
    if dense is None:
        return None
    queries, keys = dense.shape[2:]
    table = torch.cat([dense[0, :, 0].flip(-1), dense[0, :, 1:, 0]], -1)
    first = 1 - keys
    device = dense.device
    described = DistanceBias(table, torch.arange(queries, device=device), torch.arange(keys, device=device), first)
    same = all(
        torch.equal(described.tile(rows, slice(None)).expand_as(dense[:, :, rows]), dense[:, :, rows])
        for rows in (slice(row, row + 64) for row in range(0, queries, 64))
    )
    return described if same else DenseBias(dense)


def _part(name: str, several: bool) -> str:
    if not several:
        return ""
    if any(word in name for word in CROSS):
        return "cross"
    return "decoder" if "decoder" in name.split(".") else "encoder"


def _encoding(model: PreTrainedModel, config: Any) -> str:
    """How the family encodes positions, by what its config and its weights are called."""
    if getattr(config, "relative_attention_num_buckets", None):
        return "t5"
    if getattr(config, "rope_parameters", None):
        return "rope"
    tables = ("wpe.weight", "embed_positions.weight", "position_embeddings.weight")
    return "learned" if any(name.endswith(tables) for name, _ in model.named_parameters()) else config.model_type


def _number(config: Any, *names: str) -> int:
    for name in names:
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    raise NotImplementedError(
        f"a model's config must say how many layers it has; {type(config).__name__} has none of {', '.join(names)}. "
        "It needs a route of its own in lengthwise.inspect.families."
    )


for _own, _name in PROBES.items():
    AttentionInterface.register(_name, _probe(_own))
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS[_own])
