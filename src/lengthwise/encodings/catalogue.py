"""The catalogue of encodings: what each says of itself, in the shape of GPT-2 Small.

Everything is read from the classes and their files: a new encoding appears in it by being registered.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import get_type_hints

from lengthwise.bias import DenseBias, FunctionBias
from lengthwise.encodings.base import HOOKS, AttentionShape, Encoding
from lengthwise.encodings.composition import Composition
from lengthwise.encodings.registry import ENCODINGS, find
from lengthwise.rescore import ScoreFunction
from lengthwise.token_layout import Band

GPT2_SMALL = AttentionShape(heads=12, width=768, head_dim=64, train_length=1024)
HEADINGS = ("name", "acts by", "kind of bias", "learned per layer", "two-sided", "limit", "paper")
SHORT = ("name", "what it does", "learned per layer", "paper")

GROUPS: dict[str, Callable[[type[Encoding]], bool]] = {
    "Added to the scores, by distance alone": lambda cls: cls.hook() == "bias" and cls.context_free,
    "Added to the scores, from the tokens": lambda cls: cls.overrides("bias") and not cls.overrides("rescore"),
    "Turning queries and keys": lambda cls: cls.hook() == "rotate",
    "Replacing the scores": lambda cls: cls.hook() == "rescore",
    "Scaling the scores, or taking weight from them": lambda cls: cls.hook() in ("logit_scale", "sink"),
    "Added to the tokens": lambda cls: cls.hook() == "embed",
    "Nothing": lambda cls: cls.hook() is None,
}
"""An encoding is in the first group whose rule it meets."""

FORMS = {"alike": "left and right alike", "apart": "left and right differ"}
"""What two-sided forms do, by `sides`."""
CAUSAL_ONLY = "no, causal attention only"

SPECIAL_CASES = {
    "alibi": ("kerple-power", "with the power 1 and fixed slopes"),
    "cable-nw": ("cable", "with the factor 1 for every query"),
    "dape": ("dapev2", "with a network that sees one key at a time"),
    "axial-rope": ("mixed-rope", "with each pair turned along one axis"),
    "hope": ("rope", "with its slow pairs left as they are"),
    "rope": ("grape-m", "with the planes and frequencies fixed"),
}
"""What an encoding is a special case of, and which."""


def describe(name: str, cls: type[Encoding]) -> tuple[str, ...]:
    """One row of the whole table."""
    encoding = cls(GPT2_SMALL)
    return (
        name,
        cls.hook() or "nothing",
        encoding.kind.__name__ if encoding.kind else "none",
        f"{encoding.learned_parameters:,}",
        "yes" if cls.two_sided else "no",
        f"{encoding.limit:,}" if encoding.limit else "none",
        cls.paper,
    )


def table() -> str:
    """All encodings as one Markdown table."""
    return _aligned([HEADINGS, *(describe(name, cls) for name, cls in ENCODINGS.items())])


def group_of(cls: type[Encoding]) -> str:
    """The heading under which an encoding stands; those of its parts for a composition."""
    groups = [next(group for group, belongs in GROUPS.items() if belongs(member)) for member in _members(cls)]
    return "; ".join(dict.fromkeys(groups))


def grouped() -> str:
    """All encodings in a few words each, a table a group."""
    blocks = []
    for group in GROUPS:
        rows = [_short(name, cls) for name, cls in ENCODINGS.items() if group_of(cls) == group]
        if rows:
            blocks.append(f"**{group}**\n\n" + _aligned([SHORT, *rows]))
    return "\n\n".join(blocks)


def overview() -> str:
    """The names of all encodings, a row a group."""
    rows = [("what it does", "encodings")]
    for group in GROUPS:
        names = [name for name, cls in ENCODINGS.items() if group_of(cls) == group]
        rows += [(group, ", ".join(f"`{name}`" for name in names))] if names else []
    return "\n".join(["| " + " | ".join(row) + " |" for row in (rows[0], ("---", "---"), *rows[1:])])


def page(name: str) -> str:
    """Everything about one encoding: its formula, options, hooks, cost, and where it comes from."""
    cls = find(name)
    encoding = cls(GPT2_SMALL)
    facts = [
        ("group", group_of(cls)),
        ("hooks", ", ".join(hook for hook in ("state", *HOOKS) if cls.overrides(hook)) or "none"),
        ("bias", encoding.kind.__name__ if encoding.kind else "none"),
        ("cost", _cost(cls)),
        ("learned", f"{encoding.learned_parameters:,} numbers a layer in the shape of GPT-2 Small"),
        ("two-sided", two_sided_form(name)),
        ("window", _window(cls)),
        ("limit", f"{encoding.limit:,} tokens, the training length" if encoding.limit else "none"),
        ("paper", cls.paper),
    ]
    if name in SPECIAL_CASES:
        facts.append(("a case of", " ".join(SPECIAL_CASES[name])))
    generals = [f"{special}, {words}" for special, (general, words) in SPECIAL_CASES.items() if general == name]
    if generals:
        facts.append(("has as a case", "; ".join(generals)))
    width = max(len(label) for label, _ in facts)
    return "\n".join(
        [
            f"{name}: {_first_sentence(cls)}",
            "",
            inspect.cleandoc(sys.modules[cls.__module__].__doc__ or ""),
            "",
            *(f"{label.ljust(width)}  {text}" for label, text in facts),
            f"{'options'.ljust(width)}  {_options(cls) or 'none'}",
        ]
    )


def two_sided_form(name: str) -> str:
    """What an encoding is without causality, in a few words; and with the option `sides`, if it has that."""
    cls = find(name)
    if not cls.two_sided:
        return CAUSAL_ONLY
    default = f"yes, {_sides(cls)}"
    if "sides" not in cls.options():
        return default
    other = "apart" if inspect.signature(cls.__init__).parameters["sides"].default == "alike" else "alike"
    return f"{default}; with sides={other!r} {FORMS[other]}"


def two_sided_table() -> str:
    """All encodings by what their two-sided form does, a row each way."""
    forms: dict[str, list[str]] = {}
    for name, cls in ENCODINGS.items():
        forms.setdefault(_sides(cls) if cls.two_sided else CAUSAL_ONLY, []).append(f"`{name}`")
    either = [f"`{name}`" for name, cls in ENCODINGS.items() if "sides" in cls.options()]
    forms["either, by the option `sides`; above by its default"] = either
    rows = [("two-sided", "encodings"), ("---", "---"), *((form, ", ".join(names)) for form, names in forms.items())]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _sides(cls: type[Encoding]) -> str:
    return FORMS["alike" if cls(replace(GPT2_SMALL, causal=False)).symmetric else "apart"]


def _options(cls: type[Encoding]) -> str:
    """Each with its default; those of a composition by part."""
    if issubclass(cls, Composition):
        return "; ".join(f"{name}: {_options(find(name)) or 'none'}" for name in cls.options())
    signature = inspect.signature(cls.__init__).parameters
    return ", ".join(f"{option} = {signature[option].default!r}" for option in cls.options())


def _members(cls: type[Encoding]) -> tuple[type[Encoding], ...]:
    """What a composition is made of, or the one encoding."""
    return cls.members if issubclass(cls, Composition) else (cls,)


def _window(cls: type[Encoding]) -> str:
    """Which windows it is defined for."""
    if cls.takes_window(Band(0, 1)):
        return "any"
    if cls.takes_window(1):
        return "a number of tokens, no chunks or bands"
    return "none: it is not defined where a query sees the nearest keys only"


def _cost(cls: type[Encoding]) -> str:
    """Which road attention takes with it: the slowest of its members'."""
    members = _members(cls)
    rescores = [get_type_hints(member.rescore)["return"] for member in members if member.overrides("rescore")]
    kinds = [member.kind for member in members if member.kind is not None]
    if rescores:
        described = ScoreFunction not in rescores
        return "scores rescored " + ("in the CPU kernel, tile by tile" if described else "block of rows by block")
    if FunctionBias in kinds or DenseBias in kinds:
        return "a function of the pair, tile by tile; linear memory"
    if kinds:
        return "described: in the CPU kernel, linear memory"
    turning = any(member.overrides("rotate") for member in members)
    return "attention without a bias" + (", and turning queries and keys before it" if turning else "")


def _short(name: str, cls: type[Encoding]) -> tuple[str, ...]:
    return name, _first_sentence(cls), f"{cls(GPT2_SMALL).learned_parameters:,}", cls.paper


def _first_sentence(cls: type[Encoding]) -> str:
    if len(_members(cls)) > 1:
        return " ".join(_first_sentence(member) for member in _members(cls))
    return inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".") + "."


def _aligned(rows: list[tuple[str, ...]]) -> str:
    """A Markdown table, aligned so that it also reads well on a terminal."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
