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
from transformers import PreTrainedModel

from lengthwise.inspect.families.route import Route, See, Wanted
from lengthwise.inspect.record import Record

PROVEN = 64
"""How many tokens a model is run on with and without what stands in its path."""

PARTIAL = ("sliding_window", "attention_window", "attention_chunk_size", "local_attention", "local_radius")
"""What configurations call that a query sees a part of the past only."""


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
        if route.in_path:
            given = _proof(model, inputs)
            alone = _run(model, given)
            with route.watch(model, lambda *_: None, wanted):
                beside = _run(model, given)
            if not torch.equal(alone.nan_to_num(), beside.nan_to_num()):
                raise AssertionError(
                    f"looking must not change what a model computes; the output of {type(model).__name__} differs by "
                    f"{(alone - beside).abs().max():.1e}. Its attention is not a pure function of what it is given: "
                    "take out what is random, or run on one thread."
                )
        with route.watch(model, see_only, wanted):
            _run(model, inputs)


def _proof(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a model is run on with and without the probe: the first tokens, or all where these would prove less.

    The way through a model does not depend on how many tokens there are, but for masks: padding, and what lets a query
    see a part of the past only, which the first tokens do not fill.
    """
    assert isinstance(model, PreTrainedModel), "only transformers chooses attention by name"
    said = model.config.get_text_config().to_dict()
    whole = "attention_mask" in inputs or any(said.get(name) for name in PARTIAL)
    return inputs if whole else {name: ids[:, :PROVEN] for name, ids in inputs.items()}


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
