"""GPT-Neo: learned positions; every other layer sees a window only, and scores are not scaled."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from lengthwise.model.families.base import (
    AttentionRecord,
    HookedFamily,
    OnRecord,
    Selected,
    sliced,
    split_heads,
    table_length,
    visible_keys,
)


class GPTNeoFamily(HookedFamily):
    """GPT-Neo and its heads."""

    encoding = "learned"
    attention = GPTNeoSelfAttention
    projection = "out_proj"

    @property
    def max_length(self) -> int | None:
        """The end of its table."""
        return table_length(self.model)

    @contextmanager
    def capture(self, on_record: OnRecord, selected: Selected) -> Iterator[None]:
        """Hook the selected layers."""
        self.check_attention("eager", reason="flash attention hides the mask")
        with super().capture(on_record, selected):
            yield

    def read(self, module: Any, layer: int, arguments: Mapping[str, Any], merged: Tensor) -> AttentionRecord:
        """A window is a buffer of the layer, which it calls `bias`."""
        x = arguments["hidden_states"]
        q, k, v = (split_heads(p(x), module.num_heads) for p in (module.q_proj, module.k_proj, module.v_proj))
        queries, keys = q.shape[2], k.shape[2]
        shown = visible_keys(arguments["attention_mask"], q, k, causal=True)
        return AttentionRecord(
            layer=layer,
            q=q,
            k=k,
            v=v,
            out=split_heads(merged, module.num_heads),
            scale=1.0,
            mask=sliced(shown & module.bias[:, :, keys - queries : keys, :keys]),
            causal=True,
        )
