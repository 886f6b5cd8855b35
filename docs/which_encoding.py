"""The page that says which encoding to use, by fixed rules from the stored full studies: no more than intervals allow.

`make table` writes docs/which_encoding.md with it.
"""

import textwrap
from dataclasses import dataclass
from pathlib import Path

from results import stored_results

from lengthwise.evaluate.statistics import interval_words
from lengthwise.evaluate.table import markdown

STUDIES = {"full-stdlib": "Python's library", "full-wikipedia": "Wikipedia"}
"""The stored studies, and their texts in words."""
DATA = {"stdlib": "Python's library", "wikipedia.jsonl": "Wikipedia"}
"""The data on which rates may have been chosen, in words."""
TASKS = "full-tasks"
"""The stored study of tasks."""
STEPS = Path(__file__).parents[1] / "benchmarks/results/model-study.jsonl"
"""How long a step of the full study takes with each encoding."""
WIDTH = 120
HOLDS, BREAKS = 0.03, 0.20
"""Up to which rise at the far length an encoding holds, and from which on it breaks."""
LEARNED = 0.9
"""The share of its answers' tokens from which on a task counts as learned."""


@dataclass(frozen=True)
class Judged:
    """What the texts say about an encoding."""

    name: str
    rows: tuple[dict | None, ...]
    """Its row of each study; None where that has none."""
    place: float
    """Its mean place at the training length, from 0, the best, to 1."""

    @property
    def measured(self) -> list[dict]:
        """Its rows of the studies that have it."""
        return [row for row in self.rows if row is not None]

    @property
    def rises(self) -> list[list[float] | None]:
        """The interval of its rise on each text that has it; None where it was not measured that far."""
        return [row.get("rise", {}).get("interval") for row in self.measured]

    @property
    def verdict(self) -> str:
        """Held or broken only where the intervals of all texts that have it agree."""
        if any(row["under_trained"] for row in self.measured):
            return "not judged: under-trained"
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
        return any(row["rescores"] for row in self.measured)

    @property
    def is_level(self) -> bool:
        """Whether no text tells it apart from the best at the training length, of its own sort.

        One that leaves the scores as they are is compared with the best of those alone.
        """
        sort = "best" if self.rescores else "best_unchanged"
        gaps = [row[f"above_{sort}"] for row in self.measured if not row[f"is_{sort}"]]
        return all(gap is not None and gap["interval"][0] <= 0 for gap in gaps)


def judge(studies: dict[str, dict]) -> list[Judged]:
    """The encodings of all studies, best first, by their mean place: nats of two tokenizers are not added."""
    by_study = [{row["encoding"]: row for row in study["rows"]} for study in studies.values()]
    orders = [sorted(rows, key=lambda name, rows=rows: _gap(rows[name])) for rows in by_study]
    judged = []
    for name in dict.fromkeys(name for rows in by_study for name in rows):
        places = [order.index(name) / max(1, len(order) - 1) for order in orders if name in order]
        judged.append(Judged(name, tuple(rows.get(name) for rows in by_study), _mean(places)))
    return sorted(judged, key=lambda one: one.place)


def _gap(row: dict) -> float:
    return row["above_best"]["value"] if row["above_best"] is not None else 0.0


def page(studies: dict[str, dict], tasks: dict, steps: list[dict]) -> str:
    """docs/which_encoding.md; `studies` by their names in docs/results, the study of tasks, and the times of a step."""
    judged = judge(studies)
    first = next(iter(studies.values()))
    length, far = first["train_length"], next(row["rise"]["length"] for row in first["rows"] if "rise" in row)
    texts = [STUDIES[name] for name in studies]
    level = [one for one in judged if one.is_level]
    holding = [one for one in judged if one.verdict == "holds"]
    both = [one for one in holding if one.is_level]
    rule = (
        f"These answers follow fixed rules, from the stored studies on {' and '.join(texts)}: models of 2 million "
        f"parameters, trained at {length} tokens, each encoding with the learning rates chosen for it, with 95 % "
        f"confidence intervals ({_intervals(studies)}). {_rates(studies)}The rise of an encoding is how much its "
        f"perplexity increases from {length} to {far:,} tokens, on the same scored tokens. An encoding *holds* if on "
        f"every text the upper end of the rise's interval is at most {HOLDS:.0%}. It *breaks* if on every text the "
        f"lower end is above {BREAKS:.0%}. It is *level* with the best at the training length if on no text the whole "
        "interval of its difference from the best is above 0: where the interval is wide, a difference up to its upper "
        "end is not excluded. Each interval is at 95 % by itself; of so many some miss by chance. Encodings that leave "
        "the scores as they are are compared with the best of those. `dape`, `dapev2` and `cope` replace the scores, "
        "which takes longer: up to five times attention without a bias, [measured](../README.md#what-we-measured)."
    )
    answers = [
        f"**If you need texts longer than those you train on**: these encodings hold at {far // length} times the "
        f"training length: {_sorted(holding)}. Of these, level with the best at the training length: {_sorted(both)}.",
        f"**If you never need longer texts**: these are level with the best at {length} tokens: {_sorted(level)}.",
        f"**These break at {far:,} tokens** (as a remedy, [stretching](stretching.md) is one for RoPE): "
        f"{_names(judged, 'breaks')}.",
        f"**In between, or not decided**: {_names(judged, 'in between, or not decided')}.",
    ]
    for verdict, words in (
        ("ends at the training length", "**No positions beyond the training length**"),
        (
            "not judged: under-trained",
            "**Not judged: under-trained** (by the studies' rule: more than a quarter above the best at the training "
            "length that leaves the scores as they are)",
        ),
    ):
        if any(one.verdict == verdict for one in judged):
            answers.append(f"{words}: {_names(judged, verdict)}.")
    answers += _missing(studies, judged)
    head = ["encoding", *(f"{text}: nats above best" for text in texts), *(f"{text}: rise" for text in texts), "beyond"]
    reports = ", ".join(f"[{STUDIES[name]}](results/{name}/report.md)" for name in studies)
    stored = {STUDIES[name]: study for name, study in studies.items()} | {"The tasks": tasks}
    origin = (
        f"In brackets the intervals; the rise is at {far:,} tokens, a mean over seeds. Nats are those above the best "
        "encoding that leaves the scores as they are, negative below it, per token of each text's own tokenizer, so "
        "the order is by the mean place on the texts. The reports, with bits per byte, skipped work and every command, "
        f"and memory where it was measured: {reports}. "
        f"{_versions(stored)}This page is written by `make table`."
    )
    limits = (
        "These studies cannot say whether the same is true of larger models and more text (the paper's results with "
        "354 million parameters are in [beside_the_paper.md](beside_the_paper.md))."
    )
    figures = "\n".join(f"![Rises at {far:,} tokens, {STUDIES[name]}](results/{name}/far.png)" for name in studies)
    blocks = [
        "# Which encoding should I use?",
        _filled(rule),
        "\n".join(_filled(f"- {answer}", indent="  ") for answer in answers),
        figures,
        markdown([head, *map(_cells, judged)]),
        _filled(origin),
        *speed_blocks(steps),
        *task_blocks(tasks),
        _filled(limits),
    ]
    return "\n\n".join(blocks) + "\n"


def speed_blocks(steps: list[dict]) -> list[str]:
    """How long a step takes with each encoding, the fastest first."""
    born, rounds = steps[0]["born"], steps[0]["rounds"]
    words = (
        "A training step of these models, forward and backward, as a ratio to one without positional encoding in the "
        f"same round: medians of {rounds} rounds in which all take turns in one process, and quartiles. Longer texts "
        "change the order: [measured to 8,192 tokens](../README.md#what-we-measured). The studies' own runs were "
        "trained beside other work, so that the tokens per second in their reports cannot be compared. Measured by "
        f"`{born['command']}` at commit {born['commit']} on {born['date']}: {born['machine']}."
    )
    rows = [["encoding", "training step", "quartiles"]]
    for step in sorted(steps, key=lambda step: step["ratio"]):
        low, high = step["quartiles"]
        rows.append([step["rival"], f"{step['ratio']:.2f}", f"{low:.2f} to {high:.2f}"])
    return ["## Speed", _filled(words), markdown(rows)]


def task_blocks(study: dict) -> list[str]:
    """Which encodings learn a task, and up to which length they still have it."""
    tokens = {(row["task"], row["encoding"], row["length"]): row.get("tokens", 0.0) for row in study["tasks"]}
    names, encodings, lengths = (list(dict.fromkeys(key[place] for key in tokens)) for place in range(3))
    shortest, *longer = sorted(lengths)

    def able(task: str, length: int) -> list[str]:
        return [one for one in encodings if tokens.get((task, one, length), 0.0) >= LEARNED]

    rows = [["task", f"learned at {shortest}", *(f"still at {length:,}" for length in longer)]]
    for task in (task for task in names if able(task, shortest)):
        kept, cells = able(task, shortest), []
        for length in (shortest, *longer):
            kept = [one for one in kept if one in able(task, length)]
            cells.append(", ".join(kept) or "-")
        rows.append([task, *cells])
    seeds = "one seed" if len(study["seeds"]) == 1 else f"{len(study['seeds'])} seeds"
    unlearned = [task for task in names if not able(task, shortest)]
    words = (
        "Perplexity does not show whether a model uses far text: a model that ignores it can hold too. So models of "
        f"the same size were trained on {len(names)} synthetic tasks whose answer stands further back in the text, all "
        f"in turn, with examples of up to {shortest} characters, and evaluated at up to {max(lengths):,}; {seeds} of "
        f"{_named(encodings)}. A task counts as *learned* if at least {LEARNED:.0%} of its answers' tokens are right, "
        "each predicted after the right ones before it (teacher forcing). With more steps or another seed more "
        "encodings might learn it."
    )
    words += f" No encoding learned {_named(unlearned)}." if unlearned else ""
    whole = {(row["task"], row["encoding"], row["length"]): row.get("share", 0.0) for row in study["tasks"]}
    exact = {task: [whole[task, one, shortest] for one in able(task, shortest)] for task in names}
    ends = {
        task: dict.fromkeys(f"{100 * end:.3g}%" for end in (min(own), max(own))) for task, own in exact.items() if own
    }
    shares = ", ".join(f"{task} {' to '.join(own)}" for task, own in ends.items())
    if shares:
        words += f" Exact match (the whole answer is right) where a task is learned: {shares} at {shortest} characters."
    idle = [one for one in encodings if not any(one in able(task, shortest) for task in names)]
    late = {row["encoding"] for row in study["rows"] if row["under_trained"]}
    if idle:
        words += f" {_named(idle)} learned no task, so this says nothing about how far back they see"
        words += f"; under-trained by the studies' rule: {_named([one for one in idle if one in late])}."
    return [
        "## Synthetic tasks at longer lengths",
        _filled(words),
        markdown(rows),
        f"![Tokens of answers that are right, by task and length](results/{TASKS}/tasks.png)",
        f"All numbers: [the report](results/{TASKS}/report.md).",
    ]


def _filled(text: str, indent: str = "") -> str:
    """Wrapped at spaces alone: an address must stay whole."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _intervals(studies: dict[str, dict]) -> str:
    """What the intervals of each text are over, from the seeds that were measured."""
    counts = {STUDIES[name]: [row["seeds_measured"] for row in study["rows"]] for name, study in studies.items()}
    return "; ".join(f"{text}: {interval_words(seeds)}" for text, seeds in counts.items())


def _rates(studies: dict[str, dict]) -> str:
    """On which text the learning rates were chosen, and which texts nothing was chosen on."""
    chosen = dict.fromkeys(data for study in studies.values() for data in study["rates"]["chosen_on"])
    if not chosen:
        return ""
    tests = [STUDIES[name] for name, study in studies.items() if study["rates"]["is_test"]]
    only = f"nothing was chosen on {_named(tests)}" if tests else "there is no text here that nothing was chosen on"
    return f"The rates were chosen on {_named([DATA.get(data, data) for data in chosen])}; {only}. "


def _missing(studies: dict[str, dict], judged: list[Judged]) -> list[str]:
    """Which encodings a text lacks, so that what is said of them is from the others."""
    answers = []
    for number, name in enumerate(studies):
        if missing := [one.name for one in judged if one.rows[number] is None]:
            words = f"**Not measured on {STUDIES[name]} so far**, so judged without it and no best of it"
            answers.append(f"{words}: {_named(missing)}.")
    return answers


def _versions(studies: dict[str, dict]) -> str:
    others = {title: study.get("of_another_version") for title, study in studies.items()}
    return "".join(
        f"{title}: measured with Lengthwise {version}, which is not this version. "
        for title, version in others.items()
        if version is not None
    )


def _cells(one: Judged) -> list[str]:
    return [one.name, *map(_above_cell, one.rows), *map(_rise_cell, one.rows), one.verdict]


def _above_cell(row: dict | None) -> str:
    if row is None or (row["above_best_unchanged"] is None and not row["is_best_unchanged"]):
        return "-"
    gap = row["above_best_unchanged"]
    return "best" if gap is None else _with_interval(gap["value"], gap["interval"], "+.3f")


def _rise_cell(row: dict | None) -> str:
    ends = None if row is None else row.get("rise", {}).get("interval")
    return "-" if row is None or ends is None else _with_interval(_mean(row["rise"]["seeds"]), ends, "+.1%")


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
    *most, last = [f"`{name}`" if "," in name else name for name in names] or ["no encoding"]
    return f"{', '.join(most)} and {last}" if most else last


def stored_studies() -> dict[str, dict]:
    """The full studies that are stored, by name."""
    return {name: stored for name in STUDIES if (stored := stored_results(name)) is not None}
