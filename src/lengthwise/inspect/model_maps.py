"""Position maps of any model: one forward pass, captured, and every layer summarised as it goes by."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import get_args

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lengthwise.errors import check_choice, check_int, check_tensor
from lengthwise.inspect.capture import Layers, checked_layers, checked_part, run_captured, uncompiled
from lengthwise.inspect.summarize import MapOptions, Shown, bias_map, layer_maps
from lengthwise.model.families import AttentionRecord, Family, family_of
from lengthwise.views import PositionMaps
from lengthwise.views.maps import QUANTITIES, LayerMap, Quantity

PIXELS = 2**22
"""How many tiles are kept of all heads of all layers, where the caller does not say."""

START = "<start>"
"""The name of the token that a decoder reads first."""

Ids = Int[Tensor, "*batch position"]


def position_maps(
    model: nn.Module,
    input_ids: Ids,
    layer: Layers = -1,
    quantity: Quantity = "bias",
    *,
    part: str | None = None,
    shown: Shown = "mean",
    resolution: int | None = None,
    attention_mask: Tensor | None = None,
    decoder_input_ids: Ids | None = None,
    tokens: Sequence[str] | None = None,
) -> PositionMaps:
    """The positional part of every head of one layer, several, or "all".

    model       one of ours, or any of transformers whose family is known; it is left as it was
    input_ids   (batch, position); with two sequences or more `context_dependence` is measured
    quantity    "bias" what is added to the scores, "content" the scores without it, "scores", "weights" after the
                softmax, "profile" the scores by distance alone
    part        "decoder", "encoder" or "cross" where there are several; the first that the model has
    shown       keep the "mean" map over all sequences, or that of the "first"
    resolution  how many tiles along a side are kept of a map without structure; by default as many as a picture needs
    tokens      the names of the first sequence's input_ids; a decoder's maps get those of what it reads
    """
    views = position_views(
        model,
        input_ids,
        layer,
        [quantity],
        part=part,
        shown=shown,
        resolution=resolution,
        attention_mask=attention_mask,
        decoder_input_ids=decoder_input_ids,
        tokens=tokens,
    )
    return views[quantity]


def position_views(
    model: nn.Module,
    input_ids: Ids,
    layer: Layers = -1,
    quantities: Collection[Quantity] | None = None,
    *,
    part: str | None = None,
    shown: Shown = "mean",
    resolution: int | None = None,
    attention_mask: Tensor | None = None,
    decoder_input_ids: Ids | None = None,
    tokens: Sequence[str] | None = None,
    on_record: Callable[[AttentionRecord], None] | None = None,
) -> dict[Quantity, PositionMaps]:
    """Several maps from one forward pass, by name; without `quantities` all that there are. Else as `position_maps`.

    `on_record` is called with each layer's record once the layer is summarised: to count layers, to store single
    numbers (`LazyScores.add`), or to stop by an exception.
    """
    for quantity in QUANTITIES if quantities is None else quantities:
        check_choice("quantity", quantity, QUANTITIES)
    check_choice("shown", shown, get_args(Shown))
    if resolution is not None:
        check_int("resolution", resolution, "It counts tiles along a side.")
    model = uncompiled(model)
    family, name = family_of(model), type(model).__name__
    part = checked_part(part, family)
    layers = checked_layers(layer, family.depths[part])
    ids = _checked_ids(input_ids, "input_ids", family.max_length)
    inputs = model_inputs(model, ids, attention_mask, decoder_input_ids, family)
    maps: dict[Quantity, list[LayerMap]] = {}

    def summarise(record: AttentionRecord) -> None:
        if quantities is not None and "bias" in quantities and not record.has_bias:
            raise ValueError(_no_bias(name, family.encoding, part))
        side = resolution or _side(record.shape[1] * len(layers))
        wanted = [
            quantity
            for quantity in QUANTITIES
            if (record.has_bias or quantity != "bias") and (quantities is None or quantity in quantities)
        ]
        for quantity, single in layer_maps(record, wanted, MapOptions(shown, side)).items():
            maps.setdefault(quantity, []).append(single)
        if on_record is not None:
            on_record(record)

    known = (
        _known_biases(family, layers, ids.shape[1]) if quantities is not None and set(quantities) == {"bias"} else None
    )
    if known is not None and attention_mask is None and on_record is None:
        maps["bias"] = known
    else:
        run_captured(model, inputs, summarise, layers=layers, part=part)
    _check_complete(maps, layers, name, part)
    order = {number: place for place, number in enumerate(layers)}
    named = None if tokens is None else _names(tokens, part, given=decoder_input_ids is not None)
    return {
        quantity: PositionMaps(
            model=getattr(model.config, "name_or_path", "") or name,
            encoding=family.encoding,
            quantity=quantity,
            maps=tuple(sorted(singles, key=lambda single: order[single.layer])),
            part=part,
            sequences=ids.shape[0],
            shown="first" if ids.shape[0] == 1 else shown,
            tokens=named,
        )
        for quantity, singles in maps.items()
    }


def position_records(model: nn.Module, input_ids: Ids, *, part: str | None = None) -> list[AttentionRecord]:
    """The record of every layer, from which single numbers of any head can be computed: see `LazyScores`."""
    model = uncompiled(model)
    family = family_of(model)
    ids = _checked_ids(input_ids, "input_ids", family.max_length)
    records: list[AttentionRecord] = []
    run_captured(model, model_inputs(model, ids, None, None, family), records.append, part=part)
    return records


def model_inputs(
    model: nn.Module, ids: Tensor, attention_mask: Tensor | None, decoder_input_ids: Ids | None, family: Family
) -> dict[str, Tensor]:
    """The arguments of a forward pass, on the model's device."""
    device = next(model.parameters()).device
    inputs = {"input_ids": ids.to(device)}
    if attention_mask is not None:
        check_tensor("attention_mask", attention_mask, ids.shape, "integer", "1 for tokens, 0 for padding.")
        inputs["attention_mask"] = attention_mask.to(device)
    if "decoder" in family.depths:
        # Without a text for the decoder it reads the encoder's, one token behind as in training.
        start = getattr(model.config, "decoder_start_token_id", None) or 0
        behind = nn.functional.pad(ids, (1, -1), value=start)
        read = behind if decoder_input_ids is None else decoder_input_ids
        inputs["decoder_input_ids"] = _checked_ids(read, "decoder_input_ids", family.max_length).to(device)
    elif decoder_input_ids is not None:
        raise ValueError(
            f"decoder_input_ids are for models with an encoder and a decoder, got them with {type(model).__name__}"
        )
    return inputs


def _names(tokens: Sequence[str], part: str, *, given: bool) -> tuple[str, ...] | None:
    """The tokens of both sides of a map by their names; None where queries are not the keys, or have none."""
    if part not in ("decoder", "cross"):
        return tuple(tokens)
    return None if given or part == "cross" else (START, *tokens[:-1])


def _known_biases(family: Family, layers: list[int], length: int) -> list[LayerMap] | None:
    """The biases of all these layers where they need no forward pass."""
    maps: list[LayerMap] = []
    for layer in layers:
        with torch.inference_mode(False), torch.no_grad():
            bias = family.position_bias(layer, length)
            # One row may be for all heads: how many there are, a forward pass says.
            single = None if bias is None or bias.shape[1] == 1 else bias_map(bias, layer, causal=family.causal)
        if single is None:
            return None
        maps.append(single)
    return maps


def _no_bias(name: str, encoding: str, part: str) -> str:
    where = "its cross attention" if part == "cross" else f"it has {encoding!r}"
    return (
        f"quantity='bias' needs a model that adds one, but {name} adds none ({where}). "
        "Ask for quantity='scores', what it computes, or quantity='profile', its scores by distance."
    )


def _checked_ids(ids: Ids, name: str, max_length: int | None) -> Int[Tensor, "batch position"]:
    if isinstance(ids, Tensor) and ids.ndim == 1:
        ids = ids[None]
    check_tensor(name, ids, ("batch", "position"), "integer", "Use a tokenizer with return_tensors='pt'.")
    if 0 in ids.shape:
        raise ValueError(f"{name} must hold at least one token, got shape {tuple(ids.shape)}")
    if max_length is not None and ids.shape[1] > max_length:
        raise ValueError(
            f"the model takes at most {max_length} tokens, since its positions end there, got {ids.shape[1]}. "
            f"Cut them: {name}[:, :{max_length}]."
        )
    return ids


def _side(heads: int) -> int:
    """A power of two, so that tiles of layers that are shown together have one size."""
    return min(1024, 2 ** int(math.log2(math.sqrt(PIXELS / heads))))


def _check_complete(maps: dict[Quantity, list[LayerMap]], layers: list[int], name: str, part: str) -> None:
    captured = {single.layer for singles in maps.values() for single in singles}
    missing = [layer for layer in layers if layer not in captured]
    if missing:
        where = f"the {part}'s attention" if part else "attention"
        raise NotImplementedError(
            f"{name} has no {where} that can be captured in layer {', '.join(map(str, missing))}. "
            "A family with attention code of its own needs a file in lengthwise/model/families."
        )
