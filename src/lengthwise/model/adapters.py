"""Fitted models in files: a whole model with its entry, or the encoding alone, an adapter for the model it was made in.

lw.fit(llama, "cable").save_pretrained("folder")      lw.load("folder")
lw.save_adapter(llama, "adapter")                     lw.load("adapter", another_llama)
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from lengthwise.errors import UserError
from lengthwise.files import replacing, write_atomic
from lengthwise.model.families.layers import AttentionLayer, attention_layers
from lengthwise.model.fit import CHILD, Fit, fit, fit_of, unfit
from lengthwise.model.fit_files import marked_config

ADAPTER = "lengthwise.json"
WEIGHTS = "lengthwise.safetensors"


class AdapterError(UserError, ValueError):
    """A folder that is no fitted model, or not one for this model."""


def save_adapter(model: PreTrainedModel, folder: str | Path) -> None:
    """Write the encoding of a fitted model alone: its weights, and which model it is for."""
    current = fit_of(model)
    if not isinstance(current, Fit):
        state = "without a fit" if current is None else "that is accelerated, which adds no weights"
        raise ValueError(f"expected a fitted model, got {type(model).__name__} {state}")
    folder = Path(folder)
    weights = {name: tensor.detach().contiguous() for name, tensor in _own_weights(current).items()}
    with replacing(folder / WEIGHTS) as partial:
        save_file(weights, partial)
    stored = {"fit": current.entry, "model": _sizes(model, current.layers)}
    write_atomic(folder / ADAPTER, json.dumps(stored, indent=2, sort_keys=True) + "\n")


def load(folder: str | Path, model: PreTrainedModel | None = None, **options: Any) -> PreTrainedModel:
    """A fitted model from its folder; or `model`, fitted in place with the adapter in the folder.

    options   go to transformers' from_pretrained: dtype, device_map, ...
    """
    folder = Path(folder)
    if model is not None:
        return _load_adapter(folder, model)
    marked = marked_config(folder)
    if marked is None:
        hint = "; an adapter needs its model: lw.load(folder, model)" if (folder / ADAPTER).is_file() else ""
        raise AdapterError(f"expected the folder of a fitted model, got {str(folder)!r}{hint}")
    config, entry = marked
    own = fitted_config(folder)
    kind = getattr(transformers, (getattr(own, "architectures", None) or [""])[0], None)
    if kind is None:
        raise AdapterError(f"{folder} has a model that this transformers does not know: {config.get('architectures')}")
    with _quiet():
        loaded, info = kind.from_pretrained(
            folder, config=own, use_safetensors=True, output_loading_info=True, **options
        )
    weights = _encoding_weights(folder)
    strangers = {key for key in info["unexpected_keys"] if key not in weights}
    if strangers or info["missing_keys"] or info["mismatched_keys"]:
        fault = sorted(map(str, strangers or info["missing_keys"] or info["mismatched_keys"]))[0]
        raise AdapterError(f"the weights of {folder} must be those of {kind.__name__}, got a difference in {fault!r}")
    fit(loaded, **entry)
    own_weights = {name: x for name, x in loaded.state_dict(keep_vars=True).items() if CHILD in name.split(".")}
    _fill(loaded, own_weights, weights, folder)
    return loaded


def fitted_config(folder: str | Path) -> PreTrainedConfig | None:
    """The config of a fitted model's folder, as it was before the mark; None for any other folder."""
    marked = marked_config(folder)
    if marked is None:
        return None
    config, _ = marked
    if config.get("model_type") not in CONFIG_MAPPING:
        raise AdapterError(f"{folder} has a model that this transformers does not know: {config.get('model_type')}")
    own: PreTrainedConfig = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    return own


def _load_adapter(folder: Path, model: PreTrainedModel) -> PreTrainedModel:
    if not (folder / ADAPTER).is_file() or not (folder / WEIGHTS).is_file():
        raise AdapterError(f"expected a folder of lw.save_adapter, with {ADAPTER} and {WEIGHTS}, got {str(folder)!r}")
    stored, weights = json.loads((folder / ADAPTER).read_text()), _read_weights(folder / WEIGHTS)
    if fit_of(model) is None:
        sizes = _sizes(model, attention_layers(model))
        differing = [name for name in sizes if sizes[name] != stored["model"].get(name)]
        if differing:
            name = differing[0]
            raise AdapterError(
                f"the adapter is for a model with {name} {stored['model'].get(name)}, got one with {sizes[name]}"
            )
    fit(model, **stored["fit"])
    current = fit_of(model)
    assert current is not None
    _fill(model, _own_weights(current), weights, folder)
    return model


def _own_weights(current: Fit) -> dict[str, Tensor]:
    """The weights of the encodings that a model has now, by the layer's number."""
    held: dict[str, nn.Module] = {str(number): encoding for number, encoding in current.encodings.items()}
    if current.embedding is not None:
        held["embedding"] = current.embedding
    return {
        f"{place}.encoding.{name}": tensor
        for place, encoding in held.items()
        for name, tensor in encoding.state_dict(keep_vars=True).items()
    }


def _sizes(model: PreTrainedModel, layers: list[AttentionLayer]) -> dict[str, Any]:
    """What an adapter's weights depend on."""
    shape = layers[0].shape
    return {
        "model_type": model.config.get_text_config().model_type,
        "layers": len(layers),
        "heads": shape.heads,
        "key heads": layers[0].kv_heads,
        "head_dim": shape.head_dim,
        "width": shape.width,
        "length": shape.train_length,
    }


def _encoding_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= _read_weights(path, lambda name: CHILD in name.split("."))
    return weights


def _read_weights(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118
    except SafetensorError as error:
        raise AdapterError(f"expected a whole safetensors file, got {str(path)!r}: {error}") from None


def _fill(model: nn.Module, own: Mapping[str, Tensor], weights: Mapping[str, Tensor], folder: Path) -> None:
    """Copy the weights of encodings, or take the fit back with an error unless they are all there and no others."""
    faults = sorted(set(own) ^ set(weights)) or [name for name in own if own[name].shape != weights[name].shape]
    if faults:
        unfit(model)
        raise AdapterError(
            f"the weights of the encoding in {folder} must be those of its entry, but {faults[0]!r} differs"
        )
    for name, tensor in weights.items():
        own[name].data.copy_(tensor)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' report of weights that it has no use for: they are the encoding's, and are checked."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
