"""BLOOM: slope times key position is added to the scores; positions follow the padding mask."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import BloomPreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention

from lengthwise.inspect.families.hooked import watch_modules
from lengthwise.inspect.families.interface import allowed
from lengthwise.inspect.families.route import Route, See, Wanted, rising
from lengthwise.inspect.record import Record


def route(model: nn.Module) -> Route | None:
    """The way into a BLOOM; None for any other."""
    return Route("alibi", {"": model.config.n_layer}, watch) if isinstance(model, BloomPreTrainedModel) else None


@contextmanager
def watch(model: nn.Module, see: See, wanted: Wanted) -> Iterator[None]:
    """Stand beside the wanted layers."""
    found = [module for module in model.modules() if isinstance(module, BloomAttention)]
    with watch_modules({n: m for n, m in enumerate(found) if wanted(n, "")}, "dense", _read, see):
        yield


def _read(module: nn.Module, layer: int, given: Mapping[str, Any], merged: Tensor) -> Record:
    assert isinstance(module, BloomAttention)
    q, k, v = module._reshape(module.query_key_value(given["hidden_states"]))
    batch, heads, queries, _ = q.shape
    may = allowed(given["attention_mask"])
    return Record(
        layer=layer,
        q=q,
        k=k,
        v=v,
        out=merged.unflatten(-1, (heads, -1)).transpose(1, 2),
        scale=module.inv_norm_factor,
        mask=lambda rows, columns: may[:, :, rows, columns],
        causal=True,
        bias=rising(given["alibi"].view(batch, heads, -1), queries),
        context_free=True,
    )
