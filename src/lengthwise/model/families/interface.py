"""Every family that follows transformers' attention interface, by a probe that is registered there.

The probe calls the very function that the model would call, and sees its arguments: queries and keys after rotation,
the mask, the scaling and, in T5 and its relatives, the bias. It needs two registrations: with the first alone the mask
becomes None.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lengthwise.bias import Bias, DenseBias, DistanceBias, at_least_float32
from lengthwise.model.families.base import (
    AttentionRecord,
    Family,
    OnRecord,
    Rotary,
    Rotate,
    Selected,
    position_table,
    sliced,
    table_length,
    visible_keys,
)

PROBES = {implementation: f"lengthwise_probe_{implementation}" for implementation in ("sdpa", "eager")}
"""The probe's names, by the implementation that it stands in for."""

CROSS = ("EncDecAttention", "encoder_attn", "cross_attn", "crossattention")
"""What transformers calls layers whose queries are the decoder's and whose keys are the encoder's."""


class InterfaceFamily(Family):
    """Any model of transformers whose attention implementation can be chosen."""

    reroutes = True  # attention and mask are chosen by the probe's name

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Whether the model's file calls the interface."""
        return isinstance(model, PreTrainedModel) and model._can_set_attn_implementation()

    @property
    def encoding(self) -> str:
        """By what its config and its modules are called."""
        config = self.model.config.get_text_config()
        if getattr(config, "relative_attention_num_buckets", None):
            return "t5"
        if getattr(config, "rope_parameters", None):
            return "rope"
        return str(config.model_type) if position_table(self.model) is None else "learned"

    @property
    def depths(self) -> Mapping[str, int]:
        """As its config says."""
        config = self.model.config
        if not config.is_encoder_decoder:
            return {"": _number(config.get_text_config(), "num_hidden_layers", "num_layers", "n_layer")}
        encoder = _number(config, "encoder_layers", "num_layers", "num_hidden_layers")
        decoder = _number(config, "decoder_layers", "num_decoder_layers", "num_layers", "num_hidden_layers")
        return {"decoder": decoder, "encoder": encoder, "cross": decoder}

    @property
    def max_length(self) -> int | None:
        """The end of its table, if positions are looked up in one."""
        return table_length(self.model)

    @contextmanager
    def capture(self, on_record: OnRecord, selected: Selected) -> Iterator[None]:
        """Put the probe in the place of the model's attention function, and that back at the end."""
        self.check_attention(*PROBES, reason="call model.set_attn_implementation('sdpa') first")
        model = self.model
        names = {id(module): name for name, module in model.named_modules()}
        calls = _Calls(model.base_model, names, model.config.is_encoder_decoder, on_record, selected)
        configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
        before = {key: config._attn_implementation for key, config in configs.items()}
        hooks = [module.register_forward_pre_hook(calls.keep_angles, with_kwargs=True) for module in model.modules()]
        token = _calls.set(calls)
        try:
            model.set_attn_implementation(PROBES[model.config._attn_implementation])
            yield
        finally:
            _calls.reset(token)
            for hook in hooks:
                hook.remove()
            for key, config in configs.items():
                config._attn_implementation_internal = before[key]


@dataclass
class _Calls:
    """What the probe reports to, for one model."""

    body: nn.Module
    names: dict[int, str]
    several_parts: bool
    on_record: OnRecord
    selected: Selected
    count: Counter[str] = field(default_factory=Counter)
    angles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def keep_angles(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the (cos, sin) that a layer gets: the attention function does not get them. A pass counts anew."""
        if module is self.body:
            self.count.clear()
        self.angles.pop(id(module), None)
        angles = kwargs.get("position_embeddings")
        if isinstance(angles, tuple) and len(angles) == 2 and all(isinstance(x, Tensor) for x in angles):
            self.angles[id(module)] = angles

    def report(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, **options: Any
    ) -> None:
        """Record one call, if its layer is selected."""
        part = part_of(self.names.get(id(module), ""), several=self.several_parts)
        number = getattr(module, "layer_idx", None)
        layer = number if isinstance(number, int) else self.count[part]
        self.count[part] += 1
        if not self.selected(layer, part):
            return
        scale, sink, angles = options.get("scaling"), options.get("s_aux"), self.angles.get(id(module))
        shown, causal = _visible(module, q, k, mask, options.get("is_causal"))
        record = AttentionRecord(
            layer=layer,
            q=q,
            k=k,
            v=v,
            out=out.transpose(1, 2),
            scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
            mask=sliced(shown),
            causal=causal,
            part=part,
            bias=None if part == "cross" else distance_bias(options.get("position_bias")),
            context_free=True,
            softcap=options.get("softcap"),
            sink=None if sink is None else sink[None, :, None],
            rotary=None if angles is None else rotary_of(module, q, k, angles),
        )
        self.on_record(record)


_calls: ContextVar[_Calls | None] = ContextVar("calls of the probe", default=None)


def _probe(implementation: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        attention = ALL_ATTENTION_FUNCTIONS["sdpa"] if implementation == "sdpa" else _eager_of(module)
        out, weights = attention(module, query, key, value, attention_mask, **kwargs)
        calls = _calls.get()
        if calls is not None:
            calls.report(module, query, key, value, attention_mask, out, **kwargs)
        return out, weights

    return probe


def _eager_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The eager attention of a module's own family, which lies beside it."""
    attention = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if attention is None:
        raise NotImplementedError(
            f"{type(module).__name__} has no 'eager_attention_forward' in its own file; call "
            "model.set_attn_implementation('sdpa') first"
        )
    return attention


def _visible(
    module: nn.Module, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool | None
) -> tuple[Tensor, bool]:
    """The visible keys, and whether none of them lies ahead."""
    queries, keys = q.shape[2], k.shape[2]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and queries > 1
    shown = visible_keys(mask, q, k, causal=causal)
    return shown, causal if mask is None else queries == keys and not bool(shown.triu(1).any())


def distance_bias(dense: Tensor | None) -> Bias | None:
    """A filled-in bias as a table of distances where it is one, to the last bit."""
    if dense is None:
        return None
    queries, keys = dense.shape[2:]
    table = torch.cat([dense[0, :, 0].flip(-1), dense[0, :, 1:, 0]], -1)
    query, key = (torch.arange(size, device=dense.device) for size in (queries, keys))
    described = DistanceBias(table, query, key, 1 - keys)
    same = all(
        torch.equal(described.tile(rows, slice(None)).expand_as(dense[:, :, rows]), dense[:, :, rows])
        for rows in (slice(row, row + 64) for row in range(0, queries, 64))
    )
    return described if same else DenseBias(dense)


def rotary_of(module: nn.Module, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor]) -> Rotary | None:
    """The rotation of a layer that got q and k already rotated by `angles` = (cos, sin), by the family's own function.

    It is undone with the sine's sign changed. Where that does not lead back, the family lays out its angles in a way
    that is not known here.
    """
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    cos, sin = (at_least_float32(x) for x in angles)
    if apply is None or cos.ndim != 3:
        return None
    width, power = cos.shape[-1], (cos.square() + sin.square()).mean()

    def rotated_by(cos: Tensor, sin: Tensor) -> Rotate:
        def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            turned = apply(q[..., :width], k[..., :width], cos, sin)
            whole = [torch.cat([new, old[..., width:]], -1) for new, old in zip(turned, (q, k), strict=True)]
            return whole[0], whole[1]

        return rotate

    def unrotated() -> tuple[Tensor, Tensor] | None:
        own = at_least_float32(q), at_least_float32(k)
        with suppress(RuntimeError):  # shapes that do not fit: another layout
            flat = rotated_by(cos / power, -sin / power)(*own)
            again = rotated_by(cos, sin)(*flat)
            if all(torch.allclose(a, b, atol=1e-3, rtol=1e-2) for a, b in zip(again, own, strict=True)):
                return flat
        return None

    return Rotary(unrotated, rotated_by(cos[:1], sin[:1]))


def part_of(name: str, *, several: bool) -> str:
    """The part of the model that a module of this name belongs to; "" where there is only one."""
    if not several:
        return ""
    if any(word in name for word in CROSS):
        return "cross"
    return "decoder" if "decoder" in name.split(".") else "encoder"


def _number(config: Any, *names: str) -> int:
    for name in names:
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    raise NotImplementedError(
        f"{type(config).__name__} does not say how many layers there are: it has none of {', '.join(names)}"
    )


for _implementation, _name in PROBES.items():
    AttentionInterface.register(_name, _probe(_implementation))
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS[_implementation])
