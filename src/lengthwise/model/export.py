"""A checkpoint with the code that it needs, in one flat folder, which loads where Lengthwise is not installed.

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

transformers fetches a folder's Python files by their `from .x import` lines and knows no packages. So our files are
copied under flat names, and in each of them the lines that import our own modules are changed, and nothing else:

    from lengthwise.attention.backend import Plan      from .attention_backend import Plan
    from lengthwise.attention import reference         from . import attention_reference as reference
    from jaxtyping import Float                        from .shapes import Float

Nothing is left out but the kernels in C++ and Triton, so an exported model computes what ours does, by the backends in
torch.
"""

import json
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

from transformers import PreTrainedConfig

from lengthwise.encodings import ENCODINGS
from lengthwise.errors import UserError
from lengthwise.model.configuration import LengthwiseConfig, LengthwiseEncoderConfig
from lengthwise.model.encoder import LengthwiseEncoder, LengthwiseForMaskedLM, LengthwiseForSequenceClassification
from lengthwise.model.modeling import LengthwiseForCausalLM, LengthwiseModel, LengthwisePreTrainedModel

PACKAGE = Path(__file__).parents[1]
FILES = (
    *("errors.py", "files.py", "token_layout.py", "visibility.py", "bias/*.py", "rescore.py"),
    *("encodings/**/*.py", "attention/**/*.py"),
    *(f"model/{name}.py" for name in ("attention", "cache", "checkpoint_checks", "configuration", "encoded")),
    *(f"model/{name}.py" for name in ("encoder", "layout", "losses", "modeling", "schedule")),
)
"""What is copied, as patterns; a test holds them to what the model really imports."""

NOT_COPIED = (
    *("encodings/catalogue.py", "attention/info.py", "attention/prove.py"),
    *(f"attention/triton/{name}" for name in ("passes.py", "inputs.py", "masks.py", "bounds.py", "kernels/*")),
)
"""Commands of ours that no model needs, and what needs Triton, as patterns."""

KNOWN = {
    "model.configuration": "configuration_lengthwise",
    "model.modeling": "modeling_lengthwise",
    "model.encoder": "modeling_lengthwise_encoder",
}
"""File names that transformers expects; every other module has its path, joined."""

AUTO_MAPS: dict[type[LengthwisePreTrainedModel], dict[str, type[LengthwisePreTrainedModel]]] = {
    LengthwiseForCausalLM: {"AutoModel": LengthwiseModel, "AutoModelForCausalLM": LengthwiseForCausalLM},
    LengthwiseForMaskedLM: {
        "AutoModel": LengthwiseEncoder,
        "AutoModelForMaskedLM": LengthwiseForMaskedLM,
        "AutoModelForSequenceClassification": LengthwiseForSequenceClassification,
    },
    LengthwiseForSequenceClassification: {
        "AutoModel": LengthwiseEncoder,
        "AutoModelForSequenceClassification": LengthwiseForSequenceClassification,
    },
}
"""Which class of ours each Auto class loads, by the class that is exported."""

SHAPES = '''"""In the place of jaxtyping, which need not be installed: Float[Tensor, "batch position"] is Tensor."""


class Shaped:
    """The type in front of a shape."""

    def __class_getitem__(cls, item):
        """Leave out the shape."""
        return item[0]


Float = Int = Bool = Shaped
'''
FOOTER = "\n# transformers fetches the files that are named in lines such as these.\n"
OWN_IMPORT = re.compile(r"^( *)from lengthwise\.([\w.]+) import (.+)$", re.MULTILINE)
SHAPE_IMPORT = re.compile(r"^from jaxtyping import ", re.MULTILINE)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")


class ExportError(UserError, ValueError):
    """A checkpoint that cannot be exported."""


def export(checkpoint: str | Path, out: str | Path) -> Path:
    """Write a checkpoint, a folder or a name on the hub, to the new folder `out`, with its code."""
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} must be new or empty, got a folder with files")
    exported = class_of(checkpoint)
    model = exported.from_pretrained(checkpoint)
    check_exportable(model.config)
    model.save_pretrained(out)
    for name in TOKENIZER:
        if (Path(checkpoint) / name).is_file():
            shutil.copy(Path(checkpoint) / name, out / name)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(
        json.dumps(config | {"auto_map": auto_map(exported)}, indent=2, sort_keys=True) + "\n"
    )
    for name, text in flat_files().items():
        (out / name).write_text(text)
    return out


def class_of(checkpoint: str | Path) -> type[LengthwisePreTrainedModel]:
    """The class with the head for text that a checkpoint's type of model has."""
    stored, _ = PreTrainedConfig.get_config_dict(checkpoint)
    if stored.get("model_type") != LengthwiseEncoderConfig.model_type:
        return LengthwiseForCausalLM
    classifies = LengthwiseForSequenceClassification.__name__ in (stored.get("architectures") or ())
    return LengthwiseForSequenceClassification if classifies else LengthwiseForMaskedLM


def auto_map(exported: type[LengthwisePreTrainedModel]) -> dict[str, str]:
    """The `auto_map` of config.json: where each Auto class finds its own."""
    classes: dict[str, type] = {"AutoConfig": exported.config_class or LengthwiseConfig, **AUTO_MAPS[exported]}
    homes = {name: cls.__module__.removeprefix("lengthwise.") for name, cls in classes.items()}
    return {name: f"{flat_name(homes[name])}.{cls.__name__}" for name, cls in classes.items()}


def check_exportable(config: LengthwiseConfig) -> None:
    """An error for encodings that were registered from elsewhere, whose files are not among ours."""
    specs = [*config.schedule, *([config.embedding] if config.embedding else [])]
    for name in dict.fromkeys(name for spec in specs for name, _ in spec.parts()):
        module = ENCODINGS[name].__module__
        if not module.startswith("lengthwise.encodings."):
            raise ExportError(f"only encodings of Lengthwise itself can be exported, got {name!r} of {module!r}")


def flat_files() -> dict[str, str]:
    """The text of every exported Python file, by its name."""
    modules = exported_modules()
    texts = {flat_name(module) + ".py": flatten(path.read_text(), modules) for module, path in modules.items()}
    texts["modeling_lengthwise.py"] += FOOTER + "".join(
        f"from .{flat_name(module)} import __name__ as _  # noqa: E402, F401\n" for module in modules
    )
    return texts | {"shapes.py": SHAPES}


def exported_modules() -> dict[str, Path]:
    """The files of FILES by the names of their modules, without "lengthwise."."""
    paths = sorted({path for pattern in FILES for path in PACKAGE.glob(pattern)})
    names = {path: path.relative_to(PACKAGE).as_posix() for path in paths}
    return {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path, name in names.items()
        if not any(fnmatch(name, pattern) for pattern in NOT_COPIED)
    }


def flat_name(module: str) -> str:
    """
    >>> flat_name("attention.row_block.tiles"), flat_name("model.modeling")
    ('attention_row_block_tiles', 'modeling_lengthwise')
    """
    return KNOWN.get(module, module.replace(".", "_"))


def flatten(text: str, modules: dict[str, Path]) -> str:
    """A file's text with its imports of our own modules changed."""

    def changed(line: re.Match[str]) -> str:
        indent, module, names = line.groups()
        parts = names.split(", ")
        if all(f"{module}.{part}" in modules for part in parts):
            aliases = ", ".join(f"{flat_name(f'{module}.{part}')} as {part}" for part in parts)
            return f"{indent}from . import {aliases}"
        return f"{indent}from .{flat_name(module)} import {names}"

    return SHAPE_IMPORT.sub("from .shapes import ", OWN_IMPORT.sub(changed, text))
