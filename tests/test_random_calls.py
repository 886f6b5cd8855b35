"""Random calls against a float64 definition: every backend is right or refuses, and none refuses too much."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from random_calls import RandomCall, Tensors, accepts, faults, judge, random_call, run_backend
from torch import Tensor

from lengthwise.attention import BACKENDS

CALLS, CHUNKS = 300, 20
PROVEN, PROVEN_CHUNKS = 20_000, 400
FLEX_CALLS = 8

JUDGED = ("native", "row_block", "sdpa", "reference")
"""FlexAttention compiles every sort of call for the better part of a minute, and has a few of its own below."""

FLOORS = {"native": 190, "row_block": 290, "sdpa": 60, "flex": 8, "reference": CALLS}
"""How many of the first 300 calls each backend must take, so that none is right by refusing.

A little below what each takes: native has no explicit masks and no dense biases or functions outside of decoding, sdpa
no log-sum-exp and so neither sinks nor half of all calls, flex on a CPU no gradients.
"""


def judge_chunk(seeds: range) -> None:
    wrong = []
    for seed in seeds:
        call = random_call(seed)
        for backend in (*JUDGED, "auto"):
            try:
                judge(call, backend)
            except AssertionError as error:
                wrong.append(str(error))
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_backend_is_right_or_refuses(chunk):
    judge_chunk(range(chunk, CALLS, CHUNKS))


@pytest.mark.prove
@pytest.mark.parametrize("chunk", range(PROVEN_CHUNKS))
def test_every_backend_is_right_in_twenty_thousand_calls(chunk):
    judge_chunk(range(CALLS + chunk, CALLS + PROVEN, PROVEN_CHUNKS))


def test_no_backend_refuses_more_than_it_must():
    calls = [random_call(seed) for seed in range(CALLS)]
    taken = Counter(name for call in calls for name in BACKENDS if accepts(call, name))
    assert all(taken[name] >= floor for name, floor in FLOORS.items()), taken


def flex_seeds(count: int) -> list[int]:
    """The first calls that FlexAttention takes, out of many."""
    seeds = (seed for seed in range(CALLS) if accepts(random_call(seed), "flex"))
    return [seed for seed, _ in zip(seeds, range(count), strict=False)]


@pytest.mark.prove
def test_flex_is_right_in_a_few_calls():
    for seed in flex_seeds(FLEX_CALLS):
        judge(random_call(seed), "flex")


def test_a_call_hangs_on_its_seed_alone():
    for seed in range(20):
        first, second = random_call(seed), random_call(seed)
        assert str(first) == str(second)
        for name, leaf in first.leaves.items():
            assert torch.equal(leaf.base.nan_to_num(9), second.leaves[name].base.nan_to_num(9))


def test_a_call_says_in_one_line_how_to_make_it_again():
    for seed in range(20):
        words = str(random_call(seed))
        assert words.startswith(f"random_call({seed}): ")
        assert "\n" not in words


def answers() -> Iterator[tuple[RandomCall, Tensors, str]]:
    """Right answers to random calls, and the name of everything in them that is not 0 in exact arithmetic."""
    for seed in range(40):
        answer = run_backend(call := random_call(seed), "reference")
        assert answer is not None
        for name in answer:
            if float(call.exact[name].where(call.exact[name].isfinite(), 0).norm()) > 1e-9:
                yield call, answer, name


def sees(call: RandomCall, answer: Tensors, name: str, wrong: Tensor) -> bool:
    return any(fault.startswith(name) for fault in faults(call, answer | {name: wrong}))


def test_the_judge_sees_one_wrong_row():
    """One row off by a thousandth of its size is seen, but for a few gradients that cancel nearly to nothing."""
    seen = []
    for call, answer, name in answers():
        value = answer[name]
        if value.dtype in (torch.float32, torch.float64):
            rows = value.reshape(-1, value.shape[-1]) if value.ndim > 1 else value[None]
            changed = rows.clone()
            changed[int(rows.where(rows.isfinite(), 0).norm(dim=-1).argmax())] *= 1.001
            seen.append(sees(call, answer, name, changed.view_as(value)))
    assert len(seen) > 80
    assert sum(seen) > 0.95 * len(seen)


def test_the_judge_sees_a_gradient_that_does_not_flow():
    gradients = [(call, answer, name) for call, answer, name in answers() if name.startswith("gradient")]
    assert len(gradients) > 80
    assert all(sees(call, answer, name, torch.zeros_like(answer[name])) for call, answer, name in gradients)
