"""XLNet: the relative encoding of Transformer-XL (Dai et al. 2019, section 3.3).

    scores = scale ((q + r_w_bias) . k  +  (q + r_r_bias) . r[distance])      r are sinusoids through a projection

The second term is its positional bias, which follows the query. What segments add (token_type_ids) is refused, and so
is the second stream of pretraining: neither is position.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

from lengthwise.bias import QueryDistanceBias, at_least_float32
from lengthwise.model.families.base import AttentionRecord, HookedFamily, OnRecord, Selected, sliced


class XLNetFamily(HookedFamily):
    """XLNet and its heads, of one stream; two-sided, or causal with attn_type="uni"."""

    encoding = "transformer-xl"
    attention = XLNetRelativeAttention

    @contextmanager
    def capture(self, on_record: OnRecord, selected: Selected) -> Iterator[None]:
        """Hook the selected layers.

        The last projection is a parameter, so what goes into it is not to be seen; but the layer calls its dropout
        twice, on the weights and on what the projection gives.
        """
        with ExitStack() as stack:
            for layer, module in enumerate(self.layers):
                if selected(layer, ""):
                    calls = _LayerCalls(self, layer, on_record)
                    stack.callback(module.dropout.register_forward_hook(calls.keep_dropped).remove)  # type: ignore[union-attr]
                    stack.callback(module.register_forward_hook(calls.report, with_kwargs=True).remove)
            yield


class _LayerCalls:
    """What the hooks of one layer see."""

    def __init__(self, family: XLNetFamily, layer: int, on_record: OnRecord) -> None:
        self.family, self.layer, self.on_record = family, layer, on_record
        self.dropped: list[Tensor] = []

    def keep_dropped(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.dropped.append(output)

    def report(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = signature(module.forward).bind(*args, **kwargs)
        given.apply_defaults()
        arguments, (weights, projected, *_) = given.arguments, self.dropped
        self.dropped = []
        self._refuse_others(arguments)
        h, mems, r = arguments["h"], arguments["mems"], arguments["r"]
        tokens = h if mems is None or mems.ndim < 2 else torch.cat([mems, h])
        q, k, v = (
            torch.einsum("ibh,hnd->bnid", x, w) for x, w in ((h, module.q), (tokens, module.k), (tokens, module.v))
        )
        out = weights @ v
        self._check_projection(module, out, projected)
        self.on_record(self._record(module, arguments, q, k, v, out, r))

    def _record(
        self, module: Any, arguments: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, out: Tensor, r: Tensor
    ) -> AttentionRecord:
        queries, keys, causal = q.shape[2], k.shape[2], self.family.model.config.attn_type == "uni"
        # The vectors of distances keys, keys - 1, ...; the same for every sequence.
        profiles = torch.einsum("ih,hnd->ndi", r[:, 0].to(module.r.dtype), module.r).flip(-1)
        key = torch.arange(keys, device=q.device)
        hidden = arguments["attn_mask_h"]
        shown = torch.ones(1, 1, queries, keys, device=q.device) if hidden is None else 1 - hidden.permute(2, 3, 0, 1)
        return AttentionRecord(
            layer=self.layer,
            q=q + module.r_w_bias[:, None],
            k=k,
            v=v,
            out=out,
            scale=module.scale,
            mask=sliced(shown > 0.5),
            causal=causal,
            bias=QueryDistanceBias(
                (q + module.r_r_bias[:, None]) * module.scale,
                profiles,
                key[None, keys - queries :],
                key[None],
                keys + 1 - r.shape[0],
            ),
        )

    def _check_projection(self, module: Any, out: Tensor, projected: Tensor) -> None:
        """An error unless the layer's own weights and values are what its last projection got."""
        expected = torch.einsum("bnid,hnd->ibh", out, module.o)
        difference = (expected - projected).abs().max()
        eps = max(torch.finfo(dtype).eps for dtype in (out.dtype, torch.float32))
        largest = at_least_float32(out).norm(dim=-1).max() * at_least_float32(module.o).norm(dim=-1).sum(-1).max()
        if not difference <= 16 * eps * (1 + largest):
            raise NotImplementedError(
                f"layer {self.layer} of XLNet must project weights times values, but differs by {difference:.1e}"
            )

    def _refuse_others(self, arguments: dict[str, Any]) -> None:
        if self.family.model.config.bi_data:
            raise NotImplementedError("XLNet with bi_data has other positions in each half of a batch")
        if arguments["g"] is not None:
            raise NotImplementedError("XLNet can be captured with one stream only, got target_mapping")
        if arguments["seg_mat"] is not None:
            raise NotImplementedError("XLNet can be captured without segments only, got token_type_ids")
