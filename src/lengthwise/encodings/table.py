"""The table of encodings: what each says of itself, in the shape of GPT-2 Small."""

from lengthwise.encodings.base import AttentionShape, Encoding
from lengthwise.encodings.registry import ENCODINGS

GPT2_SMALL = AttentionShape(heads=12, width=768, head_dim=64, train_length=1024)
HEADINGS = ("name", "acts by", "kind of bias", "learned per layer", "two-sided", "limit", "paper")


def describe(name: str, cls: type[Encoding]) -> tuple[str, ...]:
    """One row of the table."""
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
    """All encodings as a Markdown table, aligned so that it also reads well on a terminal."""
    rows = [HEADINGS, *(describe(name, cls) for name, cls in ENCODINGS.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
