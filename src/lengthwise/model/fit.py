"""Encodings in models that exist: `fit` puts one into a model of transformers, in place, and `unfit` takes it out.

    lw.fit(llama, "cable")                      its own RoPE is replaced
    lw.fit(llama, "cable", keep=True)           ... or stays: "rope+cable", with the angles of its config
    lw.fit(llama, "own")                        what its config says, computed by us: the same logits
    lw.fit(gemma, "own,own,kerple:512")         a schedule, repeated over the layers
    lw.fit(gpt2, "alibi", freeze=True)          all but the encoding is frozen

A fitted model is the same object with the same weights. Each attention module gets a child, `lengthwise`, which holds
its encoding: optimizers, checkpoints and PEFT (modules_to_save=["lengthwise"]) see its parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lengthwise.encodings import Encoding
from lengthwise.encodings.registry import build, find
from lengthwise.encodings.rope import Rope
from lengthwise.errors import OptionError, check_choice, check_flag, describe
from lengthwise.model.attention import Output
from lengthwise.model.encoded import key_copies
from lengthwise.model.families import classes_that_take_runs
from lengthwise.model.families.base import position_table
from lengthwise.model.families.layer_call import LayerCall, Placed, check_no_dropout
from lengthwise.model.families.layers import AttentionLayer, attention_layers
from lengthwise.model.families.swap import Swap, Waves, current_layout, swap_attention, swap_of
from lengthwise.model.fit_files import mark_config, width_name
from lengthwise.model.schedule import LayerSpec, parse_layer, parse_layers, split_embedding
from lengthwise.token_layout import TokenLayout, Window

CHILD = "lengthwise"
"""The name of the modules that hold encodings."""

OWN = "own"
"""Stands for what the model's config says."""

Dropout = Literal["refuse", "leave out"]


class FittedEncoding(nn.Module):
    """The encoding of one attention layer, or the one that acts as tokens enter."""

    def __init__(
        self, encoding: Encoding, *, window: Window | None = None, spread: int = 1, by_module: str | None = None
    ) -> None:
        super().__init__()
        self.encoding, self.window, self.spread, self.by_module = encoding, window, spread, by_module
        self.leaves_out_dropout = False


@dataclass(eq=False)
class Fit:
    """What was put into a model, and how to take it out. A copy of the model has a copy of this."""

    model: PreTrainedModel
    entry: dict[str, Any]
    """The arguments of `fit`, as plain values."""
    layers: list[AttentionLayer]
    """All layers of the model."""
    learning: list[tuple[nn.Parameter, bool]] = field(default_factory=list)
    """The model's own parameters, and whether they were learning."""
    swap: Swap | None = None
    table: nn.Module | None = None
    """The model's own table of positions, where it was replaced."""
    entrance: Any = None
    """The hook before the first block."""

    @property
    def label(self) -> str:
        """The encodings in short."""
        return ",".join(parse_layer(spec).label for spec in self.entry["encoding"])

    @property
    def encodings(self) -> dict[int, Encoding]:
        """By number of the layer, as the modules have them now: PEFT trains copies in their places."""
        held = {layer.number: getattr(layer.module, CHILD, None) for layer in self.layers}
        return {number: module.encoding for number, module in held.items() if module is not None}

    @property
    def embedding(self) -> Encoding | None:
        """What acts as tokens enter."""
        held = None if self.swap is None else getattr(self.swap.owner, CHILD, None)
        return None if held is None else held.encoding

    def install(
        self,
        encodings: Mapping[int, FittedEncoding],
        embedding: FittedEncoding | None,
        *,
        table_stays: bool,
        freeze: bool,
    ) -> None:
        """Change the model: encodings by number of the layer, and what acts as tokens enter."""
        model, table = self.model, position_table(self.model)
        self.learning = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        runs, described = dict.fromkeys(encodings, run_encoding), classes_that_take_runs(model)
        self.swap = swap_attention(model, runs, angles=rope_angles, described=described)
        owner: Any = self.swap.owner
        owner._lengthwise_fit = self
        for inner in _models_around(model, owner):
            inner.__dict__["save_pretrained"] = partial(self.save_pretrained, inner)
        if freeze:
            model.requires_grad_(False)
        for number, held in encodings.items():
            self.layers[number].module.add_module(CHILD, held)
        self.choose_dropout(self.entry["attention_dropout"])
        if embedding is not None:
            owner.add_module(CHILD, embedding)
        if table is not None and not table_stays:
            # Without a gradient, or several processes would wait for it.
            self.table = table.requires_grad_(False)
            table.forward = _TablePlace(owner, table.embedding_dim).forward  # type: ignore[method-assign]
        elif embedding is not None:
            block = model.get_submodule(_block_of(model, self.layers[0].name))
            self.entrance = block.register_forward_pre_hook(_BlockEntry(owner).before, with_kwargs=True)

    def choose_dropout(self, choice: Dropout) -> None:
        """What becomes of attention dropout in training, as `fit` takes it."""
        self.entry["attention_dropout"] = choice
        for layer in self.layers:
            if (held := getattr(layer.module, CHILD, None)) is not None:
                held.leaves_out_dropout = choice == "leave out"

    def save_pretrained(
        self,
        model: PreTrainedModel,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """As in transformers, with an entry by which `lw.load` puts the encoding back and which nobody can miss."""
        if push_to_hub:
            raise NotImplementedError(
                "save_pretrained of a fitted model writes a folder alone, got push_to_hub=True; call "
                "model.push_to_hub(name)"
            )
        width = width_name(model.config)
        type(model).save_pretrained(model, save_directory, is_main_process, state_dict, push_to_hub, *args, **kwargs)
        if is_main_process and (Path(save_directory) / "config.json").is_file():
            mark_config(save_directory, self.entry, width)

    def undo(self) -> None:
        """Leave the model as it was."""
        for parameter, learned in self.learning:
            parameter.requires_grad_(learned)
        if self.entrance is not None:
            self.entrance.remove()
        if self.table is not None:
            del self.table.forward
        if self.swap is None:
            return
        owner = self.swap.owner
        for module in (owner, *(layer.module for layer in self.layers)):
            module._modules.pop(CHILD, None)
        for inner in _models_around(self.model, owner):
            inner.__dict__.pop("save_pretrained", None)
        del owner._lengthwise_fit
        self.swap.undo()


def fit(
    model: PreTrainedModel,
    encoding: str | Sequence[Any],
    *,
    layers: Sequence[int] | None = None,
    keep: bool = False,
    freeze: bool = False,
    attention_dropout: Dropout = "refuse",
    **options: object,
) -> PreTrainedModel:
    """Put an encoding into a model of transformers, in place, and return the model.

    encoding   a name, a composition, "own" for what the config says, or a schedule: a list of layers, or in short
               "rope:512,none", repeated over the depth
    layers     which layers get it, by number; all if not given
    keep       the model's own positions stay, composed with it; they are replaced otherwise
    freeze     whether all other parameters stop learning
    attention_dropout   a model that trains with it is refused; "leave out" trains without it
    options    the encoding's own; of a composition by part

    A fit that fails leaves the model untouched.
    """
    check_flag("keep", keep)
    check_flag("freeze", freeze)
    check_choice("attention_dropout", attention_dropout, ("refuse", "leave out"))
    _check_model(model)
    listed = _listed(encoding, options)
    entry = {
        "encoding": [spec.stored() for spec in listed],
        "layers": None if layers is None else list(layers),
        "keep": keep,
        "attention_dropout": attention_dropout,
    }
    every = attention_layers(model)
    chosen = _chosen(layers, len(every))
    embedding, specs = _resolved(model, every, chosen, listed, keep=keep)
    encodings = {number: _fitted(every[number], spec) for number, spec in zip(chosen, specs, strict=True)}
    entering = None if embedding is None else _fitted_embedding(model, every[0], embedding)
    new = Fit(model, entry, every)
    stays = keep or any(OWN in spec.encoding.split("+") for spec in listed)
    try:
        new.install(encodings, entering, table_stays=stays, freeze=freeze)
    except BaseException:
        new.undo()
        raise
    return model


def unfit(model: nn.Module) -> Any:
    """Take out what `fit` put in: the model is the one it was, bit for bit."""
    current = fit_of(model)
    if current is None:
        raise ValueError(f"expected a fitted model, got {type(model).__name__} without a fit")
    current.undo()
    return model


def fit_of(model: nn.Module) -> Fit | None:
    """What `fit` put into a model; None if nothing."""
    modules: Any = model.modules()
    return next((module._lengthwise_fit for module in modules if hasattr(module, "_lengthwise_fit")), None)


def _models_around(model: PreTrainedModel, owner: nn.Module) -> list[PreTrainedModel]:
    """The models of transformers in a model that have the one with the attention layers in them, or are it."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return [module for module in models if any(part is owner for part in module.modules())]


def run_encoding(call: LayerCall) -> Output:
    """A layer's attention with the encoding that it was fitted with."""
    held: Any = getattr(call.module, CHILD)
    if not held.leaves_out_dropout:
        check_no_dropout(call.module, call.dropout, "fit with attention_dropout='leave out'")
    return call.run(held.encoding, window=held.window, spread=held.spread)


def rope_angles(module: Any, placed: Placed, own: Waves) -> Waves | None:
    """The angles of a layer's `rope`, where the module itself can turn by them: once a pass for all layers alike."""
    held: Any = getattr(module, CHILD)
    cos, _ = own
    # In half precision a module would round its angles, which `rope` does not.
    if held.by_module is None or cos.dtype not in (torch.float32, torch.float64):
        return None
    angles: Waves | None = placed.once(
        (held.by_module, cos.shape), lambda: _waves_like(cos, held.encoding, placed.layout.query)
    )
    return angles


def _waves_like(cos: Tensor, rope: Rope, positions: Tensor) -> Waves | None:
    """Cosine and sine of a rope, laid out as a module's own; None if that is in another manner."""
    new = tuple(x[:, 0].to(cos.dtype) for x in rope.waves(positions, positions))
    pairs = new[0].shape[-1]
    if cos.shape[-1] == 2 * pairs:
        return torch.cat([new[0], new[0]], -1), torch.cat([new[1], new[1]], -1)
    return (new[0], new[1]) if cos.shape[-1] == pairs else None


def _check_model(model: object) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"expected a model of transformers, got {describe(model)}")
    if type(model).__module__.startswith("lengthwise."):
        raise TypeError(f"{name} has encodings by its config; lw.fit is for models of transformers")
    if type(model).__module__.startswith("transformers_modules"):
        raise NotImplementedError(f"{name} is code out of a checkpoint, of which nothing is known here")
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise NotImplementedError(f"{name} is quantised; fit the model that it was made from")
    if fit_of(model) is not None:
        raise ValueError(f"{name} is fitted or accelerated already; take that out first: lw.unfit(model)")
    if swap_of(model) is not None:
        raise ValueError(f"{name} is stretched; take that out first: lw.unstretch(model)")


def _listed(encoding: object, options: Mapping[str, object]) -> list[LayerSpec]:
    """The schedule as it was given, one layer at least."""
    short = isinstance(encoding, str) and not set(encoding) & set(",:")
    if not isinstance(encoding, str | list | tuple):
        raise TypeError(f"encoding must be a name or a list of layers, got {describe(encoding)}")
    if not short:
        if options:
            raise OptionError(f"options of a schedule stand in its layers, got {next(iter(options))!r}")
        return parse_layers(encoding)
    return [LayerSpec(str(encoding), dict(options))]


def _chosen(layers: Sequence[int] | None, depth: int) -> list[int]:
    if layers is None:
        return list(range(depth))
    chosen = []
    for number in layers:
        if not isinstance(number, int) or isinstance(number, bool) or not -depth <= number < depth:
            raise ValueError(f"layers must be numbers from {-depth} to {depth - 1}, got {describe(number)}")
        chosen.append(number % depth)
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"layers must name each layer once, and one at least, got {list(layers)}")
    return sorted(chosen)


def _resolved(
    model: PreTrainedModel,
    every: Sequence[AttentionLayer],
    chosen: Sequence[int],
    listed: Sequence[LayerSpec],
    *,
    keep: bool,
) -> tuple[LayerSpec | None, list[LayerSpec]]:
    """What acts as tokens enter, and what every chosen layer has, with its own encoding by name."""
    if len(chosen) % len(listed):
        raise OptionError(
            f"a schedule must cover the layers: {len(chosen)} of them are no multiple of the {len(listed)} listed"
        )
    specs = [
        _with_own(every[number], spec, keep=keep)
        for number, spec in zip(chosen, islice(cycle(listed), len(chosen)), strict=True)
    ]
    embedding, rest = split_embedding(specs, None)
    if every[0].adds_bias and len(chosen) < len(every):
        raise OptionError(
            f"{type(every[0].module).__name__} adds a bias of its own in every layer: fit all layers, got "
            f"{len(chosen)} of {len(every)}"
        )
    has_own = [OWN in spec.encoding.split("+") for spec in listed]
    if position_table(model) is not None:
        if any(has_own) and not all(has_own):
            raise OptionError("the model's own positions act as tokens enter, so all layers have 'own', or none")
        if len(chosen) < len(every) and not keep and not all(has_own):
            raise OptionError("the model's own positions act as tokens enter: fit all layers, or pass keep=True")
        if embedding is not None and (keep or any(has_own)):
            raise OptionError(f"the model has a table of positions already, and cannot have {embedding.encoding!r} too")
    if embedding is not None and len(chosen) < len(every):
        raise OptionError(f"{embedding.encoding!r} acts as tokens enter, so it must be in all layers")
    for number, spec in zip(chosen, rest, strict=True):
        _check_layer(every[number], spec)
    return embedding, rest


def _with_own(layer: AttentionLayer, spec: LayerSpec, *, keep: bool) -> LayerSpec:
    """A layer's encoding with "own" replaced by the name and the options of what it has."""
    parts = spec.parts()
    names = [name for name, _ in parts]
    if keep and OWN not in names:
        parts = [(OWN, {}), *parts]
    elif OWN not in names:
        return spec
    own = [] if layer.encoding == "none" else [(layer.encoding, dict(layer.options or {}))]
    if dict(parts)[OWN]:
        raise OptionError("'own' is what the model's config says and takes no options")
    every = [part for name, given in parts for part in (own if name == OWN else [(name, given)]) if part[0] != "none"]
    return spec.with_parts(every)


def _check_layer(layer: AttentionLayer, spec: LayerSpec) -> None:
    kind = find(spec.encoding)
    window = layer.window if spec.window is None else spec.window
    if window is not None and not kind.takes_window(window):
        raise OptionError(f"{spec.encoding!r} cannot have a window, and layer {layer.number} has one: {window}")
    if layer.window is not None and spec.window is not None:
        shorter = isinstance(layer.window, int) and isinstance(spec.window, int) and spec.window <= layer.window
        if not shorter:
            raise OptionError(
                f"layer {layer.number} sees {layer.window} tokens, and its cache has no others, got a window of "
                f"{spec.window}"
            )
    usual = abs(layer.scale - layer.shape.head_dim**-0.5) < 1e-9
    if kind.replaces_content and (layer.softcap is not None or not usual):
        raise OptionError(
            f"{spec.encoding!r} scores queries and keys by itself and can have neither a scale nor a softcap, got "
            f"scale={layer.scale} and softcap={layer.softcap} in layer {layer.number}"
        )


def _fitted(layer: AttentionLayer, spec: LayerSpec) -> FittedEncoding:
    """The encoding of a layer, where the layer is."""
    encoding = _built(spec, layer, layer.shape.width)
    place = next(layer.module.parameters())
    spread = key_copies(encoding, kv_heads=layer.kv_heads)
    by_module = repr((encoding.scaling, encoding.resonance)) if _module_can_turn(layer, encoding) else None
    held = FittedEncoding(encoding, window=spec.window, spread=spread, by_module=by_module)
    return held.to(place.device)


def _module_can_turn(layer: AttentionLayer, encoding: Encoding) -> TypeGuard[Rope]:
    """Whether a layer's module turns by the angles of an encoding as that would: the same channels, paired alike."""
    if type(encoding) is not Rope or encoding.layout != "half" or encoding.rotates_late:
        return False
    if layer.options is None or "layout" in layer.options:
        return False
    own = build("rope", layer.shape, layer.options)
    # Cosines as wide as all pairs of a head are also those of half of its channels, twice.
    return isinstance(own, Rope) and own.scaling.rope_base.dim == encoding.scaling.rope_base.dim


def _built(spec: LayerSpec, layer: AttentionLayer, width: int) -> Encoding:
    encoding = build(spec.encoding, replace(layer.shape, width=width), spec.options)
    encoding = encoding.double() if next(layer.module.parameters()).dtype == torch.float64 else encoding.float()
    length = layer.shape.train_length
    if encoding.limit is not None and encoding.limit < length:
        raise ValueError(
            f"{spec.encoding!r} has {encoding.limit} positions, and the model is for {length}; give it more, or lower "
            "max_position_embeddings in the model's config"
        )
    return encoding


def _fitted_embedding(model: PreTrainedModel, layer: AttentionLayer, spec: LayerSpec) -> FittedEncoding:
    """What acts as tokens enter, as wide as the table whose place it takes."""
    table = position_table(model)
    width = layer.shape.width if table is None else table.embedding_dim
    place = next(layer.module.parameters())
    return FittedEncoding(_built(spec, layer, width)).to(place.device)


def _block_of(model: nn.Module, name: str) -> str:
    """The path of the block that an attention module belongs to: an entry of a list of modules."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:depth])), nn.ModuleList):
            return ".".join(parts[: depth + 1])
    raise NotImplementedError(f"{type(model).__name__} does not keep its layers in a list")


class _TablePlace:
    """What a model's table of positions gives in its stead: zeros, or what a fitted encoding adds to zeros."""

    def __init__(self, owner: Any, width: int) -> None:
        self.owner, self.width = owner, width

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """For the tokens of the pass that is under way."""
        places = current_layout()
        assert places is not None, "a table is read inside a forward pass"
        rows, count = places.query.shape
        zeros = torch.zeros(rows, count, self.width, dtype=self.owner.dtype, device=places.query.device)
        held = getattr(self.owner, CHILD, None)
        return zeros if held is None else held.encoding.embed(zeros, places)


class _BlockEntry:
    """What a fitted encoding adds to the tokens before the first block, in models without a table."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def before(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The tokens are the first argument of every block."""
        places: TokenLayout = next(x for x in (*args, *kwargs.values()) if isinstance(x, Placed)).layout
        encoding = getattr(self.owner, CHILD).encoding
        if args:
            return (encoding.embed(args[0], places), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": encoding.embed(kwargs["hidden_states"], places)}
