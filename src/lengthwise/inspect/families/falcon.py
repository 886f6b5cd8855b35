"""Falcon: ALiBi with slopes rounded to bfloat16 and divided by sqrt(head_dim), or RoPE."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import FalconPreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from lengthwise.inspect.families.hooked import watch_modules
from lengthwise.inspect.families.interface import allowed
from lengthwise.inspect.families.route import Route, See, Wanted, rising
from lengthwise.inspect.record import Record
from lengthwise.inspect.rotary import kernel_of_turned


def route(model: nn.Module) -> Route | None:
    """The way into a Falcon; None for any other."""
    if not isinstance(model, FalconPreTrainedModel):
        return None
    return Route("alibi" if model.config.alibi else "rope", {"": model.config.num_hidden_layers}, watch)


@contextmanager
def watch(model: nn.Module, see: See, wanted: Wanted) -> Iterator[None]:
    """Stand beside the wanted layers."""
    assert isinstance(model, FalconPreTrainedModel)
    own = model.config._attn_implementation
    if model.config.alibi and own != "sdpa":
        raise NotImplementedError(
            f"Falcon with ALiBi is right under the attention 'sdpa' only; this one runs {own!r}, which adds the bias "
            "twice. Load it with attn_implementation='sdpa'."
        )
    found = [module for module in model.modules() if isinstance(module, FalconAttention)]
    with watch_modules({n: m for n, m in enumerate(found) if wanted(n, "")}, "dense", _read, see):
        yield


def _read(module: nn.Module, layer: int, given: Mapping[str, Any], merged: Tensor) -> Record:
    assert isinstance(module, FalconAttention)
    q, k, v = (x.transpose(1, 2) for x in module._split_heads(module.query_key_value(given["hidden_states"])))
    alibi, bias, waves = given["alibi"], None, given["position_embeddings"]
    if alibi is None:
        q, k = apply_rotary_pos_emb(q, k, *waves)
    else:
        bias = rising((alibi / math.sqrt(module.head_dim))[:, :, 0], q.shape[2])
    may = allowed(given["attention_mask"])[:, :1]
    return Record(
        layer=layer,
        q=q,
        k=k,
        v=v,
        out=merged.unflatten(-1, (module.num_heads, -1)).transpose(1, 2),
        scale=module.inv_norm_factor,
        mask=lambda rows, columns: may[:, :, rows, columns],
        causal=True,
        bias=bias,
        context_free=True,
        rotated=partial(kernel_of_turned, module, q, k, waves, scale=module.inv_norm_factor) if bias is None else None,
    )
