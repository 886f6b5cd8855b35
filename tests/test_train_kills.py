"""kill -9 at any moment, a save among them, then --resume: bit for bit the run that was not killed."""

import dataclasses
import os
import random
import signal
import threading
import time

import pytest
from train_kit import Killer, assert_same_run, in_processes, moments, small_config

from lengthwise.runs import Run
from lengthwise.train import train


def assert_survives(folder, name, at, world=1, rank=0, **changes):
    """A run that is killed at the moment `at`, in one process, and resumed, is the run named "whole"."""
    config = small_config(folder, name, **changes)

    def killed():
        if int(os.environ.get("RANK", "0")) == rank:
            Killer(at).watch()
        train(config)

    codes = in_processes(killed, world)
    assert codes[rank] == -signal.SIGKILL
    assert all(codes), "no process goes on without the others"
    assert in_processes(lambda: train(dataclasses.replace(config, resume=True)), world) == [0] * world
    assert_same_run(Run(config.out), Run(folder / "whole"))


def test_a_run_killed_between_steps_and_inside_a_save_goes_on_as_if_nothing_had_happened(tmp_path):
    total = moments(small_config(tmp_path, "whole"))
    rng = random.Random(5)
    for trial, at in enumerate((rng.randrange(2, total // 2), rng.randrange(total // 2, total))):
        assert_survives(tmp_path, f"killed-{trial}", at)


def test_a_run_of_two_processes_killed_inside_a_save_goes_on_as_if_nothing_had_happened(tmp_path):
    total = moments(small_config(tmp_path, "whole"), world=2)
    assert_survives(tmp_path, "killed", total // 2, world=2)


@pytest.mark.prove
def test_twenty_of_twenty_kills_in_one_process_are_survived(tmp_path):
    total = moments(small_config(tmp_path, "whole"))
    places = random.Random(11).sample(range(2, total), 20)
    for trial, at in enumerate(places):
        assert_survives(tmp_path, f"killed-{trial}", at)


@pytest.mark.prove
def test_five_of_five_kills_under_two_process_ddp_are_survived(tmp_path):
    total = moments(small_config(tmp_path, "whole"), world=2)
    for trial, at in enumerate(random.Random(7).sample(range(2, total), 5)):
        assert_survives(tmp_path, f"killed-{trial}", at, world=2)


@pytest.mark.prove
def test_kills_at_random_times_one_after_another_are_survived(tmp_path):
    whole = small_config(tmp_path, "whole")
    assert in_processes(lambda: None) == [0], "what starts processes is not timed"
    began = time.monotonic()
    assert in_processes(lambda: train(whole)) == [0]
    lasted = time.monotonic() - began
    config = small_config(tmp_path, "killed", resume=True)
    rng = random.Random(3)
    kills = 0
    while not (Run.is_run(config.out) and Run(config.out).is_finished):
        # The first is early, so that it comes before the end on a machine that other work has just left, too.
        at = rng.uniform(0, lasted if kills else lasted / 4)

        def killed(at=at):
            threading.Timer(at, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            train(config)

        (code,) = in_processes(killed)
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        assert kills < 60
    assert kills
    assert_same_run(Run(config.out), Run(whole.out))
