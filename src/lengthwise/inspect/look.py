"""Position maps of any model: one forward pass, watched, and every layer reduced as it goes by."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Literal, get_args

from jaxtyping import Int
from torch import Tensor, nn

from lengthwise.errors import check_choice, check_int, check_tensor, describe
from lengthwise.inspect.families import bloom, falcon, interface, mpt, ours
from lengthwise.inspect.families.route import Route
from lengthwise.inspect.proof import watched
from lengthwise.inspect.record import Record
from lengthwise.inspect.reduce import Shown, Wish, layer_maps
from lengthwise.views import PositionMaps
from lengthwise.views.maps import WHATS, LayerMap, What

ROUTES = (ours, bloom, mpt, falcon, interface)
"""Asked in turn: a family of its own before the interface that most follow."""

PIXELS = 2**22
"""How many tiles are kept of all heads of all layers, where the caller does not say."""

Layers = int | Sequence[int] | Literal["all"]
Ids = Int[Tensor, "*batch position"]


def position_maps(
    model: nn.Module,
    input_ids: Ids,
    layer: Layers = -1,
    what: What = "bias",
    *,
    part: str | None = None,
    shown: Shown = "mean",
    resolution: int | None = None,
    attention_mask: Tensor | None = None,
    decoder_input_ids: Ids | None = None,
    tokens: Sequence[str] | None = None,
) -> PositionMaps:
    """The positional part of every head of one layer, several, or "all".

    model       one of ours, or any of transformers that is supported; it is left as it was
    input_ids   (batch, position); with two sequences or more `context_dependence` is measured
    what        "bias" what is added to the scores, "content" the scores without it, "scores", "weights" after the
                softmax, "profile" the scores by distance alone
    part        "decoder", "encoder" or "cross" where there are several; the first that the model has
    shown       keep the "mean" map over all sequences, or that of the "first"
    resolution  how many tiles along a side are kept of a map without structure; by default as many as a picture needs
    """
    found = position_views(
        model,
        input_ids,
        layer,
        [what],
        part=part,
        shown=shown,
        resolution=resolution,
        attention_mask=attention_mask,
        decoder_input_ids=decoder_input_ids,
        tokens=tokens,
    )
    return found[what]


def position_views(
    model: nn.Module,
    input_ids: Ids,
    layer: Layers = -1,
    whats: Collection[What] | None = None,
    *,
    part: str | None = None,
    shown: Shown = "mean",
    resolution: int | None = None,
    attention_mask: Tensor | None = None,
    decoder_input_ids: Ids | None = None,
    tokens: Sequence[str] | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> dict[What, PositionMaps]:
    """Several maps from one forward pass, by name; with no `whats` all that the model has. Else as `position_maps`.

    `on_record` is called with each layer's record once the layer is summarised: to count layers, to store single
    numbers (`Cells.add`), or to stop by an exception.
    """
    for what in WHATS if whats is None else whats:
        check_choice("what", what, WHATS, "See position_maps.")
    check_choice("shown", shown, get_args(Shown), "One sequence, or all of them.")
    if resolution is not None:
        check_int("resolution", resolution, "It counts tiles along a side.")
    model = getattr(model, "_orig_mod", model)
    route = route_into(model)
    part = _checked_part(part, route)
    layers = _checked_layers(layer, route.depths[part])
    ids = _checked_ids(input_ids, "input_ids", route.limit)
    inputs = _inputs(model, ids, attention_mask, decoder_input_ids, route)

    found: dict[What, list[LayerMap]] = {}
    name = type(model).__name__

    def see(record: Record, _: str) -> None:
        record.prove(name)
        side = resolution or _side(record.shape[1] * len(layers))
        asked = [what for what in WHATS if (record.adds or what != "bias") and (whats is None or what in whats)]
        if whats is not None and "bias" in whats and not record.adds:
            raise ValueError(no_bias(name, route.encoding, part))
        for what, one in layer_maps(record, asked, Wish(shown, side)).items():
            found.setdefault(what, []).append(one)
        if on_record is not None:
            on_record(record)

    watched(model, route, inputs, see, lambda layer, of: of == part and layer in layers)
    _check_seen(found, layers, name, part)
    order = {layer: place for place, layer in enumerate(layers)}
    return {
        what: PositionMaps(
            model=getattr(model.config, "name_or_path", "") or name,
            encoding=route.encoding,
            what=what,
            maps=tuple(sorted(maps, key=lambda one: order[one.layer])),
            part=part,
            sequences=ids.shape[0],
            shown="first" if ids.shape[0] == 1 else shown,
            tokens=None if tokens is None else tuple(tokens),
        )
        for what, maps in found.items()
    }


def position_records(model: nn.Module, input_ids: Ids, *, part: str | None = None) -> list[Record]:
    """What every layer was given, from which single numbers of any head can be asked for: see `Cells`."""
    model = getattr(model, "_orig_mod", model)
    route = route_into(model)
    part = _checked_part(part, route)
    inputs = _inputs(model, _checked_ids(input_ids, "input_ids", route.limit), None, None, route)
    found: list[Record] = []
    watched(model, route, inputs, lambda record, _: found.append(record), lambda _, of: of == part)
    return found


def route_into(model: nn.Module) -> Route:
    """The way into a model, or an error that names its family and what would be needed."""
    for family in ROUTES:
        route = family.route(model)
        if route is not None:
            return route
    raise NotImplementedError(
        f"position maps need a model of Lengthwise, or one of transformers that follows its attention interface; "
        f"{type(model).__name__} does neither. It needs a route in lengthwise.inspect.families, of the kind that "
        "families/bloom.py is: what its attention is given, and what it adds."
    )


def no_bias(name: str, encoding: str, part: str) -> str:
    """Why there is no bias to see."""
    where = "its cross attention" if part == "cross" else f"it has {encoding!r}"
    return (
        f"a bias must be added to be seen; {name} adds none ({where}). "
        "Ask for what='scores', what it computes, or what='profile', its scores by distance."
    )


def _checked_part(part: str | None, route: Route) -> str:
    if part is None:
        return next(iter(route.depths))
    if part not in route.depths:
        has = ", ".join(map(repr, route.depths)) if len(route.depths) > 1 else "only one kind of attention"
        raise ValueError(f"part must be one that the model has, {has}; {part!r} came. Leave it out.")
    return part


def _checked_layers(layer: Layers, depth: int) -> list[int]:
    """Layers counted from 0, in the order asked."""
    if isinstance(layer, str):
        check_choice("layer", layer, ("all",), "Else give numbers.")
        return list(range(depth))
    asked = [layer] if isinstance(layer, int) else list(layer)
    for one in asked:
        if not isinstance(one, int) or isinstance(one, bool) or not -depth <= one < depth:
            named = f" (Layer {one + 1})" if isinstance(one, int) and one >= 0 else ""
            raise ValueError(
                f"layer must be a whole number from {-depth} to {depth - 1}, since there are {depth}; {describe(one)} "
                f"came{named}. Indices count from 0, or from -1 backwards; pictures and --layer count from 1."
            )
    if not asked:
        raise ValueError("layer must name one layer at least; none came. Give a number or 'all'.")
    return list(dict.fromkeys(one % depth for one in asked))


def _checked_ids(ids: Ids, name: str, limit: int | None) -> Int[Tensor, "batch position"]:
    if isinstance(ids, Tensor) and ids.ndim == 1:
        ids = ids[None]
    check_tensor(name, ids, ("batch", "position"), "integer", "Use a tokenizer with return_tensors='pt'.")
    if 0 in ids.shape:
        raise ValueError(f"{name} must hold a token at least; its shape is {tuple(ids.shape)}. Give a text.")
    if limit is not None and ids.shape[1] > limit:
        raise ValueError(
            f"the model takes {limit} tokens at most, since its positions end there; {ids.shape[1]} came. "
            f"Cut them: {name}[:, :{limit}]."
        )
    return ids


def _inputs(
    model: nn.Module, ids: Tensor, attention_mask: Tensor | None, decoder_input_ids: Ids | None, route: Route
) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    inputs = {"input_ids": ids.to(device)}
    if attention_mask is not None:
        check_tensor("attention_mask", attention_mask, ids.shape, "integer", "1 for tokens, 0 for padding.")
        inputs["attention_mask"] = attention_mask.to(device)
    if "decoder" in route.depths:
        # Without a text for the decoder it reads the encoder's, one token behind as in training.
        start = getattr(model.config, "decoder_start_token_id", None) or 0
        behind = nn.functional.pad(ids, (1, -1), value=start)
        given = behind if decoder_input_ids is None else decoder_input_ids
        inputs["decoder_input_ids"] = _checked_ids(given, "decoder_input_ids", route.limit).to(device)
    elif decoder_input_ids is not None:
        raise ValueError(
            f"decoder_input_ids are for models with an encoder and a decoder; they came with {type(model).__name__}. "
            "Leave them out."
        )
    return inputs


def _side(heads: int) -> int:
    """A power of two, so that tiles of layers asked for together have one size."""
    return min(1024, 2 ** int(math.log2(math.sqrt(PIXELS / heads))))


def _check_seen(found: dict[What, list[LayerMap]], layers: list[int], name: str, part: str) -> None:
    seen = {one.layer for maps in found.values() for one in maps}
    missing = [layer for layer in layers if layer not in seen]
    if missing:
        where = f"the {part}'s attention" if part else "attention"
        raise NotImplementedError(
            f"every layer asked for must have {where} that can be seen; in {name} none was in layer "
            f"{', '.join(map(str, missing))}. Ask for other layers; a family with attention of its own needs a route "
            "in lengthwise.inspect.families."
        )
