"""Devices are never mixed and no value is read back, proved without one.

A tensor on `meta` has no numbers: who reads one gets an error, and so does who lets it meet a tensor of the CPU. Whole
models train and decode there, by the road of a device. (Fake tensors of CUDA would show no more: torch's build for CPUs
cannot so much as slice one.)
"""

from typing import Any

import pytest
import torch
from model_kit import CASES, SCHEDULES, make_cache, make_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lengthwise as lw
from lengthwise.attention import checked_call, choose, preference, triton
from lengthwise.model import LengthwiseForCausalLM

LENGTH = 29
ORDER_MATTERS = (
    *("scatter_add", "scatter_reduce", "index_add", "index_reduce", "index_copy", "put_", "gather_backward"),
    *(
        "bincount",
        "histc",
        "kthvalue",
        "median",
        "masked_scatter",
        "index_select_backward",
        "repeat_interleave_backward",
    ),
)
"""Of torch's list of operations whose result on CUDA depends on the order of threads, those that attention could meet;
so does cumsum of floating-point numbers."""


def meta_model(case: str) -> LengthwiseForCausalLM:
    return LengthwiseForCausalLM(make_config(case)).to("meta")


def meta_ids(length: int = LENGTH) -> Tensor:
    return torch.zeros(2, length, dtype=torch.long, device="meta")


class Deterministic(TorchDispatchMode):
    """Raises at operations whose result depends on the order of threads on CUDA."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert not name.startswith(ORDER_MATTERS), name
        assert not (
            name == "cumsum" and (args[0].is_floating_point() or (kwargs or {}).get("dtype") == torch.float64)
        ), name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", [*CASES, *SCHEDULES])
def test_a_training_step_reads_nothing_back_and_has_the_same_bits_in_every_run(case):
    model = meta_model(case).train()
    optimizer = torch.optim.AdamW(model.parameter_groups(), lr=1e-3)
    with Deterministic():
        loss = model(input_ids=meta_ids(), attention_mask=torch.ones_like(meta_ids()), labels=meta_ids()).loss
        loss.backward()
    optimizer.step()
    assert all(p.grad is not None and p.grad.device.type == "meta" for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("case", [*CASES, *SCHEDULES])
@torch.no_grad()
def test_decoding_reads_nothing_back(case, cache):
    model = meta_model(case).eval()
    past = make_cache(cache, model)
    for length in (20, 1, 1):
        out = model(input_ids=meta_ids(length), past_key_values=past, use_cache=True)
        assert out.logits.shape[:2] == (2, length)


# The choice of "auto".


def call_on(device: str, **options: Any) -> Any:
    q, k, v = torch.zeros(3, 1, 2, 8, 16, device=device, dtype=options.pop("dtype", torch.float32))
    return checked_call(q, k, v, layout=lw.layout(8, device=device), **options)


def test_auto_on_a_device_takes_triton_then_flex_then_row_block(monkeypatch):
    levels = torch.zeros(1, 1, 8, dtype=torch.float64, device="meta")
    biased = call_on("meta", bias=lw.LevelBias(levels, levels, torch.ones(1, 2, 1, device="meta")))
    assert preference(call_on("meta"))[0] == "sdpa"
    assert preference(biased) == ("triton", "flex", "row_block", "reference")
    assert choose(biased)[0] == "triton"
    monkeypatch.setattr(triton, "_machine_fault", lambda device: "its kernels need a card, got none")
    assert choose(biased)[0] == "row_block"  # flex has no meta tensors


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"spec": None}, "Triton is not installed"),
        ({"available": False}, "CUDA is not available"),
        ({"capability": (7, 5)}, r"compute capability 8\.0 or more, got 7\.5"),
        ({}, None),
    ],
)
def test_a_machine_that_is_none_for_the_kernels_is_refused_in_words(fault, words, monkeypatch):
    monkeypatch.setattr(triton.importlib.util, "find_spec", lambda name: fault.get("spec", True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: fault.get("available", True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: fault.get("capability", (8, 0)))
    reason = triton._machine_fault("cuda:0")
    if words is None:
        assert reason is None
    else:
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(reason)
