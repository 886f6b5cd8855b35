"""Many processes: DDP and FSDP2 on two of them give what one gives, and what some started others can go on with."""

import dataclasses
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import DTensor
from train_kit import assert_close, in_processes, last_state, small_config

from lengthwise import files
from lengthwise.encodings import Encoding
from lengthwise.model import LengthwiseForCausalLM
from lengthwise.runs import Run, RunWriter
from lengthwise.train import loop, train
from lengthwise.train.loop import SummedLoss


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A run of twenty steps in one process, in parts of two sequences."""
    folder = tmp_path_factory.mktemp("processes")
    config = small_config(folder, "one", steps=20, batch_tokens=6 * 33, micro_batch=2)
    assert in_processes(lambda: train(config)) == [0]
    return folder, config


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_give_the_losses_of_one_for_twenty_steps(one, sharded):
    folder, config = one
    two = dataclasses.replace(config, out=str(folder / f"two-{sharded}"), sharded=sharded)
    assert in_processes(lambda: train(two), 2) == [0, 0]
    assert_close(Run(two.out), Run(config.out))


def test_accumulating_gradients_is_one_large_batch(one):
    folder, config = one
    whole = dataclasses.replace(config, out=str(folder / "whole"), micro_batch=5)
    assert in_processes(lambda: train(whole)) == [0]
    assert_close(Run(whole.out), Run(config.out))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((2, True), (1, False)),
        pytest.param((1, False), (2, True), marks=pytest.mark.prove),
        pytest.param((2, False), (1, False), marks=pytest.mark.prove),
    ],
    ids=str,
)
def test_a_run_goes_on_with_another_number_of_processes(one, first, then):
    folder, config = one
    config = dataclasses.replace(config, out=str(folder / f"changing-{first}-{then}"))

    def until_seven():
        log = RunWriter.log
        loop.RunWriter.log = lambda self, line: (log(self, line), line["step"] == 7 and os.kill(os.getpid(), 15))
        with pytest.raises(loop.Stopped):
            train(dataclasses.replace(config, sharded=first[1]))

    assert in_processes(until_seven, first[0]) == [0] * first[0]
    assert Run(config.out).checkpoints[-1].name in ("step-00000007", "step-00000008")
    assert not Run(config.out).is_finished
    resumed = dataclasses.replace(config, sharded=then[1], resume=True)
    assert in_processes(lambda: train(resumed), then[0]) == [0] * then[0]
    assert_close(Run(config.out), Run(one[1].out))


def test_fsdp2_shards_layers_in_bfloat16_and_keeps_encodings_whole_and_float32(tmp_path):
    config = small_config(
        tmp_path, steps=2, batch_tokens=2 * 33, sharded=True, precision="bfloat16", encoding="kerple", warmup=0
    )
    seen = []

    def look():
        forward = SummedLoss.forward

        def watched(self, *arguments):
            for part in self.modules():
                if isinstance(part, Encoding):
                    assert all(p.dtype == torch.float32 and not isinstance(p, DTensor) for p in part.parameters())
            seen.append(self.model.transformer.ln_f.weight.dtype)
            return forward(self, *arguments)

        SummedLoss.forward = watched
        train(config)
        assert set(seen) == {torch.bfloat16}

    assert in_processes(look, 2) == [0, 0]
    weights = LengthwiseForCausalLM.from_pretrained(Run(config.out).final)
    assert {p.dtype for p in weights.parameters()} == {torch.float32}
    assert {t.dtype for t in last_state(Run(config.out)).values()} == {torch.float32}


@pytest.mark.prove
def test_the_same_command_runs_under_torchrun(tmp_path):
    config = small_config(tmp_path, steps=3, warmup=1)
    options = {name: value for name, value in dataclasses.asdict(config).items() if value and name != "version"}
    (tmp_path / "config.yaml").write_text("\n".join(f"{name}: {value!r}" for name, value in options.items()))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, "-m", "lengthwise.cli", "train", "--config", str(tmp_path / "config.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in Run(config.out).metrics] == [1, 2, 3]
    assert done.stderr.count("step 3 of 3") == 1, "one process speaks"


def test_where_one_process_dies_the_other_says_so_and_ends(tmp_path, capfd):
    config = small_config(tmp_path)

    def die():
        log = RunWriter.log
        loop.RunWriter.log = lambda self, line: (log(self, line), line["step"] == 6 and os.kill(os.getpid(), 9))
        train(config)

    assert in_processes(die, 2) == [-signal.SIGKILL, 1]
    said = capfd.readouterr().err
    assert "process 1: ConnectionError: process 1 lost the connection to another process of the run" in said
    assert "start all of them again with --resume" in said


def test_a_folder_that_is_being_written_to_is_refused_by_all_processes(tmp_path, capfd):
    config = small_config(tmp_path)
    with RunWriter(config.out):
        assert in_processes(lambda: train(config), 2) == [1, 1]
    assert capfd.readouterr().err.count("BlockingIOError") == 2


def test_more_processes_than_sequences_are_refused(tmp_path, capfd):
    config = small_config(tmp_path, batch_tokens=33)
    assert in_processes(lambda: train(config), 2) == [1, 1]
    assert "got 1 sequences and 2 processes" in capfd.readouterr().err


def test_shares_of_other_sizes_are_one_batch_under_ddp_and_refused_under_fsdp2(tmp_path, capfd):
    one, two = (small_config(tmp_path, name, micro_batch=2) for name in ("one", "two"))
    assert in_processes(lambda: train(one)) == [0]
    assert in_processes(lambda: train(two), 2) == [0, 0]
    assert_close(Run(two.out), Run(one.out))
    assert in_processes(lambda: train(dataclasses.replace(two, sharded=True, resume=True)), 2) == [1, 1]
    assert "divide the sequences of a batch, got 5 sequences and 2 processes" in capfd.readouterr().err


def test_sharding_without_processes_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"needs several processes, got one; start them with torchrun"):
        train(small_config(tmp_path, sharded=True))


def test_a_folder_that_not_all_processes_share_is_found_before_training_starts(tmp_path, capfd):
    config = dataclasses.replace(small_config(tmp_path), out="runs/first")

    def elsewhere():
        folder = tmp_path / f"disk of {os.environ['RANK']}"
        folder.mkdir()
        os.chdir(folder)
        files.DISK_SECONDS = 0.0
        train(config)

    assert in_processes(elsewhere, 2) == [1, 1]
    said = capfd.readouterr().err
    assert said.count("--out must be on a disk that all machines share, got runs/first, where processes 1 on ") == 2
    assert not Run.is_run(tmp_path / "disk of 0/runs/first")
