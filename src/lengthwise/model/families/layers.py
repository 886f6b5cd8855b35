"""What the attention layers of a model of transformers are, seen in three passes over a few tokens.

    for layer in attention_layers(model):
        print(layer.number, layer.shape.heads, layer.kv_heads, layer.window, layer.encoding, layer.options)

One pass with the model's own rotation and one without it, on the same inputs of every layer, say what the rotation is:
our `rope` with the options of the config must turn the second queries into the first, or it is not known. The third,
without it and at other positions, says whether a module rotates by itself, where nobody can get at it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lengthwise.bias import at_least_float32
from lengthwise.encodings import AttentionShape
from lengthwise.encodings._rope_scaling import NAMES, SCALINGS
from lengthwise.encodings._rotary import PAIR_LAYOUTS
from lengthwise.encodings.registry import build
from lengthwise.model.attention import Output
from lengthwise.model.families import classes_that_take_runs, family_of
from lengthwise.model.families.layer_call import LayerCall, Run, as_before
from lengthwise.model.families.modules import attention_modules, owner_of
from lengthwise.model.families.swap import swap_attention
from lengthwise.token_layout import TokenLayout, Window

FARTHEST = 4096
"""Rotations are compared up to this position: further out the rounding of an angle would show."""

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""What families call the longest sequence."""

UNSAID = {"bloom": 2048}
"""The trained length of families whose configs do not say it."""


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One self-attention layer of a model."""

    name: str
    """The path of its module: "model.layers.0.self_attn"."""
    module: nn.Module
    number: int
    shape: AttentionShape
    """Heads of the queries, width, channels of a head, the longest sequence of the config, whether it is causal."""
    kv_heads: int
    scale: float
    window: Window | None
    """How far it sees, as `attend` takes it."""
    softcap: float | None
    has_sink: bool
    rotates: bool
    """Whether its queries and keys are rotated."""
    options: Mapping[str, Any] | None
    """Those of `rope` by which our encoding rotates as it does; None where it does not rotate, or in another manner."""
    adds_bias: bool
    """Whether it adds a bias of its own, which a fit replaces and cannot put back in."""

    @property
    def encoding(self) -> str:
        """Our name of its own encoding; an error if there is none."""
        if self.adds_bias:
            raise NotImplementedError(
                f"{type(self.module).__name__} adds a bias of its own, which cannot be put back in (lw.accelerate "
                "describes it); other encodings can, in its place"
            )
        if self.rotates and self.options is None:
            raise NotImplementedError(
                f"{type(self.module).__name__} rotates queries and keys in a manner that 'rope' cannot express, so its "
                "own encoding cannot be put back in; other encodings can, in its place"
            )
        return "rope" if self.rotates else "none"


def attention_layers(model: PreTrainedModel) -> list[AttentionLayer]:
    """The attention layers of a model that functions of ours can get into; an error names what is in the way."""
    described = classes_that_take_runs(model)
    modules = attention_modules(model, described)
    owner_of(model, modules)
    # A module that several layers share is called several times.
    own: defaultdict[int, list[tuple[LayerCall, Output]]] = defaultdict(list)
    flat: defaultdict[int, list[LayerCall]] = defaultdict(list)
    moved: defaultdict[int, list[LayerCall]] = defaultdict(list)

    def as_it_is(call: LayerCall) -> Output:
        before = own[call.number]
        if before and before[-1][0].x is call.x:
            raise NotImplementedError(
                f"{type(call.module).__name__} calls attention more than once for the same tokens, which would be "
                "cached as often"
            )
        before.append((call, as_before(call)))
        return before[-1][1]

    def unrotated(calls: defaultdict[int, list[LayerCall]]) -> Run:
        def run(call: LayerCall) -> Output:
            calls[call.number].append(call)
            return own[call.number][len(calls[call.number]) - 1][1]

        return run

    positions = _positions(model)
    counted = torch.arange(positions.shape[1])[None]
    passes = ((as_it_is, True, positions), (unrotated(flat), False, positions), (unrotated(moved), False, counted))
    every = range(len(modules))
    with evaluating(model), torch.no_grad():
        for run, rotated, places in passes:
            swap = swap_attention(model, dict.fromkeys(every, run), rotated=rotated, described=described)
            try:
                _run_body(model, places)
            except (NotImplementedError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # whatever a model's own code raises there
                kind = type(next(iter(modules.values()))).__name__
                raise NotImplementedError(
                    f"{kind} of {type(model).__name__} does not run with attention of ours in place: "
                    f"{type(error).__name__}: {error}"
                ) from error
            finally:
                swap.undo()
    missing = [name for number, name in enumerate(modules) if number not in flat]
    if missing:
        raise NotImplementedError(
            f"{missing[0]} of {type(model).__name__} does not take part in a forward pass of text"
        )
    for number in flat:
        _check_no_rotation(flat[number][0], moved[number][0])
    biased = bool(described) and family_of(model).undescribed is None
    return [
        _layer(model, name, module, own[number][0][0], flat[number][0], positions, adds_bias=biased)
        for number, (name, module) in enumerate(modules.items())
    ]


def _check_no_rotation(call: LayerCall, other: LayerCall) -> None:
    """An error if a module turns queries or keys by positions that are no angles which it is given."""
    # Where positions are added to what enters, nothing can be told.
    if _same(other.x, call.x) and not (_same(other.q, call.q) and _same(other.k, call.k)):
        raise NotImplementedError(
            f"{type(call.module).__name__} rotates queries and keys by angles that it makes itself, so its rotation "
            "can be neither seen nor replaced"
        )


def train_length(model: PreTrainedModel) -> int:
    """The longest sequence that the config speaks of."""
    config = model.config.get_text_config()
    lengths = [getattr(config, name, None) for name in LENGTHS]
    length = next((length for length in lengths if isinstance(length, int)), UNSAID.get(config.model_type))
    if length is None:
        raise NotImplementedError(f"{type(config).__name__} does not say how long a sequence may be")
    return length


def _positions(model: PreTrainedModel) -> Tensor:
    """A few near positions and a few far ones."""
    last = min(train_length(model), FARTHEST) - 1
    near = [position for position in range(4) if position < last]
    far = [last // 3, last // 2, last - 1, last]
    return torch.tensor([[*near, *(position for position in sorted(set(far)) if position > 3)]])


def _run_body(model: PreTrainedModel, positions: Tensor) -> None:
    config = model.config.get_text_config()
    table: Any = model.get_input_embeddings()
    size: int = table.num_embeddings
    # Not the first ones, which are special.
    tokens = (size // 2 + torch.arange(positions.shape[1])[None]) % size
    given: dict[str, Any] = {"input_ids": tokens.to(model.device)}
    if getattr(config, "rope_parameters", None):
        given["position_ids"] = positions.to(model.device)
    if "use_cache" in signature(model.base_model.forward).parameters:
        given["use_cache"] = False
    model.base_model(**given)


def _layer(
    model: PreTrainedModel,
    name: str,
    module: Any,
    own: LayerCall,
    flat: LayerCall,
    positions: Tensor,
    *,
    adds_bias: bool,
) -> AttentionLayer:
    _, heads, _, head_dim = own.q.shape
    shape = AttentionShape(heads, own.x.shape[-1], head_dim, train_length(model), own.layout.causal)
    rotates = not torch.equal(own.q, flat.q)
    return AttentionLayer(
        name=name,
        module=module,
        number=own.number,
        shape=shape,
        kv_heads=own.k.shape[1],
        scale=head_dim**-0.5 if own.scale is None else float(own.scale),
        window=own.window,
        softcap=own.softcap,
        has_sink=own.sink is not None,
        rotates=rotates,
        options=_rope_options(model, own, flat, shape, positions) if rotates else None,
        adds_bias=adds_bias,
    )


def _rope_options(
    model: PreTrainedModel, own: LayerCall, flat: LayerCall, shape: AttentionShape, positions: Tensor
) -> Mapping[str, Any] | None:
    """The options of `rope` that turn the flat queries and keys of a layer into its own; None if none do."""
    parameters = _rope_parameters(model.config.get_text_config(), own.number)
    if parameters is None:
        return None
    layout = TokenLayout.of(positions.to(own.q.device))
    for pairs in PAIR_LAYOUTS:
        options = parameters | ({} if pairs == "half" else {"layout": pairs})
        try:
            turned = build("rope", shape, options).rotate(flat.q, flat.k, layout)
        except ValueError:
            continue
        if all(_same(x, y) for x, y in zip(turned, (own.q, own.k), strict=True)):
            return options
    return None


def _rope_parameters(config: Any, number: int) -> dict[str, Any] | None:
    """transformers' rope_parameters of one layer as options of `rope`."""
    given = getattr(config, "rope_parameters", None)
    if given and "rope_theta" not in given:
        kinds = getattr(config, "layer_types", None)
        given = given.get(kinds[number]) if kinds else None
    if not given:
        return None
    kind, part = given.get("rope_type", "default"), given.get("partial_rotary_factor", 1.0)
    options: dict[str, Any] = {"base": float(given["rope_theta"])}
    if kind not in SCALINGS:
        return None
    if kind != "proportional" and part != 1.0:
        options["part"] = float(part)
    if kind != "default":
        rule = {field.name for field in fields(SCALINGS[kind])}
        scaling = {name: value for name, value in given.items() if NAMES.get(name, name) in rule and value is not None}
        original = given.get("original_max_position_embeddings")
        if kind == "longrope" and "factor" not in scaling and original:
            scaling["factor"] = config.max_position_embeddings / original
        options["scaling"] = {"type": kind, **scaling}
    return options


def _same(x: Tensor, y: Tensor) -> bool:
    """Equal up to the rounding of angles, of up to FARTHEST radians, and of the model's own dtype."""
    x, y, eps = at_least_float32(x), at_least_float32(y), torch.finfo(y.dtype).eps
    tolerance = max(4 * eps, 4 * FARTHEST * torch.finfo(torch.float32).eps)
    return bool((x - y).abs().max() <= tolerance * y.abs().max())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, and as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
