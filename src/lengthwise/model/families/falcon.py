"""Falcon: ALiBi with slopes rounded to bfloat16 and divided by sqrt(head_dim), or RoPE."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from lengthwise.model.families.base import (
    AttentionRecord,
    HookedFamily,
    OnRecord,
    Selected,
    key_level_bias,
    sliced,
    split_heads,
    visible,
)
from lengthwise.model.families.described import Described, by_level, shared
from lengthwise.model.families.interface import rotary_of


class FalconFamily(HookedFamily):
    """Falcon of all three architectures."""

    attention = FalconAttention
    projection = "dense"

    @property
    def encoding(self) -> str:
        """As its config says."""
        return "alibi" if self.model.config.alibi else "rope"

    @property
    def undescribed(self) -> str | None:
        """With RoPE there is no bias."""
        return None if self.model.config.alibi else "it has RoPE, which adds none"

    @contextmanager
    def capture(self, on_record: OnRecord, selected: Selected) -> Iterator[None]:
        """Hook the selected layers."""
        if self.model.config.alibi:
            self.check_attention("sdpa", reason="Falcon's other implementations add the bias twice")
        with super().capture(on_record, selected):
            yield

    def read(self, module: Any, layer: int, arguments: Mapping[str, Any], merged: Tensor) -> AttentionRecord:
        """With ALiBi the numbers are those that the layer adds, rounded as it rounds them."""
        heads = module._split_heads(module.query_key_value(arguments["hidden_states"]))
        q, k, v = (x.transpose(1, 2) for x in heads)
        alibi, angles, bias = arguments["alibi"], arguments["position_embeddings"], None
        if alibi is None:
            q, k = apply_rotary_pos_emb(q, k, *angles)
        else:
            bias = key_level_bias((alibi / math.sqrt(module.head_dim))[:, :, 0], q.shape[2])
        return AttentionRecord(
            layer=layer,
            q=q,
            k=k,
            v=v,
            out=split_heads(merged, module.num_heads),
            scale=module.inv_norm_factor,
            mask=sliced(visible(arguments["attention_mask"])[:, :1]),
            causal=True,
            bias=bias,
            context_free=True,
            rotary=rotary_of(module, q, k, angles) if bias is None else None,
        )


class DescribedFalconAttention(Described, FalconAttention):
    """Falcon's attention whose ALiBi is described, as it runs by default: slope times position rounded to bfloat16."""

    takes_runs = True

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As it was under "sdpa", but for the filled-in mask."""
        q, k, v = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        if alibi is None:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        out, weights = self.attend(
            *(q, k, v, attention_mask),
            bias=lambda placed: shared(placed, FalconAttention, lambda: by_level(self._levels(alibi), placed)),
            scale=self.inv_norm_factor,
            dropout=self.attention_dropout.p,
            weights=output_attentions,
            cache=layer_past,
            **kwargs,
        )
        return self.dense(out.flatten(2)), weights

    def _levels(self, alibi: Tensor | None) -> Tensor:
        assert alibi is not None, "a Falcon with RoPE has no bias"
        return alibi.view(-1, self.num_heads, alibi.shape[-1]) / math.sqrt(self.head_dim)


FalconFamily.described = {FalconAttention: DescribedFalconAttention}
