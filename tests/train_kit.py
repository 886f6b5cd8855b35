"""What the tests of training share: a run of a second, and processes of their own to kill."""

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import resource_sharer
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from lengthwise.files import cache_folder
from lengthwise.model import LengthwiseForCausalLM
from lengthwise.runs import Run, RunWriter
from lengthwise.study.runs import StudyRun
from lengthwise.train import TrainConfig, train

PATIENCE = 60
"""Seconds after which a process of a test says where it stands, and ends."""
IDLE = 600
"""Seconds after which a process that gets no more work ends by itself, should its test be gone."""
CLEAN = multiprocessing.get_context("forkserver")
# Names that are installed: up to Python 3.12 the server does not look into the folder of the tests.
CLEAN.set_forkserver_preload(["lengthwise.train.loop", "lengthwise.evaluate.run", "pytest", "cloudpickle"])
OUTPUTS = (1, 2)
KERNELS = cache_folder().resolve() / "kernels"
TEXT = "the reader of a long text forgets what stood at its start unless something tells how far it went"


def write_corpus(folder: Path) -> Path:
    """Forty-one short files, the same every time."""
    words = TEXT.split()
    folder.mkdir(exist_ok=True)
    for i in range(41):
        (folder / f"{i:03d}.txt").write_text(" ".join(words[(i * j + j // 5) % len(words)] for j in range(61)) + "\n")
    return folder


def small_config(folder: Path, name: str = "run", **changes: Any) -> TrainConfig:
    """Two layers of 12 heads of 4, eleven steps of five sequences of 33 bytes, three checkpoints."""
    share_kernel(folder / "cache")
    os.environ["LENGTHWISE_DATA"] = str(folder / "cache")
    options: dict[str, Any] = {
        "out": str(folder / name),
        "encoding": "cable",
        "sizes": {"n_layer": 2, "n_head": 12, "n_embd": 48},
        "data": str(write_corpus(folder / "corpus")),
        "tokenizer": "bytes",
        "length": 33,
        "batch_tokens": 5 * 33,
        "micro_batch": 5,
        "steps": 11,
        "optimizer": "adamw",
        "learning_rate": 3e-3,
        "final_learning_rate": 3e-4,
        "warmup": 3,
        "checkpoint_every": 4,
        "evaluate_every": 6,
        "evaluate_tokens": 330,
    }
    return TrainConfig(**(options | changes))


def share_kernel(cache: Path) -> None:
    """A cache of a test's own, but for the compiled kernel, which every process would wait for."""
    cache.mkdir(exist_ok=True)
    if not (cache / "kernels").exists():
        KERNELS.mkdir(parents=True, exist_ok=True)
        (cache / "kernels").symlink_to(KERNELS)


def finish(run: StudyRun) -> None:
    """Make a study's run look finished."""
    with RunWriter(run.config.out) as writer:
        writer.write_config({})
        writer.finish(lambda folder: None, {})


def numbers(run: Run) -> list[dict[str, Any]]:
    """The metrics without the times."""
    return [{name: value for name, value in line.items() if name != "seconds"} for line in run.metrics]


def assert_same_run(found: Run, wanted: Run) -> None:
    """Bit for bit: every number of the metrics, every weight, and all of the last checkpoint."""
    assert numbers(found) == numbers(wanted)
    assert [line["step"] for line in found.metrics] == list(range(1, len(found.metrics) + 1))
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (found.final / name).read_bytes() == (wanted.final / name).read_bytes(), name
    ours, theirs = (last_state(run) for run in (found, wanted))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    states = [{p.name: p.read_bytes() for p in run.checkpoints[-1].glob("random-*.json")} for run in (found, wanted)]
    assert states[0] == states[1]


def assert_close(found: Run, wanted: Run) -> None:
    """The same losses to 1e-4, as the issue asks, and the same weights nearly."""
    for mine, theirs in zip(numbers(found), numbers(wanted), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert mine["gradient"] == pytest.approx(theirs["gradient"], rel=1e-3)
        for length, loss in theirs.get("held_out", {}).items():
            assert mine["held_out"][length] == pytest.approx(loss, abs=1e-3)
    ours, other = (LengthwiseForCausalLM.from_pretrained(run.final).state_dict() for run in (found, wanted))
    assert ours.keys() == other.keys()
    for name, weight in other.items():
        assert torch.allclose(ours[name], weight, atol=2e-3), name


def last_state(run: Run) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint of a run that was not sharded."""
    return {k: v for path in sorted(run.checkpoints[-1].glob("*.safetensors")) for k, v in load_file(path).items()}


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join_environment(rank: int, world: int, port: int) -> None:
    """What torchrun tells a process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def in_processes(work: Callable[[], object], world: int = 1, *, patience: int = PATIENCE) -> list[int]:
    """Do some work in as many processes as asked, as torchrun would start them; their exit codes.

    What a test changed in its own process, but for the environment and the folder, is not so in these.
    """
    port = free_port()
    started = [start_process(_work, rank, world, port, cloudpickle.dumps(work), patience) for rank in range(world)]
    for process in started:
        process.join()
    return [cast(int, process.exitcode) for process in started]


def start_process(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process that is forked from a server with nothing but imports behind it, not from the process of the tests.

    The tests leave threads, which a fork takes halfway. The server's children get this environment, folder and output.
    """
    outputs = [resource_sharer.DupFd(number) for number in OUTPUTS]
    process = CLEAN.Process(target=_moved_in, args=(dict(os.environ), os.getcwd(), outputs, work, arguments))
    process.daemon = True
    process.start()
    return process


def _moved_in(
    environment: dict[str, str], folder: str, outputs: list[Any], work: Callable[..., None], rest: Any
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, output in zip(OUTPUTS, outputs, strict=True):
        os.dup2(output.detach(), number)
    faulthandler.enable()
    torch.set_num_threads(1)
    work(*rest)


def _work(rank: int, world: int, port: int, work: bytes, patience: int) -> None:
    faulthandler.dump_traceback_later(patience, exit=True)
    if world > 1:
        join_environment(rank, world, port)
    code = 0
    try:
        cloudpickle.loads(work)()
    except SystemExit as end:
        code = int(bool(end.code))
    except BaseException as error:
        print(f"process {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = 1
    sys.stdout.flush()
    os._exit(code)


class Processes:
    """Processes of one gloo group that do one piece of work after another: to start them is what takes time.

    Work is a function at the top of a module with plain arguments. Where one process fails, all are ended, and the next
    work is done by new ones.
    """

    def __init__(self) -> None:
        self.started: dict[int, list[tuple[Any, Connection]]] = {}

    def __call__(self, size: int, work: Callable[..., object], *arguments: Any, patience: int = PATIENCE) -> None:
        """Do some work in each of `size` processes; all must end well."""
        every = self.started.get(size) or self._start(size)
        for _, pipe in every:
            pipe.send((work, arguments))
        waiting, until = {pipe: rank for rank, (_, pipe) in enumerate(every)}, time.monotonic() + patience
        fault = ""
        while waiting and not fault:
            ready = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answer = pipe.recv()
                except EOFError:
                    answer = "it ended"
                fault = fault or (answer and f"process {rank} of {size}: {answer}")
            if not ready:
                fault = f"processes {sorted(waiting.values())} of {size} were not done in {patience} s"
        if fault:
            self._end(size)
            raise AssertionError(fault)

    def _start(self, size: int) -> list[tuple[Any, Connection]]:
        port, every = free_port(), []
        for rank in range(size):
            here, there = CLEAN.Pipe()
            every.append((start_process(_work_on, rank, size, port, there), here))
            there.close()
        self.started[size] = every
        return every

    def _end(self, size: int) -> None:
        for process, _ in self.started.pop(size):
            process.kill()
            process.join()

    def close(self) -> None:
        """End all processes."""
        for size in list(self.started):
            self._end(size)


def _work_on(rank: int, size: int, port: int, pipe: Connection) -> None:
    join_environment(rank, size, port)
    dist.init_process_group("gloo")
    while pipe.poll(IDLE):
        work, arguments = pipe.recv()
        try:
            work(*arguments)
            dist.barrier()
            pipe.send("")
        except BaseException:
            pipe.send(traceback.format_exc())


class Killer:
    """Ends this process with SIGKILL at the n-th moment that matters: a line, a write to disk, a rename, a removal."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.count = at, 0

    def watch(self) -> None:
        from lengthwise.runs import RunWriter

        for place, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "rmdir"), (RunWriter, "log")):
            setattr(place, name, self._counted(getattr(place, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return counted


def moments(config: TrainConfig, world: int = 1) -> int:
    """How many moments that matter the first process of a run has; it runs to its end."""
    count = Path(f"{config.out}.moments")

    def counted() -> None:
        killer = Killer()
        killer.watch()
        train(config)
        if os.environ.get("RANK", "0") == "0":
            count.write_text(str(killer.count))

    assert in_processes(counted, world) == [0] * world
    return int(count.read_text())
