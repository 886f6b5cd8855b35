"""One call of attention, checked once at the door: what every backend is given and may rely on."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lengthwise.bias import Bias, FunctionBias
from lengthwise.checks import Kind, came, check_flag, check_whole, kind_of

Rescore = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""rescore(content, bias, q, mask) -> scores, for a block of whole rows of all heads; see `Encoding.rescore`."""


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of `lw.attend`. Query i stands in slot `start + i`, key j in slot j; a mask is True for "may"."""

    q: Float[Tensor, "batch head query dim"]
    k: Float[Tensor, "batch kv_head key dim"]
    v: Float[Tensor, "batch kv_head key value"]
    bias: Bias | None
    rescore: Rescore | None
    causal: bool
    key_mask: Bool[Tensor, "#batch key"] | None
    documents: Int[Tensor, "#batch key"] | None
    window: int | None
    scale: float
    start: int | Int[Tensor, ""]

    @property
    def batch(self) -> int:
        """How many sequences."""
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        """How many heads the queries have."""
        return self.q.shape[1]

    @property
    def group(self) -> int:
        """How many heads of the queries share one of the keys."""
        return self.heads // self.k.shape[1]

    @property
    def queries(self) -> int:
        """How many queries."""
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        """How many keys."""
        return self.k.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of queries, keys, values and output; inside, everything is float32 or better."""
        return self.q.dtype

    @property
    def needs_grad(self) -> bool:
        """Whether a backward pass may follow."""
        if not torch.is_grad_enabled():
            return False
        tensors = (self.q, self.k, self.v, *(self.bias.sources if self.bias else ()))
        return any(t.requires_grad for t in tensors) or self.rescore is not None

    @property
    def is_plain(self) -> bool:
        """Whether order in the tensor is all that forbids: no padding, documents or window, queries last."""
        masks = (self.key_mask, self.documents, self.window)
        return all(mask is None for mask in masks) and self.queries_last

    @property
    def queries_last(self) -> bool:
        """Whether the queries are known to be the last slots."""
        return isinstance(self.start, int) and self.start == self.keys - self.queries

    @property
    def forbids(self) -> bool:
        """Whether any query may be barred from any key."""
        return not self.is_plain or (self.causal and self.queries > 1)

    def query_slots(self, rows: slice = slice(None)) -> Int[Tensor, " row"]:
        """The slots of some queries."""
        return self.start + torch.arange(self.queries, device=self.q.device)[rows]

    def mask(self, rows: slice = slice(None), columns: slice = slice(None)) -> Bool[Tensor, "#batch 1 row column"]:
        """True where a query may meet a key: order, window, documents and padding together."""
        query = self.query_slots(rows)[:, None]
        key = torch.arange(self.keys, device=self.q.device)[columns]
        may = torch.ones(1, query.shape[0], key.shape[0], dtype=torch.bool, device=self.q.device)
        if self.causal:
            may = may & (key <= query)
        if self.window is not None:
            may = may & (query - key < self.window) & (key - query < self.window)
        if self.documents is not None:
            of_query = self.documents[:, self.query_slots(rows)]
            may = may & (of_query[:, :, None] == self.documents[:, None, columns])
        if self.key_mask is not None:
            may = may & self.key_mask[:, None, columns]
        return may[:, None]

    @property
    def is_seen_finite(self) -> bool:
        """Whether a look shows keys and values to be finite; False where nobody can look, as in a compiled graph.

        A sum shows whatever is not; one that overflows without it only takes the longer way.
        """
        if torch.compiler.is_compiling() or self.q.device.type != "cpu":
            return False
        with torch.no_grad():
            return bool((self.k.sum(dtype=torch.float32) + self.v.sum(dtype=torch.float32)).isfinite())

    def contained(self) -> tuple["Call", Float[Tensor, "batch head query 1"]]:
        """The call with finite keys and values, and a taint to add to its output.

        In a product a weight of 0 does not stop an infinity. So what is not finite is taken out of keys and values,
        and the rows that may see it become NaN by the taint, which is 0 in all others.
        """
        tainted = ~(self.k.isfinite().all(-1) & self.v.isfinite().all(-1))
        if self.is_plain and self.causal:
            seen = tainted.cumsum(-1)[..., self.keys - self.queries :] > 0
        else:
            seen = (self.mask() & tainted[:, :, None]).any(-1)
        taint = torch.zeros_like(seen, dtype=self.dtype).masked_fill(seen, torch.nan)
        clean = replace(self, k=_finite(self.k), v=_finite(self.v))
        return clean, taint.repeat_interleave(self.group, 1).unsqueeze(-1)

    def in_lines(self) -> "Call":
        """The call with a function that is made of straight lines as such."""
        if isinstance(self.bias, FunctionBias) and self.bias.lines is not None:
            return replace(self, bias=self.bias.lines)
        return self

    def describe(self) -> str:
        """The call in words, for errors."""
        lines = [_tensor("q", self.q, "query"), _tensor("k", self.k, "key"), _tensor("v", self.v, "key")]
        if self.bias is not None:
            lines.append(f"    bias     {type(self.bias).__name__}{', needs a gradient' * self.bias.needs_grad}")
        if self.rescore is not None:
            lines.append("    rescore  " + getattr(self.rescore, "__qualname__", type(self.rescore).__name__))
        said = ["causal"] * self.causal
        said += [name for name in ("key_mask", "documents") if getattr(self, name) is not None]
        said += [f"window={self.window}"] * (self.window is not None)
        lines.append("    masks    " + (", ".join(said) or "none"))
        return "\n".join(lines)


def checked_call(
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    v: Float[Tensor, "batch kv_head key value"],
    *,
    bias: Bias | None = None,
    rescore: Rescore | None = None,
    causal: bool = True,
    key_mask: Bool[Tensor, "#batch key"] | None = None,
    documents: Int[Tensor, "#batch key"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    start: int | Int[Tensor, ""] | None = None,
) -> Call:
    """The call from the arguments of `attend`, or an error that says what must hold, what came and what to do."""
    _check_tensors(q, k, v)
    batch, heads, queries, dim = q.shape
    keys = k.shape[2]
    check_flag("causal", causal, "False is for two-sided attention.")
    _check_mask("key_mask", key_mask, "bool", batch, keys)
    _check_mask("documents", documents, "integer", batch, keys)
    if window is not None:
        check_whole("window", window, "It counts keys; leave it out for none.")
    real = isinstance(scale, int | float) and not isinstance(scale, bool) and math.isfinite(scale)
    if scale is not None and not real:
        raise TypeError(f"scale must be a finite number; {came(scale)} came. Leave it out for 1 / sqrt(dim).")
    if bias is not None:
        _check_bias(bias, (batch, heads, queries, keys))
    if rescore is not None and (not callable(rescore) or isinstance(rescore, torch.nn.Module)):
        raise TypeError(f"rescore must be a function; {came(rescore)} came. Pass `encoding.rescore`.")
    if start is not None:
        _check_start(start, queries, keys)
    elif queries > keys and (causal or window is not None or documents is not None):
        raise ValueError(
            f"queries are the last slots among the keys, so there are at most as many; {queries} queries and {keys} "
            "keys came. For attention across two sequences set causal=False and leave out window and documents."
        )
    return Call(
        q=q,
        k=k,
        v=v,
        bias=bias,
        rescore=rescore,
        causal=causal,
        key_mask=key_mask,
        documents=documents,
        window=window,
        scale=dim**-0.5 if scale is None else float(scale),
        start=keys - queries if start is None else start,
    )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor; {came(tensor)} came. Use torch.tensor.")
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} must be (batch, head, position, dim); its shape is {tuple(tensor.shape)}. Add or drop an axis."
            )
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating-point; it is {tensor.dtype}. Convert it before the call.")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise TypeError(
                f"q, k and v must share dtype and device; q is {q.dtype} on {q.device}, {name} is {tensor.dtype} on "
                f"{tensor.device}. Convert one of them."
            )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "q and k must agree in batch and dim, k and v in batch, head and position; shapes are "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}. The layout is (batch, head, position, dim)."
        )
    if 0 in (q.shape[1], q.shape[3], k.shape[1]) or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the heads of q must be a multiple of those of k, and none of them or of dim zero; q has {q.shape[1]} "
            f"heads of {q.shape[3]}, k has {k.shape[1]}. Repeat or drop heads."
        )


def _check_mask(name: str, mask: Tensor | None, kind: Kind, batch: int, keys: int) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or kind_of(mask) != kind:
        wanted = "bool, True for keys that may be seen" if kind == "bool" else "integer"
        raise TypeError(f"{name} must be {wanted}; {came(mask)} came. Convert it before the call.")
    if mask.ndim != 2 or mask.shape[0] not in (1, batch) or mask.shape[1] != keys:
        raise ValueError(
            f"{name} must be (batch or 1, key) = ({batch}, {keys}); its shape is {tuple(mask.shape)}. "
            "Give one entry per key, old and new."
        )


def _check_start(start: object, queries: int, keys: int) -> None:
    if isinstance(start, Tensor):
        good = start.ndim == 0 and kind_of(start) == "integer"
    else:
        good = isinstance(start, int) and not isinstance(start, bool) and 0 <= start <= keys - queries
    if not good:
        raise ValueError(
            f"start must be the slot of the first of {queries} queries among {keys} keys, a whole number or a tensor "
            f"without axes; {came(start)} came. Leave it out where the queries are the last slots."
        )


def _check_bias(bias: Bias, wanted: tuple[int, int, int, int]) -> None:
    if isinstance(bias, Tensor):
        raise TypeError("bias must be a described Bias; a Tensor came. Wrap it: DenseBias(tensor).")
    if not isinstance(bias, Bias):
        raise TypeError(f"bias must be a Bias; {came(bias)} came. Use encoding.bias(x, query, key).")
    shape = bias.shape
    if shape[0] not in (1, wanted[0]) or shape[1] not in (1, wanted[1]) or shape[2:] != wanted[2:]:
        raise ValueError(
            f"the bias must fit (batch, head, query, key) = {wanted}; it is {shape}. "
            "Make it from the positions of this call's queries and keys."
        )


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0)


def _tensor(name: str, x: Tensor, axis: str) -> str:
    batch, heads, length, dim = x.shape
    kind = f"{str(x.dtype).removeprefix('torch.')} {x.device.type}"
    return f"    {name:8} {kind}  batch={batch} head={heads} {axis}={length} dim={dim}"
