"""MPT: ALiBi as -slope (longest - 1 - key position), in an order of slopes of its own; it ends at max_seq_len."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers.models.mpt.modeling_mpt import MptAttention, MptBlock

from lengthwise.bias import LevelBias
from lengthwise.model.families.base import AttentionRecord, HookedFamily, key_level_bias, sliced, split_heads
from lengthwise.model.families.described import Described, shared
from lengthwise.model.families.layer_call import Placed


class MptFamily(HookedFamily):
    """MPT and its heads."""

    encoding = "alibi"
    attention = MptAttention
    projection = "out_proj"

    @property
    def max_length(self) -> int | None:
        """The bias is made for so many keys; where it is described there is no end."""
        return None if isinstance(self.layers[0], Described) else int(self.model.config.max_seq_len)

    def read(self, module: Any, layer: int, arguments: Mapping[str, Any], merged: Tensor) -> AttentionRecord:
        """Queries, keys and values may be clipped."""
        q, k, v = _qkv(module, arguments["hidden_states"])
        return AttentionRecord(
            layer=layer,
            q=q,
            k=k,
            v=v,
            out=split_heads(merged, module.n_heads),
            scale=float(module.softmax_scale),
            # Its mask is True where a key is hidden.
            mask=sliced(~arguments["attention_mask"]),
            causal=True,
            bias=key_level_bias(arguments["position_bias"][None, :, 0, -q.shape[2] :], q.shape[2]),
            context_free=True,
        )


class DescribedMptAttention(Described, MptAttention):
    """MPT's attention whose bias is described: it goes on beyond max_seq_len."""

    takes_runs = True

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As it was, but for the matrices of scores."""
        q, k, v = _qkv(self, hidden_states)
        scale: Any = self.softmax_scale
        out, weights = self.attend(
            *(q, k, v, attention_mask),
            bias=lambda placed: shared(placed, MptAttention, lambda: _level_bias(position_bias, placed)),
            scale=scale,
            dropout=self.attn_dropout_p,
            cache=past_key_values,
            **kwargs,
        )
        return self.out_proj(out.flatten(2)), weights


class DescribedMptBlock(Described, MptBlock):
    """MPT's block, which does not tell its attention whether the weights are wanted."""

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        attention_mask: Any,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As it was."""
        if output_attentions and isinstance(attention_mask, Placed):
            attention_mask = replace(attention_mask, weights=True)
        return super().forward(hidden_states, position_bias, attention_mask, layer_past, use_cache, **kwargs)


def _level_bias(alibi: Tensor, placed: Placed) -> LevelBias:
    """Slope times distance in slots: MPT counts padding. Its tensor has 0 for the last key and -slope before it."""
    query, key = (slots[:, None].double() for slots in (placed.layout.query, placed.layout.key))
    return LevelBias(query, key, -alibi[None, :, 0, -2:-1])


def _qkv(module: Any, x: Tensor) -> Any:
    mixed = module.Wqkv(x)
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    return mixed.unflatten(-1, (3, module.n_heads, -1)).permute(2, 0, 3, 1, 4)


MptFamily.described = {MptAttention: DescribedMptAttention, MptBlock: DescribedMptBlock}
