"""GPT-J: RoPE over the first channels of a head, neighbours in pairs, from a table of angles that has an end."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.models.gptj.modeling_gptj import GPTJAttention, apply_rotary_pos_emb

from lengthwise.model.families.base import (
    AttentionRecord,
    HookedFamily,
    OnRecord,
    Rotary,
    Selected,
    sliced,
    split_heads,
    visible_keys,
)


class GPTJFamily(HookedFamily):
    """GPT-J and its heads."""

    encoding = "rope"
    attention = GPTJAttention
    projection = "out_proj"

    @property
    def max_length(self) -> int:
        """The end of its table of angles."""
        return int(self.model.config.n_positions)

    @contextmanager
    def capture(self, on_record: OnRecord, selected: Selected) -> Iterator[None]:
        """Hook the selected layers."""
        self.check_attention("eager", reason="flash attention hides the mask")
        with super().capture(on_record, selected):
            yield

    def read(self, module: Any, layer: int, arguments: Mapping[str, Any], merged: Tensor) -> AttentionRecord:
        """Queries and keys are rotated as the layer rotates them."""
        x, heads = arguments["hidden_states"], module.num_attention_heads
        q, k, v = (split_heads(project(x), heads) for project in (module.q_proj, module.k_proj, module.v_proj))
        rotated = [_rotated(module, part, arguments["position_ids"]) for part in (q, k)]
        counted = torch.arange(q.shape[2], device=q.device)[None]
        return AttentionRecord(
            layer=layer,
            q=rotated[0],
            k=rotated[1],
            v=v,
            out=split_heads(merged, heads),
            scale=1 / float(module.scale_attn),
            mask=sliced(visible_keys(arguments["attention_mask"], q, k, causal=True)),
            causal=True,
            rotary=Rotary(
                unrotated=lambda: (q, k),
                rotate=lambda q, k: (_rotated(module, q, counted), _rotated(module, k, counted)),
            ),
        )


def _rotated(module: Any, x: Tensor, positions: Tensor) -> Tensor:
    """(batch, head, position, dim) rotated by the module's own function and table."""
    angles = module.embed_positions.to(x.device)[positions].to(x.dtype)
    sin, cos = angles.chunk(2, -1)
    width = x.shape[-1] if module.rotary_dim is None else module.rotary_dim
    turned = apply_rotary_pos_emb(x[..., :width].transpose(1, 2), sin, cos).transpose(1, 2)
    return torch.cat([turned, x[..., width:]], -1)
