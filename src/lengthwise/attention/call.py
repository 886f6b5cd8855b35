"""One call of attention, checked once at the door: what every backend is given and may rely on.

Whether keys that provably cannot matter are left out is part of it, and this proves it. For a row i and a block of keys
B behind it, with m the row's logit scale, 1 if it has none:

    weight of a key in B <= exp(upper - lower),   upper = m (|q_i| max|k_B| scale + largest bias in B)

`lower` is a score that the row really has, which bounds its log-sum-exp from below. Where the sum of count_B
exp(upper - lower) is below half a unit in the last place, and so is the same sum weighted by what the values and the
gradients of the block could add, leaving the block out changes nothing that the precision can show. A sink only lowers
what is left. NaN and infinity mean keep; no bound looks at a key that the row does not see; rows whose logit scale is
not positive are never skipped, and neither is anything where a band leaves out a row's own key.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.bias import Bias, DistanceBias, LevelBias, QueryDistanceBias
from lengthwise.errors import check_flag, check_int, describe
from lengthwise.rescore import ContextualPositions, HeadNetwork, Rescore
from lengthwise.token_layout import Band, TokenLayout, Window, check_per_key
from lengthwise.visibility import Visibility

FEW_QUERIES = 4
"""Up to so many queries without gradients are decoding: keys and values are best read once, where they lie."""
_skipping: ContextVar[bool] = ContextVar("lengthwise_skipping", default=True)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of `lw.attend`.

    content = softcap tanh(scale q.k / softcap)
    scores  = logit_scale (content + bias, or what the rescore makes of both)
    """

    q: Float[Tensor, "batch head query dim"]
    k: Float[Tensor, "batch kv_head key dim"]
    v: Float[Tensor, "batch kv_head key value"]
    visibility: Visibility
    bias: Bias | None
    rescore: Rescore | None
    scale: float
    softcap: float | None
    logit_scale: Float[Tensor, "#batch #head query"] | None
    sink: Float[Tensor, "#batch head #query"] | None
    return_lse: bool
    skip: bool
    """Whether keys that provably cannot matter may be left out."""

    @property
    def layout(self) -> TokenLayout:
        """Where the tokens stand."""
        return self.visibility.layout

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        """The number of heads of the queries."""
        return self.q.shape[1]

    @property
    def group(self) -> int:
        """How many heads of the queries share one of the keys."""
        return self.heads // self.k.shape[1]

    @property
    def queries(self) -> int:
        """The number of queries."""
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        """The number of keys."""
        return self.k.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of queries, keys, values and output; inside, everything is float32 or better."""
        return self.q.dtype

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name but the layout's: "q", "sink", "bias.table"."""
        own = {name: getattr(self, name) for name in ("q", "k", "v", "logit_scale", "sink")}
        for what, part in (("bias", self.bias), ("rescore", self.rescore)):
            if part is not None:
                own |= {f"{what}.{name}": tensor for name, tensor in part.tensors().items()}
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "AttentionCall":
        """The same call with other tensors under some of these names."""
        own: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if "." not in name}
        for what, part in (("bias", self.bias), ("rescore", self.rescore)):
            of_part = {name: x for name, x in tensors.items() if name.startswith(f"{what}.")}
            if part is not None and of_part:
                own[what] = part.rebuilt({name.partition(".")[2]: x for name, x in of_part.items()})
        return replace(self, **own)

    @property
    def sources(self) -> tuple[Tensor, ...]:
        """Every tensor that a gradient may flow to."""
        described = (self.bias, self.rescore)
        tensors = [self.q, self.k, self.v, *(x for x in (self.logit_scale, self.sink) if x is not None)]
        return (*tensors, *(source for part in described if part is not None for source in part.sources))

    @property
    def needs_grad(self) -> bool:
        """Whether a backward pass may follow."""
        return torch.is_grad_enabled() and any(source.requires_grad for source in self.sources)

    @property
    def is_decoding(self) -> bool:
        """Whether there are so few queries, and no gradients, that reading the keys is nearly all of the work."""
        if torch.compiler.is_compiling():  # a graph of any length must not depend on it
            return False
        return self.queries <= FEW_QUERIES and not self.needs_grad

    @property
    def is_bare(self) -> bool:
        """Whether nothing but q.k makes the scores and the softmax."""
        return all(x is None for x in (self.bias, self.rescore, self.softcap, self.logit_scale, self.sink))

    def slot_offsets(self, bias: DistanceBias | QueryDistanceBias) -> tuple[int, ...] | None:
        """`Facts.offsets` of the positions that a bias holds, which may be other than the layout's."""
        layout = self.layout
        if layout.facts is not None and bias.query is layout.query and bias.key is layout.key:
            return layout.facts.offsets
        own = replace(layout, query=bias.query, key=bias.key, facts=None).with_facts()
        return None if own.facts is None else own.facts.offsets

    @property
    def sees_own_keys(self) -> bool:
        """Whether every query is known to see the key in its own slot, unless that is padding, and no later one."""
        start, bands = self.layout.start, self.visibility.bands
        if isinstance(start, Tensor) or not self.visibility.is_causal:
            return False
        own = not bands or any(
            band.nearest <= 0 and band.first is None and (band.farthest is None or band.farthest > 0) for band in bands
        )
        return own and self.queries > 0 and 0 <= start <= self.keys - self.queries

    def with_known_start(self) -> "AttentionCall":
        """The call with the slot of its first query as a number, which is read where it is a tensor."""
        layout = self.layout
        if not isinstance(layout.query_start, Tensor):
            return self
        known = replace(layout, query_start=int(layout.query_start)).with_facts()
        return replace(self, visibility=replace(self.visibility, layout=known))

    def describe(self) -> str:
        """The call in words, for errors."""
        lines = [_tensor("q", self.q, "query"), _tensor("k", self.k, "key"), _tensor("v", self.v, "key")]
        if self.bias is not None:
            lines.append(f"    bias     {type(self.bias).__name__}{', needs a gradient' * self.bias.needs_grad}")
        if self.rescore is not None:
            lines.append(f"    rescore  {type(self.rescore).__name__}")
        layout, visibility = self.layout, self.visibility
        masks = ["causal"] * visibility.is_causal
        masks += [name for name in ("key_mask", "mask") if getattr(layout, name) is not None]
        masks += ["documents"] * (layout.key_documents is not None)
        masks += [f"window={visibility.window}"] * (visibility.window is not None) + [str(b) for b in visibility.bands]
        lines.append("    masks    " + (", ".join(masks) or "none"))
        extras = [] if self.softcap is None else [f"softcap={self.softcap:g}"]
        extras += [name for name in ("logit_scale", "sink") if getattr(self, name) is not None]
        extras += ["return_lse"] * self.return_lse
        return "\n".join(lines + [f"    with     {', '.join(extras)}"] * bool(extras))


class CallOptions(TypedDict, total=False):
    """The arguments of `attend` beside q, k, v; see there."""

    layout: TokenLayout | None
    causal: bool
    key_mask: Tensor | None
    bias: Bias | None
    rescore: Rescore | None
    window: Window | None
    scale: float | None
    softcap: float | None
    logit_scale: Tensor | None
    sink: Tensor | None


def checked_call(
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    v: Float[Tensor, "batch kv_head key value"],
    *,
    layout: TokenLayout | None = None,
    causal: bool = True,
    key_mask: Bool[Tensor, "#batch key"] | None = None,
    bias: Bias | None = None,
    rescore: Rescore | None = None,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    logit_scale: Float[Tensor, "#batch #head query"] | None = None,
    sink: Float[Tensor, " head"] | Float[Tensor, "#batch head #query"] | None = None,
    return_lse: bool = False,
) -> AttentionCall:
    """The call from the arguments of `attend`, or an error that says what was expected and what was got."""
    _check_tensors(q, k, v)
    batch, heads, queries, dim = q.shape
    keys = k.shape[2]
    check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    if layout is None:
        layout = _bare_layout(q.device, queries, keys, causal, key_mask, windowed=window is not None)
    elif key_mask is not None or not causal:
        raise ValueError("a layout has its own key_mask and causal, got them beside it; give them to lw.layout")
    _check_layout(layout, batch, queries, keys)
    if bias is not None:
        _check_bias(bias, (batch, heads, queries, keys), layout)
    if rescore is not None and not isinstance(rescore, Rescore):
        raise TypeError(
            f"rescore must be a described Rescore, got {describe(rescore)}; use encoding.rescore(x, layout)"
        )
    if isinstance(rescore, HeadNetwork) and rescore.weight_out.shape[0] != heads:
        raise ValueError(f"the network of rescore must have the {heads} heads of q, got {rescore.weight_out.shape[0]}")
    if isinstance(rescore, ContextualPositions) and rescore.table.shape[0] != dim:
        raise ValueError(f"the table of rescore must have the {dim} channels of q, got {rescore.table.shape[0]}")
    for name, value in (("scale", scale), ("softcap", softcap)):
        real = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and (not real or (name == "softcap" and value <= 0)):
            kind = "a finite number" if name == "scale" else "a finite number above 0"
            raise TypeError(f"{name} must be {kind}, got {describe(value)}")
    slots, bands = _checked_window(window)
    return AttentionCall(
        q=q,
        k=k,
        v=v,
        visibility=Visibility(layout, slots, bands),
        bias=bias,
        rescore=rescore,
        scale=dim**-0.5 if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        logit_scale=None if logit_scale is None else _checked_logit_scale(logit_scale, (batch, heads, queries)),
        sink=None if sink is None else _checked_sink(sink, (batch, heads, queries)),
        return_lse=return_lse,
        skip=is_skipping(),
    )


def _bare_layout(
    device: torch.device, queries: int, keys: int, causal: bool, key_mask: Tensor | None, *, windowed: bool
) -> TokenLayout:
    """The queries are the last keys; positions are for a bias, which has its own."""
    start = keys - queries
    if start < 0 and (causal or windowed):
        raise ValueError(
            f"the queries are the last keys, so there can be at most {keys} of them, got {queries}; for attention "
            "across two sequences use causal=False and no window"
        )
    check_per_key("key_mask", key_mask, "bool", keys)
    key = torch.arange(keys, device=device)[None]
    query = key[:, start:] if start >= 0 else torch.arange(queries, device=device)[None]
    own = None if key_mask is None or start < 0 else key_mask[:, start:]
    return TokenLayout(query, key, query_start=start, query_mask=own, key_mask=key_mask, causal=causal)


def _checked_window(window: Window | None) -> tuple[int | None, tuple[Band, ...]]:
    if window is None:
        return None, ()
    if isinstance(window, Band):
        return None, (window,)
    if isinstance(window, tuple):
        if not window or not all(isinstance(band, Band) for band in window):
            raise TypeError("window must be an int, a Band or a tuple of Bands, got a tuple of something else")
        return None, window
    check_int("window", window)
    return window, ()


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {describe(tensor)}")
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be (batch, head, position, dim), got shape {tuple(tensor.shape)}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating-point, got {tensor.dtype}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise TypeError(
                f"q, k and v must share dtype and device, got q {q.dtype} on {q.device} and {name} {tensor.dtype} on "
                f"{tensor.device}"
            )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "q and k must agree in batch and dim, k and v in batch, head and position; got shapes "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if 0 in (q.shape[1], q.shape[3], k.shape[1]) or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the heads of q must be a multiple of those of k, and neither they nor dim 0, got {q.shape[1]} heads of "
            f"{q.shape[3]} in q and {k.shape[1]} in k"
        )


def _check_layout(layout: TokenLayout, batch: int, queries: int, keys: int) -> None:
    if not isinstance(layout, TokenLayout):
        raise TypeError(f"layout must be a TokenLayout, got {describe(layout)}; make one with lw.layout")
    if layout.ring is not None:
        raise ValueError("a sequence that processes share can be attended to, and not explained; got a part of one")
    if layout.query_count != queries or layout.key_count != keys:
        raise ValueError(
            f"the layout must be that of {queries} queries and {keys} keys, got one of {layout.query_count} and "
            f"{layout.key_count}"
        )
    if layout.batch not in (1, batch):
        raise ValueError(f"the layout must be of {batch} sequences, or of 1 for all, got {layout.batch}")


def _check_bias(bias: Bias, wanted: tuple[int, int, int, int], layout: TokenLayout) -> None:
    if isinstance(bias, Tensor):
        raise TypeError("bias must be a described Bias, got a Tensor; wrap it: DenseBias(tensor)")
    if not isinstance(bias, Bias):
        raise TypeError(f"bias must be a Bias, got {describe(bias)}; use encoding.bias(x, layout)")
    shape = bias.shape
    if shape[0] not in (1, wanted[0]) or shape[1] not in (1, wanted[1]) or shape[2:] != wanted[2:]:
        raise ValueError(f"the bias must fit (batch, head, query, key) = {wanted}, got {shape}; make it of this layout")
    if torch.compiler.is_compiling() or layout.query.device.type != "cpu":
        return
    # The facts of a layout that was made by hand are not known: then a bias may hold other positions.
    positions = bias.positions() if layout.facts is not None else None
    if positions is not None and not all(map(_same_positions, positions, (layout.query, layout.key))):
        raise ValueError("the bias must be of this layout, got one that was made for another: its positions differ")
    if isinstance(bias, LevelBias) and bias.rising and wanted[2] > FEW_QUERIES and bias.falls:
        raise ValueError("a LevelBias that declares rising must not fall, got levels that do")


def _same_positions(held: Tensor, own: Tensor) -> bool:
    return held is own or (held.shape[1:] == own.shape[1:] and bool((held == own).all()))


def _checked_logit_scale(logit_scale: object, wanted: tuple[int, int, int]) -> Tensor:
    batch, heads, queries = wanted
    if not isinstance(logit_scale, Tensor) or not logit_scale.is_floating_point():
        raise TypeError(f"logit_scale must be a floating-point tensor, got {describe(logit_scale)}")
    shape = tuple(logit_scale.shape)
    if len(shape) != 3 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2] not in (1, queries):
        raise ValueError(f"logit_scale must be (batch or 1, head or 1, query or 1) of {wanted}, got shape {shape}")
    return logit_scale if shape[2] == queries else logit_scale.expand(-1, -1, queries)


def _checked_sink(sink: object, wanted: tuple[int, int, int]) -> Tensor:
    batch, heads, queries = wanted
    if not isinstance(sink, Tensor) or not sink.is_floating_point():
        raise TypeError(f"sink must be a floating-point tensor, got {describe(sink)}")
    shape = sink.shape
    if len(shape) == 1 and shape[0] == heads:
        return sink.view(1, heads, 1)
    if len(shape) != 3 or shape[0] not in (1, batch) or shape[1] != heads or shape[2] not in (1, queries):
        raise ValueError(
            f"sink must be ({heads},), one logit per head, or (batch or 1, {heads}, query or 1), got {tuple(shape)}"
        )
    return sink


def _tensor(name: str, x: Tensor, axis: str) -> str:
    batch, heads, length, dim = x.shape
    kind = f"{str(x.dtype).removeprefix('torch.')} {x.device.type}"
    return f"    {name:8} {kind}  batch={batch} head={heads} {axis}={length} dim={dim}"


def is_skipping() -> bool:
    """Whether skipping is on here; always so for a graph that is being compiled, which asks again where it runs."""
    return torch.compiler.is_compiling() or _skipping.get()


@contextmanager
def skipping(on: bool) -> Iterator[None]:
    """Inside, keys that provably cannot matter are left out, as by default, or never are."""
    token = _skipping.set(on)
    try:
        yield
    finally:
        _skipping.reset(token)
