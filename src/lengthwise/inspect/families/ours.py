"""Lengthwise models: the encoding's own bias, described, and queries and keys as they meet."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lengthwise.attention import checked_call
from lengthwise.bias import Bias
from lengthwise.encodings import Encoding
from lengthwise.inspect.families.route import Route, See, Wanted
from lengthwise.inspect.record import Record
from lengthwise.inspect.rotary import kernel
from lengthwise.model.modeling import LengthwiseAttention, LengthwisePreTrainedModel
from lengthwise.rescore import Rescore
from lengthwise.token_layout import TokenLayout, layout


def route(model: nn.Module) -> Route | None:
    """The way into a Lengthwise model; None for any other."""
    if not isinstance(model, LengthwisePreTrainedModel):
        return None
    encodings = [part for part in model.modules() if isinstance(part, Encoding)]
    return Route(model.config.encoding, {"": model.config.n_layer}, watch, encodings[0].limit)


@contextmanager
def watch(model: nn.Module, see: See, wanted: Wanted) -> Iterator[None]:
    """Stand beside the wanted layers' attention; nothing is put into its path."""
    layers = [m for m in model.modules() if isinstance(m, LengthwiseAttention) and wanted(m.layer_idx, "")]
    tokens: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for layer in layers:
            hook = layer.register_forward_pre_hook(partial(_keep_tokens, tokens))
            stack.callback(hook.remove)
            layer._attend = partial(_watched, layer, see, tokens)  # type: ignore[method-assign]
            stack.callback(delattr, layer, "_attend")
        yield


def _keep_tokens(tokens: dict[int, Tensor], layer: LengthwiseAttention, inputs: tuple[Any, ...]) -> None:
    tokens.clear()
    tokens[layer.layer_idx] = inputs[0]


def _watched(
    layer: LengthwiseAttention,
    see: See,
    tokens: dict[int, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    encoding: Encoding,
    layout: TokenLayout,
    *,
    rescore: Rescore | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    out, weights = LengthwiseAttention._attend(layer, q, k, v, bias, encoding, layout, rescore=rescore, **kwargs)
    call = checked_call(q, k, v, layout=layout, bias=bias, rescore=rescore)
    turns = encoding.overrides("rotate") and not encoding.overrides("state")
    record = Record(
        layer=layer.layer_idx,
        q=q,
        k=k,
        v=v,
        out=out.transpose(1, 2),
        scale=call.scale,
        mask=call.visibility.mask,
        causal=True,
        bias=bias,
        context_free=encoding.context_free,
        rescore=rescore,
        rotated=partial(_kernel, layer, encoding, tokens[layer.layer_idx], layout, call.scale) if turns else None,
    )
    see(record, "")
    return out, weights


def _kernel(layer: LengthwiseAttention, encoding: Encoding, x: Tensor, own: TokenLayout, scale: float) -> Tensor:
    q, k, _ = layer.c_attn(x).unflatten(-1, (3, layer.config.n_head, -1)).permute(2, 0, 3, 1, 4)
    counted = layout(x)
    return kernel(q, k, lambda q, k: encoding.rotate(q, k, counted), scale=scale, real=own.query_mask)
