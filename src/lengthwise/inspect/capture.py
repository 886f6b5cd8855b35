"""Capture what attention layers compute, with proof on every use that capturing does not change it.

    with capture_attention(model, records.append, layers=[0, -1]):
        model(input_ids)

Capturing could change the output in two ways. It could write to what the model still reads: torch counts writes, and
the count must stay. And a function in the model's path could lead it another way, since transformers chooses attention
and mask by its name: so `run_captured` runs the model with and without it, and both outputs must be equal to the bit.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Literal

import torch
from torch import Tensor, nn

from lengthwise.errors import check_choice, describe
from lengthwise.inspect.scores import verify
from lengthwise.model.families import AttentionRecord, Family, family_of
from lengthwise.model.families.base import OnRecord
from lengthwise.model.families.layers import evaluating

Layers = int | Sequence[int] | Literal["all"]


@contextmanager
def capture_attention(
    model: nn.Module, on_record: OnRecord, *, layers: Collection[int] | None = None, part: str | None = None
) -> Iterator[None]:
    """Call `on_record` with every selected attention layer of every forward pass inside the block.

    model       one of ours, or any of transformers whose family is known; it is left as it was
    on_record   gets an AttentionRecord right after the layer's attention; it must not write to its tensors
    layers      indices from 0, or from -1 backwards; all of them if none are given
    part        "decoder", "encoder" or "cross" where there are several; the first that the model has

    Every record is verified: its first and last rows, computed again, must be the layer's own output.
    """
    model = uncompiled(model)
    family = family_of(model)
    part = checked_part(part, family)
    chosen = set(checked_layers("all" if layers is None else list(layers), family.depths[part]))
    name = type(model).__name__

    def checked(record: AttentionRecord) -> None:
        with torch.no_grad():
            verify(record, name)
        before = _write_counts(record)
        on_record(record)
        if _write_counts(record) != before:
            raise AssertionError(
                f"capturing must not change what a model computes, but tensors of layer {record.layer} of {name} were "
                "written to by on_record"
            )

    # Under inference mode torch would not count; leaving it turns gradients on.
    gradients = torch.is_grad_enabled()
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(gradients),
        family.capture(checked, lambda layer, of: of == part and layer in chosen),
    ):
        yield


def run_captured(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    on_record: OnRecord,
    *,
    layers: Collection[int] | None = None,
    part: str | None = None,
) -> None:
    """One forward pass, captured; an error if that changes the model's output."""
    model = uncompiled(model)
    with torch.inference_mode(False), torch.no_grad(), evaluating(model):
        expected = _run(model, inputs) if family_of(model).reroutes else None
        with capture_attention(model, on_record, layers=layers, part=part):
            output = _run(model, inputs)
        if expected is not None and not torch.equal(expected.nan_to_num(), output.nan_to_num()):
            raise AssertionError(
                f"capturing must not change what a model computes, but the output of {type(model).__name__} differs by "
                f"{(expected - output).abs().max():.1e}: its attention is not a pure function of its arguments. "
                "Remove what is random, or run on one thread"
            )


def uncompiled(model: nn.Module) -> nn.Module:
    """The model that torch.compile wrapped."""
    return getattr(model, "_orig_mod", model)


def checked_part(part: str | None, family: Family) -> str:
    """A part that the model has; the first if none is given."""
    if part is None:
        return next(iter(family.depths))
    if part not in family.depths:
        known = (
            ", ".join(map(repr, family.depths)) if len(family.depths) > 1 else "None, there is one kind of attention"
        )
        raise ValueError(f"part must be one that the model has ({known}), got {part!r}")
    return part


def checked_layers(layer: Layers, depth: int) -> list[int]:
    """Layers counted from 0, each once, in the given order."""
    if isinstance(layer, str):
        check_choice("layer", layer, ("all",), "Else give numbers.")
        return list(range(depth))
    numbers = [layer] if isinstance(layer, int) else list(layer)
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or not -depth <= number < depth:
            named = f" (Layer {number + 1})" if isinstance(number, int) and number >= 0 else ""
            raise ValueError(
                f"layer must be an int from {-depth} to {depth - 1}, since there are {depth}, got {describe(number)}"
                f"{named}. Indices count from 0, or from -1 backwards; pictures and --layer count from 1."
            )
    if not numbers:
        raise ValueError("layer must name at least one layer, got none")
    return list(dict.fromkeys(number % depth for number in numbers))


def _write_counts(record: AttentionRecord) -> list[int]:
    """How often each tensor that belongs to the model was written to."""
    first = slice(0, 1)
    tensors = [record.q, record.k, record.v, record.out, record.mask(first, first)]
    if record.bias is not None:
        tensors += record.bias.tensors().values()
    return [x._version for x in tensors]


def _run(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """The model without its head, which would take memory for logits that nobody reads."""
    body: nn.Module = getattr(model, "base_model", model)
    options = {"use_cache": False} if "use_cache" in signature(body.forward).parameters else {}
    return body(**inputs, **options)[0]
