"""Lengthwise models: the encoding's own bias, described, and queries and keys as they meet.

They are captured by an attention function of their own, which calls the one that the model runs under and reports its
arguments. A Lengthwise model makes its layout itself, so nothing else depends on the function's name.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lengthwise.attention import checked_call
from lengthwise.bias import Bias
from lengthwise.encodings import Encoding
from lengthwise.model.attention import CAPTURE, Output, attend_options, eager_attention, run_attention
from lengthwise.model.families.base import Family, OnRecord, Rotary, Selected, record_of
from lengthwise.model.modeling import LengthwiseAttention, LengthwisePreTrainedModel
from lengthwise.token_layout import TokenLayout, layout


class LengthwiseFamily(Family):
    """Our own models, with any encoding."""

    model: LengthwisePreTrainedModel

    @classmethod
    def accepts(cls, model: nn.Module) -> bool:
        """Whether the model is built from this package, and not from a copy of its code."""
        return isinstance(model, LengthwisePreTrainedModel)

    @property
    def encoding(self) -> str:
        """As its config says; a schedule in short."""
        return self.model.config.label

    @property
    def depths(self) -> Mapping[str, int]:
        """One part."""
        return {"": self.model.config.n_layer}

    @property
    def max_length(self) -> int | None:
        """The least limit of its encodings."""
        limits = [part.limit for part in self.model.modules() if isinstance(part, Encoding)]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def layers(self) -> list[LengthwiseAttention]:
        """The attention layers in order."""
        return [module for module in self.model.modules() if isinstance(module, LengthwiseAttention)]

    def encoding_of(self, layer: LengthwiseAttention) -> Encoding:
        """The encoding of a layer: its own, or the one that all share."""
        encoding = getattr(layer, "encoding", None) or getattr(self.model.base_model, "encoding", None)
        assert isinstance(encoding, Encoding)
        return encoding

    @property
    def causal(self) -> bool:
        """False for encoders."""
        return self.model.config.causal

    def position_bias(self, layer: int, length: int) -> Bias | None:
        """What a context-free encoding adds; nothing else in a layer may change it."""
        encoding = self.encoding_of(self.layers[layer])
        spec = self.model.config.schedule[layer]
        changed = spec.window is not None or any(encoding.overrides(hook) for hook in ("rescore", "logit_scale"))
        if not encoding.context_free or changed:
            return None
        x = torch.zeros(1, length, self.model.config.n_embd, dtype=self.model.dtype, device=self.model.device)
        return encoding.bias(x, layout(x, causal=self.causal))

    @contextmanager
    def capture(self, on_record: OnRecord, selected: Selected) -> Iterator[None]:
        """Put the capturing attention function in the place of the model's own, and that back at the end."""
        config = self.model.config
        calls = _Calls(self, config._attn_implementation, on_record, selected)
        token = _calls.set(calls)
        with ExitStack() as stack:
            stack.callback(_calls.reset, token)
            for layer in self.layers:
                stack.callback(layer.register_forward_pre_hook(calls.keep_tokens).remove)
            stack.callback(setattr, config, "_attn_implementation_internal", calls.implementation)
            config._attn_implementation_internal = CAPTURE
            yield


@dataclass
class _Calls:
    """What the capturing function reports to, for one model."""

    family: LengthwiseFamily
    implementation: str
    on_record: OnRecord
    selected: Selected
    tokens: dict[int, Tensor] = field(default_factory=dict)

    def keep_tokens(self, layer: LengthwiseAttention, args: tuple[Any, ...]) -> None:
        """Remember what a layer gets: the attention function sees queries and keys after rotation only."""
        self.tokens.clear()
        self.tokens[layer.layer_idx] = args[0]

    def report(
        self,
        layer: LengthwiseAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        own_layout: TokenLayout,
        options: Any,
    ) -> None:
        """Record one call, if its layer is selected."""
        if not self.selected(layer.layer_idx, ""):
            return
        encoding = self.family.encoding_of(layer)
        call = checked_call(q, k, v, layout=own_layout, **options)
        rotary = None
        if encoding.overrides("rotate") and not encoding.turns_by_state:
            rotary = _rotary(layer, encoding, self.tokens[layer.layer_idx], own_layout)
        record = record_of(
            call,
            layer.layer_idx,
            out,
            causal=own_layout.causal,
            context_free=encoding.context_free,
            rotary=rotary,
        )
        self.on_record(record)


_calls: ContextVar[_Calls | None] = ContextVar("calls of the capturing function", default=None)


def _capture(
    module: LengthwiseAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: TokenLayout,
    **kwargs: Any,
) -> Output:
    """The attention that the model runs under, and a report of it."""
    calls = _calls.get()
    assert calls is not None, "the function is in place while a capture is open"
    own = calls.implementation
    attention = ALL_ATTENTION_FUNCTIONS.get_interface(own, eager_attention)
    out, weights = run_attention(attention, own, module, query, key, value, layout=layout, **kwargs)
    calls.report(module, query, key, value, out, layout, attend_options(kwargs))
    return out, weights


def _rotary(layer: LengthwiseAttention, encoding: Encoding, x: Tensor, own_layout: TokenLayout) -> Rotary:
    def unrotated() -> tuple[Tensor, Tensor]:
        q, k, _ = layer.project(x)
        return q, k.repeat_interleave(layer.key_copies, 1)

    counted = layout(x, causal=own_layout.causal)
    return Rotary(unrotated, lambda q, k: layer.turn(encoding, q, k, counted), own_layout.query_mask)


AttentionInterface.register(CAPTURE, _capture)
