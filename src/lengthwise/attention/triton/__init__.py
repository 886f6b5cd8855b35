"""Attention in Triton, for GPUs: forward and backward for described biases, with the same bits in every run.

terms     the bias as the kernels know it
tiles     how large tiles are, by kernel, precision and card
masks     what hides keys, as kernels read it
inputs    a call as kernels read it: tensors, sizes and flags
passes    what is launched for a call, forward and backward
bounds    the keys that provably cannot matter
kernels/  the kernels themselves
self_test a proof on the device itself, before a kind of call is taken there

They were checked against the reference in Triton's interpreter (TRITON_INTERPRET=1) and compiled for several cards;
the authors had no GPU to run them on. `triton` comes with torch's CUDA builds and is imported when it is needed.
"""

import importlib
import importlib.util
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lengthwise.attention import custom_op
from lengthwise.attention.backend import Output, Plan, Refusal, finite_inputs
from lengthwise.attention.call import AttentionCall
from lengthwise.attention.triton import self_test
from lengthwise.attention.triton.terms import Terms, offsets_of, terms_of
from lengthwise.attention.triton.tiles import WIDEST, is_interpreted

CAPABILITY = (8, 0)
"""The oldest cards; older ones have too few registers."""

MOST = 65_535
"""Where the second and the third axis of a grid end."""


@dataclass(frozen=True)
class TritonPlan(Plan):
    """What is known of the call beside its tensors."""

    notes: dict[str, int] = field(default_factory=dict)


def plan(call: AttentionCall) -> Plan | Refusal:
    """The plan for a call, or why the kernels cannot take it."""
    reason = _fault(call)
    if reason is not None:
        return Refusal.because(reason)
    terms = terms_of(call.bias)
    if isinstance(terms, Refusal):
        return terms
    if terms.level is not None and (step := terms.level[1].step) is not None and call.needs_grad and step.requires_grad:
        return Refusal.because("its kernels take the levels of learned steps, got the steps themselves")
    notes = offsets_of(call, terms)
    if notes is None and len(terms.tables) > 1:
        return Refusal.because("tables are added up where positions follow the slots, which is not known here")
    reason = _unproved(call, terms, follows_slots=notes is not None)
    return TritonPlan(notes or {}) if reason is None else Refusal.because(reason)


def run(call: AttentionCall, plan: Plan) -> Output:
    """The output and the log-sum-exp, with gradients for everything that is learned."""
    assert isinstance(plan, TritonPlan)
    # Out here, so that the operators need not find out again what is finite, nor run twice where something is not.
    clean, taint = finite_inputs(call)
    out, lse = custom_op.attend(OPERATORS, clean, plan.notes)
    if taint is not None:
        out, lse = out + taint[..., None].to(out.dtype), None if lse is None else lse + taint
    return out, lse


def skipped_share(call: AttentionCall) -> float:
    """How much of the forward work that the masks leave is skipped, 0 to 1; reads values back."""
    own = plan(call)
    if isinstance(own, Refusal):
        raise NotImplementedError("; ".join(own.reasons))
    assert isinstance(own, TritonPlan)
    share: float = _launched("skipped_share", finite_inputs(call)[0], own.notes)
    return share


def _launched(name: str, call: AttentionCall, notes: custom_op.Notes, *saved: Tensor) -> Any:
    """One of passes.py, by name: only here is Triton imported, and an exported model has no such file."""
    passes = importlib.import_module(f"{__name__}.passes")
    # Triton launches on the current device, which need not be that of the tensors; off CUDA this does nothing.
    with torch.cuda.device_of(call.q):
        return getattr(passes, name)(call, notes, *saved)


def _forward(call: AttentionCall, notes: custom_op.Notes) -> tuple[Tensor, Tensor]:
    results: tuple[Tensor, Tensor] = _launched("forward", call, notes)
    return results


def _backward(call: AttentionCall, notes: custom_op.Notes, *saved: Tensor) -> dict[str, Tensor]:
    gradients: dict[str, Tensor] = _launched("backward", call, notes, *saved)
    return gradients


OPERATORS = custom_op.operators("triton", _forward, _backward)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _machine_fault(device: str) -> str | None:
    """Why the machine is none for the kernels; a compiled graph asks once."""
    kind = device.partition(":")[0]
    if kind == "meta":  # nothing is launched: shapes and devices are all that there is
        return None
    if kind != "cuda" and not (kind == "cpu" and is_interpreted()):
        return f"its kernels are for GPUs, got tensors on {kind}"
    if not globals().get("__path__"):
        return "its kernels are not part of an exported model"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; torch's CUDA builds bring it"
    if kind == "cuda" and not torch.cuda.is_available():
        return "CUDA is not available here"
    if kind == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < CAPABILITY:
            return f"its kernels need a card of compute capability 8.0 or more, got {capability[0]}.{capability[1]}"
    return None


def _fault(call: AttentionCall) -> str | None:
    """Why the machine or the call is none for the kernels."""
    reason: str | None = _machine_fault(str(call.q.device))
    if reason is not None:
        return reason
    if call.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its kernels compute in float32, float16 and bfloat16, got {call.dtype}"
    if max(call.batch, call.heads) > MOST:
        return f"its kernels take up to {MOST:,} sequences and as many heads, got {call.batch:,} and {call.heads:,}"
    width = max(call.q.shape[3], call.v.shape[3])
    if width > WIDEST:
        return f"its kernels take heads up to {WIDEST} wide, got {width}"
    if call.rescore is not None:
        return "its kernels do not rescore"
    if call.layout.mask is not None:
        return "its kernels take no explicit mask"
    return None


def _unproved(call: AttentionCall, terms: Terms, *, follows_slots: bool) -> str | None:
    """Why the kernels are not to be trusted with this kind of call on its device."""
    if call.q.device.type not in NEED_PROOF:
        return None
    kind = self_test.kind_of(call, terms, follows_slots=follows_slots)
    reason: str | None = _verdict(str(call.q.device), not _can_be_tried(call), *kind)
    return reason


def _can_be_tried(call: AttentionCall) -> bool:
    """Not where a graph is compiled or captured, and not where tensors have no numbers."""
    if torch.compiler.is_compiling() or isinstance(call.q, FakeTensor):
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


NEED_PROOF = ("cuda",)
"""Devices on which kernels must prove themselves first."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _verdict(device: str, is_blind: bool, *kind: Any) -> str | None:
    text = self_test.Kind(*kind).text
    if is_blind:
        return self_test.known_fault(device, text)
    skips = partial(_launched, "skips")
    return self_test.fault(device, text, lambda call, notes: run(call, TritonPlan(dict(notes))), skips)
