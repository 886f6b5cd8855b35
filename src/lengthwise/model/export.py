"""A checkpoint with the code that it needs, in one flat folder, which loads where Lengthwise is not installed.

AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

transformers fetches a folder's Python files by their `from .x import` lines and knows no packages. So the modules that
the model needs are found by their imports and copied with those lines rewritten, the reference and sdpa backends and
the one encoding only; shapes in annotations, which need jaxtyping, become plain tensors.
"""

import ast
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lengthwise.encodings import ENCODINGS
from lengthwise.model.configuration import LengthwiseConfig
from lengthwise.model.modeling import LengthwiseForCausalLM

SHAPED = {"Float", "Int", "Bool"}
FILES = {
    "lengthwise.model.configuration": "configuration_lengthwise",
    "lengthwise.model.modeling": "modeling_lengthwise",
}
"""File names that transformers knows; every other module is called by its path, joined."""

AUTO_MAP = {
    "AutoConfig": "configuration_lengthwise.LengthwiseConfig",
    "AutoModel": "modeling_lengthwise.LengthwiseModel",
    "AutoModelForCausalLM": "modeling_lengthwise.LengthwiseForCausalLM",
}
BACKENDS = ("reference", "sdpa")
PREFERENCE = '''def preference(call: AttentionCall) -> tuple[str, ...]:
    """The order in which "auto" asks the backends."""
    return ("sdpa", "reference")'''
"""The choice among the backends that come along, in place of the one among all."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")


def export(source: str | Path, out: str | Path) -> Path:
    """Write the checkpoint `source`, or the only one under it, to the new folder `out`, with its code."""
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} must be new or empty; it has files. Choose another folder.")
    folder = _checkpoint(source)
    model = LengthwiseForCausalLM.from_pretrained(folder)
    model.save_pretrained(out)
    for name in TOKENIZER:
        if (Path(folder) / name).is_file():
            shutil.copy(Path(folder) / name, out / name)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"auto_map": AUTO_MAP}, indent=2, sort_keys=True) + "\n")
    for name, text in code(model.config).items():
        (out / f"{name}.py").write_text(text)
    return out


def code(config: LengthwiseConfig) -> dict[str, str]:
    """The text of every file that a model with this config needs, by name."""
    options = config.encoding_options or {}
    names = [config.encoding, *([str(options.get("over", "kerple"))] if config.rescores else [])]
    encodings = {ENCODINGS[name].__name__ for name in names if name in ENCODINGS}
    strangers = [name for name in names if not ENCODINGS[name].__module__.startswith("lengthwise.encodings.")]
    if strangers:
        raise ValueError(
            f"only encodings of Lengthwise itself can be exported; {strangers[0]!r} is registered from "
            f"{ENCODINGS[strangers[0]].__module__!r}. Copy its file into the exported folder by hand."
        )
    waiting, found = ["lengthwise.model.modeling"], dict[str, str]()
    while waiting:
        module = waiting.pop()
        if _file(module) not in found:
            found[_file(module)], needed = _flatten(module, {*encodings, *BACKENDS})
            waiting += needed
    return found


def _flatten(module: str, kept: set[str]) -> tuple[str, list[str]]:
    """A module's text for the flat folder, and the modules that it needs."""
    spec = find_spec(module)
    file = Path(str(spec and spec.origin))
    text, is_room = file.read_text(), file.name == "__init__.py"
    edits: list[tuple[ast.AST, str]] = []
    needed: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping":
            edits.append((node, ""))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lengthwise"):
            line, modules = _rewritten(node, is_room, kept)
            edits.append((node, line))
            needed += modules
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in SHAPED:
            edits.append((node, "Tensor"))
        elif is_room and isinstance(node, ast.Dict):
            chosen = [
                f"{ast.unparse(key)}: {value.id}"
                for key, value in zip(node.keys, node.values, strict=True)
                if key is not None and isinstance(value, ast.Name) and value.id in kept
            ]
            edits.append((node, "{" + ", ".join(chosen) + "}"))
        elif is_room and isinstance(node, ast.FunctionDef) and node.name == "preference":
            edits.append((node, PREFERENCE))
        elif isinstance(node, ast.Assign) and ast.unparse(node) == "NAME = 'lengthwise'":
            # Attention functions are known to all of transformers by name, and another copy's would not fit.
            edits.append((node, "NAME = __name__"))
    return _edited(text, edits), needed


def _rewritten(node: ast.ImportFrom, is_room: bool, kept: set[str]) -> tuple[str, list[str]]:
    """An import of ours as one of a sibling, and the modules it stands for; nothing for what is not kept."""
    assert node.module is not None
    names = [alias.name for alias in node.names]
    inner = [name for name in names if find_spec(f"{node.module}.{name}") is not None] if _is_room(node.module) else []
    if inner:
        modules = [f"{node.module}.{name}" for name in inner if name in kept or not is_room]
        lines = ["import sys"]
        for module in modules:
            name = module.rpartition(".")[2]
            lines += [f"from .{_file(module)} import __name__ as {name}", f"{name} = sys.modules[{name}]"]
        return "\n".join(lines), modules
    encodings = {encoding.__name__ for encoding in ENCODINGS.values()}
    if is_room and encodings.intersection(names):
        names = [name for name in names if name in kept]
        if not names:
            return "", []
    return f"from .{_file(node.module)} import {', '.join(names)}", [node.module]


def _is_room(module: str) -> bool:
    spec = find_spec(module)
    return spec is not None and spec.submodule_search_locations is not None


def _file(module: str) -> str:
    return FILES.get(module, module.removeprefix("lengthwise.").replace(".", "_"))


def _edited(text: str, edits: list[tuple[Any, str]]) -> str:
    """The text with nodes replaced, the last one first, so that places before it stay what they are."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()
    spots = [
        (starts[n.lineno - 1] + n.col_offset, starts[n.end_lineno - 1] + n.end_col_offset, new) for n, new in edits
    ]
    for first, stop, new in sorted(spots, reverse=True):
        raw = raw[:first] + new.encode() + raw[stop:]
    return raw.decode()


def _checkpoint(source: str | Path) -> str | Path:
    """The folder itself, or the only checkpoint under it; a name that is no folder is left to the hub."""
    folder = Path(source)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return source
    under = sorted(
        {path.parent for path in folder.rglob("model*.safetensors") if (path.parent / "config.json").is_file()}
    )
    if len(under) != 1:
        came = ", ".join(map(str, under)) or "none"
        raise FileNotFoundError(f"{folder} must be a checkpoint or hold exactly one; there are: {came}. Name one.")
    return under[0]
