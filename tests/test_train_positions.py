"""Training at drawn positions, and from the weights of another run: recipes that are not encodings."""

import numpy as np
import pytest
import torch
from train_kit import numbers, small_config

from lengthwise.model import LengthwiseForCausalLM
from lengthwise.train import TrainConfig, train
from lengthwise.train.positions import PositionRule
from lengthwise.train.setup import dry_run


def test_random_positions_rise_without_repeats_and_reach_the_whole_range():
    rule = PositionRule.parse("random:1000", 16)
    drawn = rule.draw(0, 400, 16, seed=3)
    assert drawn.shape == (400, 16)
    assert (drawn.diff(dim=1) > 0).all()
    assert drawn.min() >= 0
    assert drawn.max() < 1000
    # Every position as likely as every other: half of the 6,400 in each half, within five standard deviations.
    halves = np.histogram(drawn, bins=2, range=(0, 1000))[0]
    assert abs(int(halves[0]) - 3200) < 5 * (6400 * 0.25) ** 0.5


def test_pose_skips_once_and_stays_below_its_factor():
    rule = PositionRule.parse("pose:4", 16)
    drawn = rule.draw(0, 400, 16, seed=3)
    steps = drawn.diff(dim=1)
    assert (drawn[:, 0] == 0).all()
    assert ((steps != 1).sum(1) <= 1).all()
    assert (steps >= 1).all()
    assert 48 <= drawn.max() < 64


def test_positions_hang_on_the_seed_and_the_sequence_alone():
    rule = PositionRule.parse("random:99", 8)
    whole = rule.draw(10, 6, 8, seed=5)
    assert torch.equal(torch.cat([rule.draw(10, 2, 8, seed=5), rule.draw(12, 4, 8, seed=5)]), whole)
    assert not torch.equal(rule.draw(10, 6, 8, seed=6), whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "random"}, "positions must be random:LIMIT or pose:FACTOR"),
        ({"positions": "random:16"}, "at least as many as the length, 128, got 16"),
        ({"positions": "pose:1"}, "must be 2 or more, got 1"),
        ({"positions": "pose:2", "separate_documents": True}, "leave one of them out"),
        ({"positions": "pose:2", "encoding": "learned"}, "needs 256 positions, but the encoding 'learned' has 128"),
    ],
)
def test_positions_that_cannot_be_are_refused_before_anything_is_trained(options, message):
    with pytest.raises(ValueError, match=message):
        dry_run(TrainConfig(tokenizer="bytes", **options))


def test_a_run_at_drawn_positions_is_another_and_resumes_as_itself(tmp_path):
    plain = train(small_config(tmp_path, "plain", encoding="rope"))
    drawn = train(small_config(tmp_path, "drawn", encoding="rope", positions="random:500"))
    assert [line["loss"] for line in drawn.metrics] != [line["loss"] for line in plain.metrics]
    assert numbers(train(small_config(tmp_path, "again", encoding="rope", positions="random:500"))) == numbers(drawn)


def test_rope_is_dropped_and_training_goes_on_from_its_weights(tmp_path):
    first = train(small_config(tmp_path, "first", encoding="rope", steps=20, learning_rate=0.01))
    options = {"encoding": "none", "steps": 4, "warmup": 1, "start_from": str(first.final)}
    options |= {"learning_rate": 1e-9, "final_learning_rate": 1e-9}
    second = train(small_config(tmp_path, "second", **options))
    before, after = (LengthwiseForCausalLM.from_pretrained(run.final) for run in (first, second))
    assert after.config.encoding == "none"
    for name, weight in before.named_parameters():
        torch.testing.assert_close(dict(after.named_parameters())[name], weight, rtol=0, atol=1e-6)
    assert second.metrics[0]["loss"] < first.metrics[0]["loss"] - 1
    with pytest.raises(ValueError, match=r"must have transformer.wte.weight of .* got"):
        train(small_config(tmp_path, "third", **options, sizes={"n_layer": 2, "n_head": 12, "n_embd": 96}))
