"""Attention with a described bias: one door, several backends.

A backend is a module with `objections(call)`, the reasons why it cannot take a call, and `attend(call)`.
"""

from types import ModuleType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lengthwise.attention import flex, native, reference, row_block, sdpa
from lengthwise.attention.call import Call, Rescore, checked_call
from lengthwise.attention.reference import Explanation
from lengthwise.bias import Bias, without_autocast

__all__ = ["BACKENDS", "Call", "Explanation", "attend", "checked_call", "choose", "explain", "preference"]

BACKENDS: dict[str, ModuleType] = {
    "native": native,
    "row_block": row_block,
    "sdpa": sdpa,
    "flex": flex,
    "reference": reference,
}
"""Backends by name."""


def attend(
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
    backend: str = "auto",
) -> Float[Tensor, "batch head query value"]:
    """softmax(scale q k^T + bias) v over the keys that each query may see; zeros where it may see none.

    Order in the tensors decides causality: key j stands in slot j, query i in slot start + i. With no `start` the
    queries are the last slots; a cache with room behind the newest key gives it.

    key_mask   True for keys that may be seen, False for padding
    documents  a number per key; only keys of the query's own document are seen
    window     how many slots back a query sees, itself included (and as many ahead where not causal)
    scale      1 / sqrt(dim) if not given
    rescore    `encoding.rescore`, for encodings that replace the scores
    backend    a name in BACKENDS, which is used or raises, never replaced; or "auto", see `choose`
    """
    call = checked_call(
        q,
        k,
        v,
        bias=bias,
        rescore=rescore,
        causal=causal,
        key_mask=key_mask,
        documents=documents,
        window=window,
        scale=scale,
        start=start,
    )
    module = BACKENDS[choose(call, backend)]
    with without_autocast(q):
        return module.attend(call)


def explain(call: Call) -> Explanation:
    """The output by the reference, with content, bias, scores and weights beside it, all of them quadratic.

    >>> q = torch.ones(1, 1, 2, 4)
    >>> explain(checked_call(q, q, q)).weights[0, 0]
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    choose(call, "reference")
    with without_autocast(call.q):
        return reference.explain(call)


def choose(call: Call, backend: str = "auto") -> str:
    """The name of the backend that will take the call, or an error with the call and every objection."""
    if backend != "auto" and (not isinstance(backend, str) or backend not in BACKENDS):
        known = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"unknown backend {backend!r}; there are {known} and 'auto'. Leave it out for 'auto'.")
    names = preference(call) if backend == "auto" else (backend,)
    for name in names:
        if not BACKENDS[name].objections(call):
            return name
    raise NotImplementedError(_refusal(call, names))


def preference(call: Call) -> tuple[str, ...]:
    """The order in which "auto" asks the backends, by what benchmarks/attention.py measured on a CPU.

    | call                                      | first                                                     |
    |-------------------------------------------|-----------------------------------------------------------|
    | a few queries, no gradients (decoding)    | native, which reads the cache once and where it lies      |
    | no bias, no mask but causality            | native in float32, else sdpa                              |
    | a device other than the CPU (untested)    | sdpa without a bias, else flex, which compiles it         |
    | everything else                           | native where it can, then row_block                       |
    """
    if native.few_rows.suits(call):
        return ("native", "row_block", "sdpa", "reference")
    if call.bias is None and call.rescore is None and sdpa.fused(call):
        return ("native", "sdpa", *BACKENDS) if call.dtype == torch.float32 else ("sdpa", *BACKENDS)
    if call.q.device.type != "cpu":
        return ("flex", *BACKENDS)
    return ("native", "row_block", "reference", "sdpa")


def _refusal(call: Call, names: tuple[str, ...]) -> str:
    who = f"backend {names[0]!r}" if len(names) == 1 else "no backend"
    lines = [f"{who} {'cannot' if len(names) == 1 else 'can'} take this call.", call.describe()]
    lines += [f"  {name}: {objection}" for name in names for objection in BACKENDS[name].objections(call)]
    free = [name for name, module in BACKENDS.items() if not module.objections(call)]
    if free:
        verb = "has" if len(free) == 1 else "have"
        lines.append(f'  Use backend={" or ".join(map(repr, free))}, which {verb} no objection, or "auto".')
    elif len(names) == 1:
        lines.append("  No other backend can take it either.")
    return "\n".join(lines)
