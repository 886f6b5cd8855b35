"""The page that says which encoding to use, by fixed rules from the stored full studies: no more than intervals allow.

`make table` writes docs/which_encoding.md with it.
"""

import textwrap
from dataclasses import dataclass

from results import stored_results

STUDIES = {"full-stdlib": "Python's library", "full-wikipedia": "Wikipedia"}
"""The stored studies, and their texts in words."""
WIDTH = 120
HOLDS, BREAKS = 0.03, 0.20
"""Up to which rise at the far length an encoding holds, and from which on it breaks."""


@dataclass(frozen=True)
class Judged:
    """What all texts say about an encoding."""

    name: str
    rows: tuple[dict, ...]
    """Its row of each study."""

    @property
    def rises(self) -> list[list[float] | None]:
        """The interval of its rise on each text; None where it was not measured that far."""
        return [row.get("rise", {}).get("interval") for row in self.rows]

    @property
    def verdict(self) -> str:
        """Held or broken only where the intervals of all texts agree."""
        if any(row["under_trained"] for row in self.rows):
            return "not judged: it learned too little"
        if any(rise is None for rise in self.rises):
            return "ends at the training length"
        if all(rise[1] <= HOLDS for rise in self.rises if rise is not None):
            return "holds"
        if all(rise[0] > BREAKS for rise in self.rises if rise is not None):
            return "breaks"
        return "in between, or not decided"

    @property
    def rescores(self) -> bool:
        """Whether it replaces the scores."""
        return any(row["rescores"] for row in self.rows)

    @property
    def is_level(self) -> bool:
        """Whether no text tells it apart from the best at the training length, of its own sort.

        One that leaves the scores as they are is compared with the best of those alone.
        """
        gaps = [row["above_best" if self.rescores else "above_best_unchanged"] for row in self.rows]
        return all(gap is None or gap["interval"][0] <= 0 for gap in gaps)


def judge(studies: dict[str, dict]) -> list[Judged]:
    """The encodings that every study has, best first."""
    by_study = [{row["encoding"]: row for row in study["rows"]} for study in studies.values()]
    names = [name for name in by_study[0] if all(name in rows for rows in by_study)]
    judged = [Judged(name, tuple(rows[name] for rows in by_study)) for name in names]
    return sorted(judged, key=lambda one: sum((row["above_best"] or {"value": 0.0})["value"] for row in one.rows))


def page(studies: dict[str, dict]) -> str:
    """docs/which_encoding.md; `studies` by their names in docs/results."""
    judged = judge(studies)
    first = next(iter(studies.values()))
    length, far = first["train_length"], next(row["rise"]["length"] for row in first["rows"] if "rise" in row)
    seeds = min(len(study["seeds"]) for study in studies.values())
    over = f"{seeds} seeds, by Student's t" if seeds > 1 else "documents, one seed"
    texts = [STUDIES[name] for name in studies]
    level = [one for one in judged if one.is_level]
    holding = [one for one in judged if one.verdict == "holds"]
    both = [one for one in holding if one.is_level]
    rule = (
        f"By rule, from the stored studies on {' and '.join(texts)}: models of 2 million weights, trained at {length} "
        "tokens, each encoding at the learning rates chosen for it, 95 % intervals over "
        f"{over}. An encoding *holds* if the interval of its rise at {far:,} tokens, on the same tokens, ends at "
        f"{HOLDS:.0%} or below on every text, and *breaks* if it begins above {BREAKS:.0%} on every text. It is "
        "*level* with the best at the training length if no text's interval of their difference lies above 0; one "
        "that leaves the scores as they are is compared with the best of those. `dape`, `dapev2` and `cope` replace "
        "the scores, which takes longer: up to five times attention without a bias, "
        "[measured](../README.md#what-we-measured)."
    )
    answers = [
        f"**Texts longer than those you train on**: to {far // length} times the training length hold "
        f"{_sorted(holding)}. Of these, level with the best at the training length: {_sorted(both)}.",
        f"**Never longer**: level with the best at {length} tokens: {_sorted(level)}.",
        f"**Not without a remedy beyond {length} tokens** ([stretching](stretching.md) is one for RoPE): "
        f"{_names(judged, 'breaks')}.",
        f"**In between, or not decided**: {_names(judged, 'in between, or not decided')}.",
    ]
    for verdict, words in (
        ("ends at the training length", "**No positions beyond the training length**"),
        ("not judged: it learned too little", "**Not judged**, since too little was learned in as many tries"),
    ):
        if any(one.verdict == verdict for one in judged):
            answers.append(f"{words}: {_names(judged, verdict)}.")
    head = ["encoding", *(f"{text}: nats above best" for text in texts), *(f"{text}: rise" for text in texts), "beyond"]
    reports = ", ".join(f"[{STUDIES[name]}](results/{name}/report.md)" for name in studies)
    origin = (
        f"In brackets the intervals; the rise is at {far:,} tokens. The reports, with speed, memory, bits per byte and "
        f"every command: {reports}. This page is written by `make table`."
    )
    limits = (
        "What it cannot say: whether the same holds for larger models and more text (the paper's tables, of 354 "
        "million weights, are in [beside_the_paper.md](beside_the_paper.md)), and what an encoding is worth where the "
        "answer stands far back: a model that ignores far text holds too."
    )
    rows = [head, ["---"] * len(head), *map(_cells, judged)]
    figures = "\n".join(f"![Rises at {far:,} tokens, {STUDIES[name]}](results/{name}/far.png)" for name in studies)
    blocks = [
        "# Which encoding should I use?",
        textwrap.fill(rule, WIDTH),
        "\n".join(textwrap.fill(f"- {answer}", WIDTH, subsequent_indent="  ") for answer in answers),
        figures,
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        textwrap.fill(origin, WIDTH),
        textwrap.fill(limits, WIDTH),
    ]
    return "\n\n".join(blocks) + "\n"


def _cells(one: Judged) -> list[str]:
    above = [row["above_best"] for row in one.rows]
    rises = zip(one.rows, one.rises, strict=True)
    return [
        one.name,
        *("best" if gap is None else _with_interval(gap["value"], gap["interval"], "+.3f") for gap in above),
        *("-" if ends is None else _with_interval(_mean(row["rise"]["seeds"]), ends, "+.1%") for row, ends in rises),
        one.verdict,
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _with_interval(value: float, interval: list[float], form: str) -> str:
    low, high = interval
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def _sorted(judged: list[Judged]) -> str:
    unchanged, others = ([one.name for one in judged if one.rescores == replaced] for replaced in (False, True))
    return f"{_named(unchanged)}; with the scores replaced, {_named(others)}" if others else _named(unchanged)


def _names(judged: list[Judged], verdict: str) -> str:
    return _named([one.name for one in judged if one.verdict == verdict])


def _named(names: list[str]) -> str:
    """Names in a sentence; none is the name of an encoding."""
    *most, last = names or ["no encoding"]
    return f"{', '.join(most)} and {last}" if most else last


def stored_studies() -> dict[str, dict]:
    """The full studies that are stored, by name."""
    return {name: stored for name in STUDIES if (stored := stored_results(name)) is not None}
