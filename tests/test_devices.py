"""Devices are never mixed and no value is read back, proved without one.

A tensor on `meta` has no numbers: who reads one gets an error, and so does who lets it meet a tensor of the CPU. Whole
models train and decode there, by the road of a device. (Fake tensors of CUDA would show no more: torch's build for CPUs
cannot so much as slice one.)
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_kit import CASES, SCHEDULES, make_cache, make_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from train_kit import small_config

import lengthwise as lw
from lengthwise.attention import checked_call, choose, preference, triton
from lengthwise.inspect import capture
from lengthwise.inspect.model_maps import position_records
from lengthwise.inspect.scores import BlockMask, score_block, weights_of
from lengthwise.model import LengthwiseEncoder, LengthwiseEncoderConfig, LengthwiseForCausalLM, LengthwiseForMaskedLM
from lengthwise.train import loop, optimizers
from lengthwise.train.distributed import World
from lengthwise.train.logging import MetricsBuffer
from lengthwise.train.signals import Stopped

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
    with torch.device("meta"):
        return LengthwiseForCausalLM(make_config(case))


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


@pytest.mark.parametrize("case", [*CASES, *SCHEDULES])
def test_position_maps_are_captured_without_a_number(case, monkeypatch):
    """Comparing with the layer's output and looking for structure need numbers; scores and weights do not."""
    monkeypatch.setattr(capture, "verify", lambda record, name: None)
    rows, columns = slice(LENGTH - 4, LENGTH), slice(0, LENGTH)
    records = position_records(meta_model(case).eval(), meta_ids())
    assert records
    for record in records:
        visible = BlockMask(rows, columns, record.mask(rows, columns), free=0)
        with torch.no_grad():
            bias = None if record.bias is None else record.bias.tile(rows, columns).expand(-1, record.shape[1], -1, -1)
            block = score_block(record, visible, slice(0, record.shape[1]), bias)
            assert weights_of(record, block).device.type == "meta"


class Copied(TorchDispatchMode):
    """Raises at numbers that are copied from the host to a device, which waits for it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ in ("lift_fresh", "_to_copy", "copy_"):
            came_from = {x.device.type for x in args if isinstance(x, Tensor)}
            assert isinstance(result, Tensor)
            assert came_from == {result.device.type}, f"{function}: {came_from} to {result.device.type}"
        return result


@pytest.mark.parametrize("case", [*CASES, *SCHEDULES])
def test_after_the_first_step_nothing_is_copied_to_the_device(case, monkeypatch):
    model, ids = meta_model(case).train(), meta_ids()
    model(input_ids=ids, labels=ids).loss.backward()
    made = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *_, **named: pytest.fail(f"torch.tensor on {named.get('device')}"))
    with Copied():
        model(input_ids=ids, labels=ids).loss.backward()
    monkeypatch.setattr(torch, "tensor", made)


def test_a_masked_model_does_not_read_how_many_tokens_are_labelled():
    config = LengthwiseEncoderConfig.preset("nano", encoding="cable", vocab_size=64)
    model = LengthwiseForMaskedLM(config).to("meta").train()
    model.loss(meta_ids(), meta_ids(), attention_mask=torch.ones_like(meta_ids())).backward()


def test_an_encoder_trains_on_padded_texts_without_reading_how_long_they_are():
    model = LengthwiseEncoder(LengthwiseEncoderConfig.preset("nano", encoding="cable", vocab_size=64)).to("meta")
    out = model.train()(meta_ids(), attention_mask=torch.ones_like(meta_ids())).last_hidden_state
    out.sum().backward()
    assert out.shape[:2] == (2, LENGTH)


# Training.

META = World(0, 1, torch.device("meta"), sharded=False)


@pytest.mark.parametrize(("encoding", "optimizer"), [("cable", "adamw"), ("fire", "muon")])
def test_a_training_run_reads_its_losses_every_few_steps_and_nothing_else(encoding, optimizer, tmp_path, monkeypatch):
    reads = []

    def read(buffer: MetricsBuffer) -> list[dict[str, Any]]:
        assert all(values.device.type == "meta" for values in buffer._values)
        lines = [line | {"loss": 1.0, "gradient": 1.0} for line in buffer._lines]
        reads.append([line["step"] for line in lines])
        buffer.__init__()
        return lines

    monkeypatch.setattr(MetricsBuffer, "read", read)

    def stop(*_: Any) -> None:
        raise Stopped("the checkpoint", signal.SIGTERM)

    monkeypatch.setattr(loop, "save_checkpoint", stop)
    config = small_config(tmp_path, encoding=encoding, optimizer=optimizer, steps=20, checkpoint_every=7, log_every=3)
    config = replace(config, evaluate_every=20, evaluate_lengths=[33])
    with pytest.raises(Stopped, match="the checkpoint"):
        loop.run(config.resolved(), META)
    assert reads == [[1, 2, 3], [4, 5, 6], [7]]


def test_batches_go_to_cuda_from_pinned_memory_and_to_other_devices_as_they_are():
    x = torch.ones(3)
    assert World(0, 1, torch.device("cpu"), sharded=False).put(x) is x
    assert META.put(x).device.type == "meta"
    assert META.put(None) is None
    copies = []
    pinned = SimpleNamespace(to=lambda device, non_blocking: copies.append((device, non_blocking)))
    World(0, 1, torch.device("cuda:0"), sharded=False).put(SimpleNamespace(pin_memory=lambda: pinned))
    assert copies == [(torch.device("cuda:0"), True)]


def test_a_fused_optimizer_goes_on_from_its_moments(monkeypatch, tmp_path):
    monkeypatch.setattr(optimizers, "FUSED", ("cpu",))
    config = small_config(tmp_path).resolved()
    models = [LengthwiseForCausalLM(make_config("cable")) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    both = [optimizers.Optimizers(config, model) for model in models]
    for step in (1, 2):
        for model, own in zip(models, both, strict=True):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, 0.1 * step + 0.01 * number)
            own.step(1e-3)
        if step == 1:
            both[1] = optimizers.Optimizers(config, models[1])
            both[1].start_moments(1)
            for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
                for name, moment in both[1].moments(ours).items():
                    moment.copy_(both[0].moments(theirs)[name])
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)


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


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_kernels_are_launched_on_the_device_of_the_tensors(name, monkeypatch):
    """Which need not be the current one: Triton launches there."""
    current, launches = [None], []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current[0] = tensor
        yield
        current[0] = None

    passes = SimpleNamespace(**{name: lambda call, notes, *saved: launches.append((call.q, current[0]))})
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(triton.importlib, "import_module", lambda _: passes)
    getattr(triton, f"_{name}")(call_on("meta"), {})
    assert [on is q for q, on in launches] == [True]
    assert current == [None]


def test_the_pass_before_compiling_leaves_nothing_behind(tmp_path):
    config = small_config(tmp_path, encoding="cable").resolved()
    objective = loop.make_objective(config)
    model = objective.make_model()
    world = World(0, 1, torch.device("cpu"), sharded=False)
    random = torch.get_rng_state()
    loop.pass_outside_graphs(config, objective, loop.SummedLoss(model, objective, world), world, torch.float32)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
