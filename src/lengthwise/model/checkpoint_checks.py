"""What is checked when a checkpoint is loaded: that it is no pickle, and that it fits the model that was asked for."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from lengthwise.model.configuration import LengthwiseConfig, current_format, renamed_weights

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
MUST_AGREE = (
    *("n_head", "n_kv_head", "head_dim", "encoding", "encoding_options", "share_encoding", "layers", "embed"),
    *("scale", "softcap", "qk_norm", "qk_norm_place"),
)
"""What weights mean depends on these, and no shape tells: GPT-2's have the same shapes with any number of heads."""
HEADS = ("lm_head.", "score.")
"""Weights that a checkpoint of the model without its head does not have, unless they are those of the embedding."""


_ADVICE = {
    "gpt2": "For a GPT-2 use lengthwise.model.convert_gpt2.",
    "lengthwise": "A causal model loads as LengthwiseForCausalLM.",
    "lengthwise_encoder": "An encoder loads as LengthwiseForMaskedLM or LengthwiseEncoder.",
}
"""Which class takes checkpoints of another type."""


def checked_checkpoint(name: Any, kwargs: dict[str, Any], config_class: type[PreTrainedConfig]) -> None:
    """An error unless the checkpoint has such a config, of the asked heads and encoding, and is in safetensors.

    Weights that come as a state_dict, without a checkpoint, are the caller's own.
    """
    refuse_pickles(name, requested=kwargs.get("use_safetensors") is False)
    kwargs["use_safetensors"] = True
    if name is None:
        return
    stored, _ = PreTrainedConfig.get_config_dict(name, **_where(kwargs))
    if (renamed := renamed_weights(stored)) is not None:
        kwargs["key_mapping"] = renamed
    if stored.get("model_type") != config_class.model_type:
        raise ValueError(
            f"{name} must be a Lengthwise model of type {config_class.model_type!r}; its config says "
            f"{stored.get('model_type')!r}. {_ADVICE.get(str(stored.get('model_type')), '')}".strip()
        )
    stored = current_format(stored)
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        wanted_fields = config.to_dict()
    elif config is not None:  # a folder, or a name on the hub
        wanted_fields = current_format(PreTrainedConfig.get_config_dict(config, **_where(kwargs))[0])
    else:
        # Fields go by the names of transformers, too.
        wanted_fields = {LengthwiseConfig.attribute_map.get(key, key): value for key, value in kwargs.items()}
    defaults = {field: getattr(LengthwiseConfig, field, None) for field in MUST_AGREE}
    for field in MUST_AGREE:
        has = stored.get(field, defaults[field]) or None
        wanted = wanted_fields.get(field, has) or None
        if has != wanted:
            raise ValueError(
                f"the checkpoint {name} has {field}={has!r}; {field}={wanted!r} was asked for, and its weights would "
                "mean something else. Load it as it is; lengthwise.model.convert_gpt2 gives it another encoding."
            )


def refuse_pickles(name: Any, *, requested: bool = False) -> None:
    """An error if a folder has its weights in pickles, or if they were asked for."""
    folder = Path(str(name))
    if requested or (folder.is_dir() and _has_only_pickles(folder)):
        raise ValueError(
            f"weights must be in safetensors; {name} has them in a pickle, which can run any code when it is opened. "
            "Convert it where you trust it: load it with torch.load(..., weights_only=True), save with safetensors."
        )


def checked_loading(name: Any, info: dict[str, Any]) -> None:
    """An error unless every weight was found and none was left over, but for the head's.

    Shapes that differ are refused by transformers itself, unless ignore_mismatched_sizes asks for them.
    """
    for fault in ("missing_keys", "unexpected_keys"):
        if found := sorted(key for key in map(str, info.get(fault, ())) if not key.startswith(HEADS)):
            raise ValueError(
                f"the weights of {name} must fit the model; there are {fault.replace('_', ' ')}: "
                f"{', '.join(found[:4])}{' ...' * (len(found) > 4)}. The checkpoint is of another model, or broken."
            )


def _has_only_pickles(folder: Path) -> bool:
    names = [path.name for path in folder.iterdir()]
    pickled = [name for name in names if name.endswith(PICKLES) and name != "training_args.bin"]
    return bool(pickled) and not any(name.endswith(".safetensors") for name in names)


def _where(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The part of the arguments that says where a checkpoint is."""
    names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    return {name: kwargs[name] for name in names if name in kwargs}
