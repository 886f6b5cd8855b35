"""MPT: -slope (longest - 1 - key position) is added to the scores, by an order of slopes of its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from transformers import MptPreTrainedModel
from transformers.models.mpt.modeling_mpt import MptAttention

from lengthwise.inspect.families.hooked import watch_modules
from lengthwise.inspect.families.route import Route, See, Wanted, rising
from lengthwise.inspect.record import Record


def route(model: nn.Module) -> Route | None:
    """The way into an MPT; None for any other."""
    if not isinstance(model, MptPreTrainedModel):
        return None
    return Route("alibi", {"": model.config.n_layers}, watch, model.config.max_seq_len)


@contextmanager
def watch(model: nn.Module, see: See, wanted: Wanted) -> Iterator[None]:
    """Stand beside the wanted layers."""
    found = [module for module in model.modules() if isinstance(module, MptAttention)]
    with watch_modules({n: m for n, m in enumerate(found) if wanted(n, "")}, "out_proj", _read, see):
        yield


def _read(module: nn.Module, layer: int, given: Mapping[str, Any], merged: Tensor) -> Record:
    assert isinstance(module, MptAttention)
    mixed = module.Wqkv(given["hidden_states"])
    if module.clip_qkv:
        mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
    q, k, v = mixed.unflatten(-1, (3, module.n_heads, -1)).permute(2, 0, 3, 1, 4)
    # Its mask is True where a query may not look.
    may = ~given["attention_mask"]
    return Record(
        layer=layer,
        q=q,
        k=k,
        v=v,
        out=merged.unflatten(-1, (module.n_heads, -1)).transpose(1, 2),
        scale=cast(float, module.softmax_scale),
        mask=lambda rows, columns: may[:, :, rows, columns],
        causal=True,
        bias=rising(given["position_bias"][None, :, 0, -q.shape[2] :], q.shape[2]),
        context_free=True,
    )
