"""The folder of a fitted model: transformers' own files, with an entry in config.json that nobody can overlook.

Whoever loads such a folder without Lengthwise must not get the model as it was before: transformers would pass over an
entry that it does not know, and over weights that it has no use for. So the model's width, without which no model can
be made, is a sentence in this file, and the number is in the entry. (Not the vocabulary's size: Trainer compares token
numbers with it when it resumes.)
"""

import json
from pathlib import Path
from typing import Any

from lengthwise.files import write_atomic

MARK = "fitted by Lengthwise, load it with lengthwise.load"
ENTRY = "lengthwise"
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
"""What families call the width."""


def width_name(config: object) -> str:
    """What the width is called in the files of a family."""
    aliases = getattr(type(config), "attribute_map", {})
    for name in WIDTHS:
        if hasattr(config, name) and name not in aliases:
            return name
    raise NotImplementedError(
        f"a fitted model is marked in the width of its config, which must be one of {', '.join(WIDTHS)}, got "
        f"{type(config).__name__} with none of them; save the encoding alone: lw.save_adapter(model, folder)"
    )


def mark_config(folder: str | Path, entry: dict[str, Any], width: str) -> None:
    """Write the entry into a folder's config.json, and the mark into the field with the width, unless it is there."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    if config.get(width) == MARK:
        return
    config[ENTRY] = entry | {"width": {"name": width, "value": config.get(width)}}
    config[width] = MARK
    write_atomic(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def marked_config(folder: str | Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The config and the entry of a fitted model's folder; None if it is none."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    entry = config.pop(ENTRY, None)
    if not isinstance(entry, dict) or MARK not in config.values():
        return None
    width = entry.pop("width")
    del config[width["name"]]
    return config | ({} if width["value"] is None else {width["name"]: width["value"]}), entry
