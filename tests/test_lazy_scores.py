"""Single numbers of any head: few are alive at a time, and no more of a model's call is kept than they need."""

import gc
import weakref

import pytest
import torch
from model_kit import LENGTH, loud_model, tokens
from torch.utils._python_dispatch import TorchDispatchMode

from lengthwise.inspect import position_views
from lengthwise.inspect.model_maps import position_records
from lengthwise.inspect.scores import PER_PAIR, LazyScores


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that an operation makes."""

    numbers = 0

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        made = operation(*arguments, **(options or {}))
        if isinstance(made, torch.Tensor):
            self.numbers = max(self.numbers, made.numel())
        return made


@pytest.mark.parametrize("case", ["alibi", "cable", "rope-dynamic", "swin", "dapev2-cable"])
def test_a_whole_head_in_blocks_is_that_of_the_views(case, monkeypatch):
    monkeypatch.setattr("lengthwise.inspect.scores.BLOCK", 600, raising=False)
    model, ids = loud_model(case), tokens(1)
    cells, views = LazyScores(position_records(model, ids)), position_views(model, ids, "all", resolution=64)
    for quantity in PER_PAIR:
        if quantity in views:
            values = views[quantity].values
            wanted = values[-1, 1] if values.ndim == 4 else values[1]
            found = cells.whole(quantity, len(views[quantity].maps) - 1, 1)
            torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_no_more_numbers_are_alive_than_the_head_has_that_is_asked_for(monkeypatch):
    monkeypatch.setattr("lengthwise.inspect.scores.BLOCK", 600, raising=False)
    cells = LazyScores(position_records(loud_model("alibi"), tokens(1)))
    with Largest() as largest:
        cells.whole("scores", 1, 2)
    assert largest.numbers <= LENGTH**2


def test_the_call_of_all_sequences_is_let_go():
    records = position_records(loud_model("alibi"), tokens(3))
    calls = [weakref.ref(record.call) for record in records]
    cells = LazyScores(records)
    del records
    gc.collect()
    assert [call() for call in calls] == [None, None]
    assert cells.whole("scores", 1, 2).shape == (LENGTH, LENGTH)
