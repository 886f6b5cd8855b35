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
FLEX_CALLS, FLEX_PROVEN = 2, 12

JUDGED = ("native", "row_block", "sdpa", "reference")
"""FlexAttention compiles anew at every shape and has calls of its own below."""

FLOORS = {"native": 0, "row_block": 0, "sdpa": 60, "flex": 0, "reference": CALLS}
"""How many of the first 300 calls each backend must take, so that none is right by refusing.

A little below what each takes today. sdpa has no log-sum-exp and so neither sinks nor half of all calls.
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
    taken = Counter(name for seed in range(CALLS) for name in BACKENDS if accepts(random_call(seed), name))
    assert all(taken[name] >= floor for name, floor in FLOORS.items()), taken


def flex_seeds(count: int) -> list[int]:
    """The first calls that FlexAttention takes, out of many."""
    seeds = (seed for seed in range(CALLS) if accepts(random_call(seed), "flex"))
    return [seed for seed, _ in zip(seeds, range(count), strict=False)]


def test_flex_is_right_in_a_few_calls():
    for seed in flex_seeds(FLEX_CALLS):
        judge(random_call(seed), "flex")


@pytest.mark.prove
def test_flex_is_right_in_more_calls():
    for seed in flex_seeds(FLEX_PROVEN):
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


def answers() -> Iterator[tuple[RandomCall, Tensors]]:
    for seed in range(80):
        answer = run_backend(call := random_call(seed), "reference")
        assert answer is not None
        yield call, answer


def sees(call: RandomCall, answer: Tensors, name: str, wrong: Tensor) -> bool:
    return any(fault.startswith(name) for fault in faults(call, answer | {name: wrong}))


@pytest.mark.parametrize("share", [1e-3, -1e-3])
def test_the_judge_sees_one_wrong_row(share):
    """One row off by a thousandth of its size is seen, but for a few gradients that cancel nearly to nothing."""
    seen = []
    for call, answer in answers():
        for name, value in answer.items():
            if value.dtype in (torch.float32, torch.float64) and value.where(value.isfinite(), 0).any():
                rows = value.reshape(-1, value.shape[-1]) if value.ndim > 1 else value[None]
                changed = rows.clone()
                changed[int(rows.where(rows.isfinite(), 0).norm(dim=-1).argmax())] *= 1 + share
                seen.append(sees(call, answer, name, changed.view_as(value)))
    assert len(seen) > 150
    assert sum(seen) > 0.97 * len(seen)


def test_the_judge_sees_a_gradient_that_does_not_flow():
    seen = []
    for call, answer in answers():
        for name, value in answer.items():
            if name.startswith("gradient") and float(call.exact[name].norm()) > 0:
                seen.append(sees(call, answer, name, torch.zeros_like(value)))
    assert len(seen) > 100
    assert sum(seen) > 0.97 * len(seen)
