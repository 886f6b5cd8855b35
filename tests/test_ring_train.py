"""Training with sequences that processes share: the losses of one process, under DDP and FSDP2, killed and resumed."""

import dataclasses
import importlib
import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from test_train_kills import assert_survives
from train_kit import assert_close, in_processes, moments, small_config

import lengthwise as lw
from lengthwise import runs
from lengthwise.cli import main
from lengthwise.distributed.sharding import zigzag
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.runs import Run
from lengthwise.train import TrainConfig, train
from lengthwise.train.estimate import Hardware, estimate, layer_bytes
from lengthwise.train.setup import MODELS, dry_run, model_config, vocabulary_size

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, {}),
        pytest.param(2, {"sharded": True}, marks=pytest.mark.prove),
        pytest.param(2, {"recompute": True}, marks=pytest.mark.prove),
        pytest.param(4, {}, marks=pytest.mark.prove),
        pytest.param(4, {"sharded": True}, marks=pytest.mark.prove),
    ],
    ids=str,
)
def test_processes_that_share_each_sequence_give_the_losses_of_one(tmp_path, processes, options):
    changes = {"steps": 8, "batch_tokens": 6 * 33, "micro_batch": 2, "separate_documents": True}
    one = small_config(tmp_path, "one", **changes)
    ring = small_config(tmp_path, "ring", **changes, context_parallel=2, **options)
    assert in_processes(lambda: train(one)) == [0]
    assert in_processes(lambda: train(ring), processes) == [0] * processes
    assert_close(Run(ring.out), Run(one.out))


@pytest.mark.prove
def test_five_of_five_kills_of_a_ring_are_survived_bit_for_bit(tmp_path):
    total = moments(small_config(tmp_path, "whole", context_parallel=2), world=2)
    for trial, at in enumerate(random.Random(13).sample(range(2, total), 5)):
        assert_survives(tmp_path, f"killed-{trial}", at, world=2, context_parallel=2)


def test_a_ring_that_loses_a_process_ends_and_its_checkpoint_is_whole(tmp_path, capfd):
    config = small_config(tmp_path, context_parallel=2)

    def die():
        if os.environ["RANK"] == "1":
            from lengthwise.train import loop

            clip = loop.clip_gradients
            steps = []
            loop.clip_gradients = lambda *a: (steps.append(1), len(steps) == 6 and os.kill(os.getpid(), 9), clip(*a))[2]
        train(config)

    assert in_processes(die, 2) == [1, -signal.SIGKILL]
    assert "lost the connection to another process of the run" in capfd.readouterr().err
    assert [path.name for path in Run(config.out).checkpoints] == ["step-00000004"]
    assert in_processes(lambda: train(dataclasses.replace(config, resume=True)), 2) == [0, 0]
    assert Run(config.out).is_finished


def test_rings_that_cannot_be_are_refused(tmp_path, capfd):
    config = small_config(tmp_path, context_parallel=2)
    with pytest.raises(
        ValueError, match="--context-parallel needs several processes, got one; start them with torchrun"
    ):
        train(config)
    assert in_processes(lambda: train(dataclasses.replace(config, context_parallel=3)), 2) == [1, 1]
    assert "--context-parallel must divide the processes, got 3 and 2 processes" in capfd.readouterr().err
    for changes, words in (
        ({"length": 3, "batch_tokens": 6}, "2 processes share sequences of 4 tokens or more, got --length 3"),
        ({"compile": True}, "leave out --compile"),
        ({"encoding": "kerple+dape"}, "'dape' replaces the scores"),
        ({"context_parallel": 0}, "context_parallel must be a positive int, got 0"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=words):
            dry_run(dataclasses.replace(config, **changes))


def test_a_dry_run_says_what_a_device_needs_and_refuses_what_cannot_fit():
    hardware = {"devices": 8, "memory_gb": 80, "tflops": 989}
    large = TrainConfig(preset="large", encoding="cable", data="stdlib", tokenizer="bytes", hardware=hardware)
    text = dry_run(large)
    assert "step      524,288 tokens over 8 devices, 16 micro-batches each" in text
    assert "GB a device: state 14.21, activations" in text
    assert "hours at 40 % of 8 x 989 TFLOP/s" in text
    with pytest.raises(
        MemoryError, match=r"a device must have room for .* GB and a tenth free, got 16 GB: .*--sharded"
    ):
        dry_run(dataclasses.replace(large, hardware=hardware | {"memory_gb": 16}))
    dry_run(
        dataclasses.replace(large, hardware=hardware | {"memory_gb": 16}, sharded=True, recompute=True, micro_batch=1)
    )
    for wrong, words in (
        ({"device": 8}, "hardware has 'devices', .* got 'device'"),
        ({"devices": 0}, "hardware's devices must be a positive int, got 0"),
        ({"utilisation": 2.0}, "utilisation must be a number above 0 and at most 1, got 2.0"),
        ({"devices": 3}, "must divide the devices, got 2 and 3"),
    ):
        with pytest.raises(ValueError, match=words):
            dry_run(dataclasses.replace(large, hardware=wrong, context_parallel=2))


RECIPES = sorted((ROOT / "configs/recipes").glob("*.yaml"))


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[] if "small" in p.stem else pytest.mark.prove) for p in RECIPES],
    ids=lambda p: p.stem,
)
def test_the_recipes_fit_and_say_their_hours(path, capsys):
    main(["train", "--config", str(path), "--encoding", "cable", "--dry-run"])
    text = capsys.readouterr().out
    devices = 8 if path.stem.endswith("8gpus") else 32
    assert "tokens    9,999,745,024 in 19,073 steps of 512 x 1,024" in text
    assert f"step      524,288 tokens over {devices} devices" in text
    assert f"hours at 35 % of {devices} x 989 TFLOP/s" in text
    assert "20 checkpoints, of which 2 are kept, and the model; about 20.00 of token files" in text


@pytest.mark.parametrize(("optimizer", "steps"), [("adamw", 11), ("adamw", 7), ("muon", 11)])
def test_the_disk_of_a_run_is_the_most_that_its_folder_has_at_a_time(tmp_path, monkeypatch, optimizer, steps):
    sizes = {"n_layer": 2, "n_head": 3, "n_embd": 192}
    config = small_config(tmp_path, optimizer=optimizer, steps=steps, encoding="none", sizes=sizes)
    weighed = []

    def flush_and_weigh(path):
        flush(path)
        weighed.append(sum(p.stat().st_size for p in Path(config.out).rglob("*.safetensors")))

    flush = runs.flush
    monkeypatch.setattr(runs, "flush", flush_and_weigh)
    train(config)
    resolved = config.resolved()
    with torch.device("meta"):
        model = MODELS[resolved.objective](model_config(resolved, vocabulary_size(resolved)))
    needs = estimate(resolved, model, Hardware())
    assert needs.tokens is None
    # Headers of the files come on top.
    assert needs.disk == pytest.approx(max(weighed), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_memory_of_a_layer_is_what_torch_saves_for_it(dtype):
    config = LengthwiseConfig.preset("nano", encoding="none", n_layer=1, n_head=4, n_embd=128, vocab_size=64)
    block, tokens = LengthwiseForCausalLM(config).train().transformer.h[0], 256
    x = torch.randn(1, tokens, 128, requires_grad=True)
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.shape != block.mlp.c_fc.weight.shape:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    rounded = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), rounded:
        block(x, lw.layout(tokens))
    # Weights that autocast rounded are no activations.
    sizes = [size for size, tensor in saved.values() if tensor.shape[-2:] not in {p.shape for p in block.parameters()}]
    assert layer_bytes(config, dtype.itemsize) == pytest.approx(sum(sizes) / tokens, rel=0.02)


@pytest.fixture
def ring(monkeypatch):
    """The benchmark."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("ring")


def test_the_simulation_counts_every_pair_once(ring):
    chunks = zigzag(40, 4)
    first, stop = (np.array([getattr(c, name) for c in chunks], dtype=float) for name in ("first", "stop"))
    for reach in (1, 7, 40):
        counted = sum(ring.visible_pairs(c.first, c.stop, first, stop, float(reach)).sum() for c in chunks)
        assert counted == sum(min(row + 1, reach) for row in range(40))
    given = ring.Assumptions()
    plain, window, decaying = (ring.simulate(2**17, 8, bias, given) for bias in ring.BIASES)
    assert plain["received_gb"] > decaying["received_gb"] > window["received_gb"] > 0
    assert plain["seconds"] > decaying["seconds"] > window["seconds"]
    assert ring.simulate(2**17, 16, "plain", given)["memory_gb"] < plain["memory_gb"]


@pytest.mark.prove
def test_what_is_measured_of_rings_is_what_the_simulation_takes(ring, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ring, "RESULTS", tmp_path)
    assert ring.measured() == {}
    for case, measure in ring.MEASURED.items():
        rows = measure(ring.QUICK)
        (tmp_path / f"ring-{case}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taken = ring.measured()
    assert taken.keys() == {"plain_share", "window_share", "decaying_share", "spread"}
    given = ring.Assumptions(**taken)
    assert min(given.plain_share, given.window_share, given.decaying_share) > 0
    ring.compare(given)
    assert capsys.readouterr().out.count("tokens in a ring of 2: a decaying bias takes") == len(ring.QUICK.lengths)
