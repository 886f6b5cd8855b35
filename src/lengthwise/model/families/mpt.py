"""MPT: ALiBi as -slope (longest - 1 - key position), in an order of slopes of its own; it ends at max_seq_len."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.models.mpt.modeling_mpt import MptAttention

from lengthwise.model.families.base import AttentionRecord, HookedFamily, key_level_bias, sliced, split_heads


class MptFamily(HookedFamily):
    """MPT and its heads."""

    encoding = "alibi"
    attention = MptAttention
    projection = "out_proj"

    @property
    def max_length(self) -> int:
        """The bias is made for so many keys."""
        return int(self.model.config.max_seq_len)

    def read(self, module: Any, layer: int, arguments: Mapping[str, Any], merged: Tensor) -> AttentionRecord:
        """Queries, keys and values may be clipped."""
        mixed = module.Wqkv(arguments["hidden_states"])
        if module.clip_qkv:
            mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
        q, k, v = mixed.unflatten(-1, (3, module.n_heads, -1)).permute(2, 0, 3, 1, 4)
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
