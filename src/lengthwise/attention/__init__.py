"""Attention with a described bias: one door, several backends; backend.py says what a backend is."""

from types import ModuleType
from typing import Literal, Unpack, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lengthwise.attention import flex, native, reference, row_block, sdpa, triton
from lengthwise.attention.backend import Output, Plan, Refusal, merge
from lengthwise.attention.call import AttentionCall, CallOptions, checked_call, skipping
from lengthwise.attention.reference import Explanation
from lengthwise.bias import Bias, without_autocast
from lengthwise.rescore import Rescore
from lengthwise.token_layout import TokenLayout, Window

__all__ = [
    "BACKENDS",
    "AttentionCall",
    "Explanation",
    "attend",
    "checked_call",
    "choose",
    "explain",
    "merge",
    "preference",
    "run",
    "skipped_share",
    "skipping",
]

BACKENDS: dict[str, ModuleType] = {
    "native": native,
    "row_block": row_block,
    "sdpa": sdpa,
    "flex": flex,
    "reference": reference,
    "triton": triton,
}
"""Backends by name."""


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    backend: str = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[CallOptions],
) -> Tensor: ...


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str = ..., return_lse: Literal[True], **options: Unpack[CallOptions]
) -> tuple[Tensor, Tensor]: ...


def attend(
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
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T + bias) v over the keys that each query may see; zeros where it sees none.

    layout       where the tokens stand, see `lw.layout`; without one the queries are the last keys, and
    causal       says whether they see later keys,
    key_mask     is True for keys, False for padding
    bias         `encoding.bias(x, layout)`: described, added to the scores
    rescore      `encoding.rescore(x, layout)`, for encodings that replace the scores
    window       how many slots back a query sees, itself included (and as many ahead where not causal); or a `Band`,
                 or a tuple of them, which are joined
    scale        1 / sqrt(dim) if not given
    softcap      content becomes softcap tanh(content / softcap), before the bias is added
    logit_scale  (batch or 1, head or 1, query): a factor on the scores of each row, bias included
    sink         (head,) or (batch or 1, head, query or 1): a logit that takes weight and gives no value; never scaled
    return_lse   also give the log of each row's denominator, (batch, head, query), which `lw.merge` takes
    backend      a name in BACKENDS, which is used or raises, never replaced; or "auto", see `preference`
    """
    options: CallOptions = {
        "layout": layout,
        "causal": causal,
        "key_mask": key_mask,
        "bias": bias,
        "rescore": rescore,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "sink": sink,
    }
    if isinstance(layout, TokenLayout) and layout.ring is not None:
        spread: Tensor | tuple[Tensor, Tensor] = layout.ring.attend(
            q, k, v, **options, return_lse=return_lse, backend=backend
        )
        return spread
    call = checked_call(q, k, v, **options, return_lse=return_lse)
    out, lse = run(call, backend)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def explain(
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    v: Float[Tensor, "batch kv_head key value"],
    *,
    matrices: bool = True,
    **options: Unpack[CallOptions],
) -> Explanation:
    """What `attend` computes on the way, by the reference: statistics of every row, and the matrices, quadratic.

    It takes what `attend` takes, but for the backend.

    Without `matrices` memory is linear in length: the output, log-sum-exp, entropy, largest score and sink's weight of
    every row alone.

    >>> q = torch.ones(1, 1, 2, 4)
    >>> explain(q, q, q).weights[0, 0]
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    call = checked_call(q, k, v, **options)
    if matrices:
        choose(call, "reference")
    with without_autocast(q):
        return reference.explain(call, matrices=matrices)


def run(call: AttentionCall, backend: str = "auto") -> Output:
    """The output and the log-sum-exp of a checked call."""
    name, plan = choose(call, backend)
    with without_autocast(call.q):
        output: Output = BACKENDS[name].run(call, plan)
        return output


def choose(call: AttentionCall, backend: str = "auto") -> tuple[str, Plan]:
    """The backend that will take the call and its plan, or an error with the call and every reason against it."""
    if backend != "auto" and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ValueError(f"unknown backend {backend!r}; known: {', '.join(map(repr, BACKENDS))} and 'auto'")
    names = preference(call) if backend == "auto" else (backend,)
    refusals: dict[str, Refusal] = {}
    for name in names:
        plan = BACKENDS[name].plan(call)
        if not isinstance(plan, Refusal):
            return name, plan
        refusals[name] = plan
    raise NotImplementedError(_refusal(call, refusals))


def skipped_share(call: AttentionCall) -> float:
    """How much of the work that the masks leave is left out by the backend that takes the call, 0 to 1."""
    # A rescore reads every score.
    share = None if call.rescore is not None else getattr(BACKENDS[choose(call)[0]], "skipped_share", None)
    return 0.0 if share is None else float(share(call))


def preference(call: AttentionCall) -> tuple[str, ...]:
    """The order in which "auto" asks the backends: the first that takes the call gets it.

    | where   | call                                    | order                                                      |
    |---------|-----------------------------------------|------------------------------------------------------------|
    | CPU     | a few queries, no gradients (decoding)  | native, which reads the cache once, row_block, sdpa        |
    | CPU     | nothing but causality and q.k           | native in float32, sdpa                                    |
    | CPU     | everything else                         | native, row_block, reference, sdpa                         |
    | devices | nothing but causality and q.k           | sdpa, triton, flex, row_block, reference                   |
    | devices | everything else                         | triton, flex, row_block, reference                         |

    On a CPU that is what benchmarks/attention.py measured. On CUDA triton comes first, since its gradients have the
    same bits in every run and flex's have not; it takes the kinds of calls that have proved themselves on that card.
    """
    on_cpu = call.q.device.type == "cpu"
    if call.is_decoding and on_cpu:
        return ("native", "row_block", "sdpa", "reference")
    is_plain = call.is_bare and not call.return_lse and sdpa.is_fused(call)
    if not on_cpu:
        return ("sdpa", *ON_DEVICES) if is_plain else ON_DEVICES
    if is_plain:
        return ("native", "sdpa", *BACKENDS) if call.dtype == torch.float32 else ("sdpa", *BACKENDS)
    return ("native", "row_block", "reference", "sdpa")


ON_DEVICES = ("triton", "flex", "row_block", "reference")


def _refusal(call: AttentionCall, refusals: dict[str, Refusal]) -> str:
    only = next(iter(refusals)) if len(refusals) == 1 else None
    lines = [f"backend {only!r} cannot take this call" if only else "no backend can take this call", call.describe()]
    lines += [f"  {name}: {reason}" for name, refusal in refusals.items() for reason in refusal.reasons]
    others = [name for name in BACKENDS if name not in refusals]
    able = [name for name in others if not isinstance(BACKENDS[name].plan(call), Refusal)]
    if able:
        lines.append(f"  backend={' or '.join(map(repr, able))} can take it")
    return "\n".join(lines)
