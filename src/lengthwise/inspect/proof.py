"""One forward pass, watched, with proof on every use that looking does not change what the model computes.

Looking could change it in two ways. It could write to what the model still reads: torch counts writes, and the count
must stay. And a probe in the model's path could lead it another way, since transformers chooses attention and mask by
the probe's name: so the model runs with and without it, and both outputs must be the same to the last bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature

import torch
from torch import Tensor, nn

from lengthwise.inspect.families.route import Route, See, Wanted
from lengthwise.inspect.record import Record


def watched(model: nn.Module, route: Route, inputs: dict[str, Tensor], see: See, wanted: Wanted) -> None:
    """Run a model once and see the wanted layers; an error if that could change its output."""

    def see_only(record: Record, of: str) -> None:
        before = record.versions
        see(record, of)
        if record.versions != before:
            raise AssertionError(
                f"looking must not change what a model computes; layer {record.layer} of {type(model).__name__} was "
                "written to while it was looked at. This is a fault of lengthwise.inspect."
            )

    # Under inference mode torch would not count.
    with torch.inference_mode(False), torch.no_grad(), _at_rest(model):
        alone = _run(model, inputs) if route.in_path else None
        with route.watch(model, see_only, wanted):
            beside = _run(model, inputs)
        if alone is not None and not torch.equal(alone.nan_to_num(), beside.nan_to_num()):
            raise AssertionError(
                f"looking must not change what a model computes; the output of {type(model).__name__} differs by "
                f"{(alone - beside).abs().max():.1e}. Its attention is not a pure function of what it is given: "
                "take out what is random, or run on one thread."
            )


def _run(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The model without its head, which would take memory for logits that nobody reads."""
    body: nn.Module = getattr(model, "base_model", model)
    options = {"use_cache": False} if "use_cache" in signature(body.forward).parameters else {}
    return body(**inputs, **options)[0]


@contextmanager
def _at_rest(model: nn.Module) -> Iterator[None]:
    """Without dropout, and as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
