"""The report of a study: sections as data, rendered to one HTML file that opens offline, to Markdown and to JSON.

In HTML every string is escaped, pictures are inside the file, and there is no script.
"""

import base64
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lengthwise.evaluate import LengthTable
from lengthwise.evaluate.retrieval_table import RetrievalTable, retrieval_figure
from lengthwise.evaluate.statistics import Interval, interval_words
from lengthwise.evaluate.table import format_value, has_bars, length_figure, markdown, rise_figure
from lengthwise.evaluate.tasks import task_notes
from lengthwise.files import command_line, json_text, write_atomic
from lengthwise.study.config import HYPOTHESIS_KINDS, StudyConfig
from lengthwise.study.results import BEHIND, StudyResults, TaskShare, origin
from lengthwise.study.runs import StudyRun
from lengthwise.views.estimates_plot import Estimate, estimates_figure
from lengthwise.views.heat_map import HeatMap, heat_maps_figure
from lengthwise.views.line_plot import Line, lines_figure
from lengthwise.views.style import in_few_colours, png

STYLE = """
:root{color-scheme:light}body{font:16px/1.55 system-ui,sans-serif;max-width:60rem;margin:3rem auto;padding:0 1.2rem;
color:#1b1f24;background:#fff}h1{font-size:1.9rem;line-height:1.2}h2{margin-top:2.6rem;font-size:1.25rem;
border-bottom:1px solid #d8dee4;padding-bottom:.3rem}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums;
margin:1rem 0 1rem 50%;transform:translateX(-50%);display:block;overflow-x:auto;width:max-content;min-width:100%;
max-width:calc(100vw - 3rem)}td,th{padding:.28rem .6rem;text-align:right;border-bottom:1px solid #eaeef2;
white-space:nowrap}td:first-child,th:first-child{text-align:left}th{border-bottom:2px solid #57606a}
img{max-width:100%;height:auto}
pre{background:#f6f8fa;padding:.9rem;overflow-x:auto;font-size:.8rem;line-height:1.5}small,figcaption{color:#57606a}
figure{margin:1.4rem 0}
"""

Rows = list[list[str]]


@dataclass(frozen=True)
class Picture:
    """A PNG and its caption; one with a name is also a file of its own."""

    content: bytes
    caption: str
    name: str = ""


@dataclass(frozen=True)
class Section:
    """One part of the report; the first row of a table is its heading."""

    title: str
    paragraphs: Sequence[str] = ()
    table: Rows | None = None
    pictures: Sequence[Picture] = ()
    code: str = ""


def write_report(results: StudyResults, out: Path) -> Path:
    """Write HTML, Markdown and JSON, each whole or not at all; the HTML file's path."""
    title, sections = results.config.title, report_sections(results, out)
    content = results.as_json() | {"title": title, "sections": [as_json(section) for section in sections]}
    write_atomic(out / "study.json", json_text(content))
    write_atomic(out / "report.md", as_markdown(title, sections))
    for picture in (picture for section in sections for picture in section.pictures if picture.name):
        write_atomic(out / f"{picture.name}.png", picture.content)
    return write_atomic(out / "report.html", as_html(title, sections))


def as_json(section: Section) -> dict[str, Any]:
    """A section without the pixels of its pictures."""
    return {
        "title": section.title,
        "paragraphs": list(section.paragraphs),
        "table": section.table,
        "pictures": [picture.caption for picture in section.pictures],
        "code": section.code,
    }


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    """The report without pictures; sections that are nothing but pictures are left out."""
    blocks = [f"# {title}"]
    for section in sections:
        parts = [*section.paragraphs]
        parts += [markdown(section.table)] if section.table else []
        parts += [f"```\n{section.code}\n```"] if section.code else []
        blocks += [f"## {section.title}", *parts] if section.table or section.code or not section.pictures else []
    return "\n\n".join(blocks) + "\n"


def as_html(title: str, sections: Sequence[Section]) -> str:
    """The report as one file."""
    body = [f"<h1>{escape(title)}</h1>"]
    for section in sections:
        body += [f"<h2>{escape(section.title)}</h2>", *(f"<p>{escape(text)}</p>" for text in section.paragraphs)]
        body += [_html_table(section.table)] if section.table else []
        body += [_html_picture(picture) for picture in section.pictures]
        body += [f"<pre>{escape(section.code)}</pre>"] if section.code else []
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def _html_table(rows: Rows) -> str:
    tagged = [("th", rows[0]), *(("td", row) for row in rows[1:])]
    lines = ["<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>" for tag, row in tagged]
    return "<table>" + "\n".join(lines) + "</table>"


def _html_picture(picture: Picture) -> str:
    data = base64.b64encode(in_few_colours(picture.content)).decode()
    caption = escape(picture.caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )


def report_sections(results: StudyResults, out: Path) -> list[Section]:
    """All sections that these results have something for."""
    sections = [Section("Summary", summary(results))]
    if (table := results.table) is not None:
        metric = results.metric_name.capitalize()
        if rows := rise_rows(results):
            rises = rise_figure(table, train_length=results.train_length, metric=results.metric_name)
            over = interval_words(len(table.rises(name, n, results.train_length)) for name, n in _beyond(results))
            words = f"The same tokens at every length, so what makes them easy or hard cancels; 95 % intervals {over}."
            caption = f"Each line is an encoding, each bar its paired interval {over}."
            pictures = [Picture(png(rises), caption, "rise"), *far_pictures(results)]
            sections.append(Section("Rise on the same tokens", [words], rows, pictures))
        if rows := seed_rows(results):
            words = "The rise of each seed, and the 95 % interval of their mean by Student's t."
            sections.append(Section("Seeds", [words], rows))
        if rows := hypothesis_rows(results):
            kinds = {HYPOTHESIS_KINDS[judged.kind].quantity for judged in results.hypotheses()}
            single = "documents" if kinds == {"rise"} else "documents, or groups of queries"
            over = interval_words((len(judged.values) for judged in results.hypotheses()), single=single)
            words = (
                "Written down before the runs; held or failed only where the whole interval is on one side. 95 % "
                f"intervals {over}."
            )
            sections.append(Section("Hypotheses", [words, *hypothesis_words(results)], rows))
        over = interval_words(len(table.seeds(name, n)) for name in table.names for n in table.lengths)
        drawn = [len(table.seeds(name, n)) for name in table.names if has_bars(table, name) for n in table.lengths]
        bars = f"; the bars are 95 % intervals {interval_words(drawn)}" if drawn else ""
        caption = f"Each line is an encoding{bars}."
        values = Picture(png(length_figure(table, train_length=results.train_length)), caption, "lengths")
        sections += [
            Section(f"{metric} by length", table=result_rows(results), pictures=[values]),
            Section("95 % intervals", [f"They are {over}."], interval_rows(table)),
        ]
        if results.metric_name == "perplexity":
            sections.append(Section("Bits per byte by length", table=byte_rows(table)))
        if rows := above_best_rows(results):
            over = interval_words(_pairs(table, results.best, [results.train_length]))
            words = f"On the same tokens, with 95 % intervals {over}; one that holds 0 tells nothing apart."
            sections.append(Section(f"Above the best at {results.train_length:,} tokens", [words], rows))
        if rows := difference_rows(table):
            over = interval_words(_pairs(table, best_far(table), table.lengths))
            sections.append(Section("Paired differences on the same tokens", [f"95 % intervals {over}."], rows))
        if rows := paper_rows(results.config.paper, table):
            sections.append(Section("Beside the paper", table=rows))
    if (beside := read_beside(results.config.beside)) is not None:
        rows = beside_rows(results, beside)
        about = [f"Here / there. There: {beside['title']}. Ranks are among the encodings that both have."]
        if differing := beside_differences(results.config, beside):
            others = "; ".join(differing)
            about.append(f"Ranks and rises only, since values of other tokens are not compared: {others}.")
        sections += [Section("Beside another study", about, rows)] if len(rows) > 1 else []
    sections += retrieval_sections(results)
    sections += task_sections(results)
    if losses := loss_curves(results):
        sections.append(Section("Training", pictures=losses))
    if heads := head_maps(results, out):
        sections.append(Section("Heads", ["Final layer, held-out text, query down and key across."], pictures=heads))
    return [
        *sections,
        Section("Speed and memory", table=results.speed_rows()),
        Section("Commands", code="\n".join(run.command for run in (*results.runs, *results.later))),
        Section("Notes", notes(results)),
    ]


def retrieval_sections(results: StudyResults) -> list[Section]:
    """nDCG by length with its figure, how it changes and differs, and the paper's table beside."""
    table, length = results.retrieval_table, results.train_length
    if table is None:
        return []
    counts = [len(table.seeds(name, n)) for name in table.names for n in table.lengths]
    over = interval_words(counts, single="groups of queries")
    caption = f"Each line is an encoding; the bars are its 95 % intervals {over}."
    figure = Picture(png(retrieval_figure(table, train_length=length)), caption, "retrieval")
    sections = [Section("Retrieval by length", table.notes(), table.rows(), [figure])]
    if length in table.lengths and table.lengths[-1] > length:
        words = f"The same queries at every length, so what makes them easy or hard cancels; 95 % intervals {over}."
        sections.append(Section("Change of retrieval with length", [words], table.change_rows(length)))
    if rows := table.difference_rows():
        words = f"The same queries, with 95 % intervals {over}."
        sections.append(Section("Paired differences of retrieval", [words], rows))
    if rows := paper_retrieval_rows(results.config.paper, table):
        sections.append(Section("Retrieval beside the paper", ["nDCG@10, of 100."], rows))
    return sections


def paper_retrieval_rows(name: str | None, table: RetrievalTable) -> Rows:
    """The paper's nDCG@10 and ours in each cell; none unless the name is that of its retrieval table."""
    if name is None or name not in paper_tables()["retrieval"]["tables"]:
        return []
    lengths = paper_tables()["retrieval"]["lengths"]
    rows = [["paper / here", *(f"{length:,}" for length in lengths)]]
    for encoding, values in paper_tables()["retrieval"]["tables"][name].items():
        here = [table.value(encoding, n) if table.seeds(encoding, n) else None for n in lengths]
        cells = zip(values, here, strict=True)
        rows.append([encoding, *(f"{a:.2f} / {'-' if b is None else f'{100 * b:.2f}'}" for a, b in cells)])
    return rows


def summary(results: StudyResults) -> list[str]:
    """The results in sentences."""
    table, length, far = results.table, results.train_length, results.far_length
    if table is None:
        return ["No run is finished: there is nothing to compare yet."]
    training, encodings = results.runs[0].resolved, {run.encoding for run in results.runs} & {*table.names}
    sentences = [
        f"{len(encodings)} encodings, {seed_words(results)} each, trained at {length:,} tokens for "
        f"{training.steps:,} steps of {training.batch_tokens:,} tokens."
    ]
    if far is not None and length in table.lengths:
        rises = sorted((rise, name) for name in table.names if (rise := results.rise(name, far)) is not None)
        changes = ", ".join(f"{name} {rise:+.1%}" for rise, name in rises)
        sentences.append(f"From {length:,} to {far:,} tokens the {results.metric_name} changes by: {changes}.")
        sentences += retrieval_summary(results, far)
    if behind := results.behind():
        choices, best = results.rate_choices(), results.best_unchanged
        tried = [choices[name].words() if name in choices else "no rates were tried for it" for name in behind]
        named = (f"{name} ({results.gap(name) - 1:.0%}; {words})" for name, words in zip(behind, tried, strict=True))
        sort = "" if best == results.best else ", the best that leaves the scores as they are"
        sentences.append(f"More than {BEHIND - 1:.0%} above {best}{sort}, at {length:,} tokens: {', '.join(named)}.")
    if late := results.under_trained():
        gaps = ", ".join(f"{name} ({results.gap(name) - 1:.0%})" for name in late)
        sentences.append(
            f"Under-trained, so not to be judged beyond the training length, with how far above "
            f"{results.best_unchanged} they are there: {gaps}."
        )
    return sentences


def seed_words(results: StudyResults) -> str:
    """With how many seeds the encodings were measured."""
    counts = sorted({count for run in results.runs if (count := results.measured_seeds(run.encoding))})
    numbers = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]]))) if counts else "0"
    return f"{numbers} {'seed' if counts == [1] else 'seeds'}"


def hypothesis_words(results: StudyResults) -> list[str]:
    """Whether the text and the seeds that hypotheses are judged on were used to choose learning rates."""
    choices = results.rate_choices().values()
    if not choices:
        return []
    texts = ", ".join(results.rates_chosen_on)
    numbers = ", ".join(map(str, sorted({choice.seed for choice in choices})))
    chosen = f"learning rates were chosen on the training text of {texts}, with seed {numbers}"
    if results.is_test:
        return [f"This is a test of them: {chosen}; neither this text nor these seeds were used for it."]
    return [f"This is no test of them: {chosen}; this text, or a seed of these, was used for it."]


def retrieval_summary(results: StudyResults, far: int) -> list[str]:
    """How nDCG changes up to a length, in a sentence; and who takes no documents of it."""
    table, length = results.retrieval_table, results.train_length
    if table is None or length not in table.lengths or far not in table.lengths:
        return []
    known = [name for name in table.names if table.seeds(name, far) and table.seeds(name, length)]
    changes = sorted(((table.change(name, far, length)[0], name) for name in known), reverse=True)
    words = ", ".join(f"{name} {change:+.3f}" for change, name in changes)
    refused = [name for name in table.names if table.seeds(name, length) and not table.seeds(name, far)]
    sentence = f"nDCG@10 of documents of {far:,} tokens differs from that of {length:,} by: {words}."
    sentences = [sentence] if words else []
    return sentences + ([f"Documents of {far:,} tokens are refused by: {', '.join(refused)}."] if refused else [])


def result_rows(results: StudyResults) -> Rows:
    """The table by length, and the rise at eight times the training length."""
    table, far = results.table, results.far_length
    assert table is not None
    rows = table.rows()
    if far is not None:
        rises = [results.rise(name, far) for name in table.names]
        cells = [f"rise at {far:,}", *("-" if rise is None else f"{rise:+.1%}" for rise in rises)]
        rows = [[*row, cell] for row, cell in zip(rows, cells, strict=True)]
    return rows


def interval_rows(table: LengthTable) -> Rows:
    """The 95 % interval of every cell."""
    rows = [table.rows()[0]]
    for name in table.names:
        cells = [table.cell(name, n) for n in table.lengths]
        rows.append([name, *("-" if cell.refused else _ends(cell.interval, format_value) for cell in cells)])
    return rows


def byte_rows(table: LengthTable) -> Rows:
    """What every cell costs in bits per byte, which no tokenizer changes."""

    def cell(name: str, length: int) -> str:
        bits = table.mean(name, length, "bits_per_byte")
        return "-" if math.isnan(bits) else f"{bits:.3f}"

    return [table.rows()[0], *([name, *(cell(name, n) for n in table.lengths)] for name in table.names)]


def rise_rows(results: StudyResults) -> Rows:
    """How much each rises above its own value at the training length, on the same tokens, by length."""
    table, length = results.table, results.train_length
    assert table is not None
    beyond = [n for n in table.lengths if n > length]
    if table.metric != "perplexity" or length not in table.lengths or not beyond:
        return []

    def cell(name: str, n: int) -> str:
        value, interval = table.rise(name, n, length)
        return f"{value:+.1%} ({_ends(interval, '{:+.1%}'.format)})"

    rows = _paired_rows(table.names, beyond, cell)
    # Protocols other than fair score other tokens at each length: nothing is paired.
    if not any(text != "-" for row in rows for text in row[1:]):
        return []
    return [[f"rise since {length:,}", *(f"{n:,}" for n in beyond)], *rows]


def _beyond(results: StudyResults) -> list[tuple[str, int]]:
    """The cells of lengths beyond the training length."""
    assert results.table is not None
    return [(name, n) for name in results.table.names for n in results.table.lengths if n > results.train_length]


def _pairs(table: LengthTable, best: str | None, lengths: Sequence[int]) -> list[int]:
    """How many seeds each paired difference from the best is of."""
    others = [name for name in table.names if best not in (None, name)]
    return [table.paired_seeds(name, str(best), n) for name in others for n in lengths]


def far_pictures(results: StudyResults) -> list[Picture]:
    """The rises at the far length in order, with their intervals and the value of each seed."""
    table, far = results.table, results.far_length
    if table is None or far is None:
        return []
    measured = [
        Estimate(name, list(rises.values()), interval, judged=name not in results.under_trained())
        for name in table.names
        if (rises := results.seed_rises(name, far)) and (interval := results.rise_interval(name, far)) is not None
    ]
    if len(measured) < 2:
        return []
    over = interval_words(len(estimate.values) for estimate in measured)
    title = f"Rise of the {results.metric_name} from {results.train_length:,} to {far:,} tokens, same tokens"
    caption = f"Each point is a seed, each bar a 95 % interval {over}. The axis is straight to 1 %, then logarithmic."
    return [Picture(png(estimates_figure(measured, title=title)), caption, "far")]


def seed_rows(results: StudyResults) -> Rows:
    """The rise of each seed at the far length and the interval of their mean; nothing where none has two."""
    table, far, seeds = results.table, results.far_length, results.config.seeds
    if table is None or far is None or all(len(results.seed_rises(name, far)) < 2 for name in table.names):
        return []
    head = [f"rise at {far:,}", *(f"seed {seed}" for seed in seeds), "mean", "95 % interval"]
    rows = [head]
    for name in table.names:
        rises = results.seed_rises(name, far)
        # That of one seed is over documents.
        interval = results.rise_interval(name, far) if len(rises) > 1 else None
        cells = [f"{rises[seed]:+.1%}" if seed in rises else "-" for seed in seeds]
        mean = f"{sum(rises.values()) / len(rises):+.1%}" if rises else "-"
        rows.append([name, *cells, mean, _ends(interval, "{:+.1%}".format)])
    return rows


def hypothesis_rows(results: StudyResults) -> Rows:
    """What was expected, what was measured, and whether it held."""
    rows = [["encoding", f"expected at {results.far_length or 0:,}", "measured", "95 % interval", "verdict"]]
    for judged in results.hypotheses():
        kind = HYPOTHESIS_KINDS[judged.kind]
        expected = f"{kind.words} {judged.bound:{kind.format}}"
        measured = ", ".join(f"{value:{kind.format}}" for value in judged.values) or "-"
        interval = _ends(judged.interval, f"{{:{kind.format}}}".format)
        verdict = judged.verdict + (", under-trained" if judged.encoding in results.under_trained() else "")
        rows.append([judged.encoding, expected, measured, interval, verdict])
    return rows if results.config.hypotheses else []


def _ends(interval: Interval | None, form: Callable[[float], str]) -> str:
    """An interval in words; "-" where it is not known, as with one document."""
    if interval is None or any(map(math.isnan, interval)):
        return "-"
    return " to ".join(map(form, interval))


def above_best_rows(results: StudyResults) -> Rows:
    """How much more each costs at the training length than the best, and than the best that leaves the scores alone."""
    assert results.table is not None
    unit = "nats" if results.table.metric == "perplexity" else "bits"
    bests = list(dict.fromkeys([results.best, results.best_unchanged]))
    above = {name: [results.above(name, best) for best in bests] for name in results.table.names}
    names = sorted((name for name in above if above[name][0]), key=lambda name: above[name][0] or (0.0,))
    rows = [
        [name, *(text for gap in above[name] for text in (("-", "-") if gap is None else _gap_cells(*gap)))]
        for name in names
    ]
    head = [unit, *(text for best in bests for text in (f"above {best}", "95 % interval"))]
    return [head, *rows] if rows else []


def _gap_cells(value: float, interval: Interval) -> tuple[str, str]:
    return f"{value:+.3f}", _ends(interval, "{:+.3f}".format)


def best_far(table: LengthTable) -> str | None:
    """The row with the lowest value at the longest length; None where none was measured there."""
    longest = table.lengths[-1]
    measured = [name for name in table.names if table.seeds(name, longest)]
    return min(measured, key=lambda name: table.cell(name, longest).value, default=None)


def difference_rows(table: LengthTable) -> Rows:
    """How much more each costs than the best at the longest length, on the same tokens, by length."""
    best = best_far(table)
    others = [name for name in table.names if name != best]
    if best is None or not any(table.seeds(name, table.lengths[-1]) for name in others):
        return []

    def cell(name: str, n: int) -> str:
        value, interval = table.difference(name, best, n)
        return f"{value:+.3f} ({_ends(interval, '{:+.3f}'.format)})"

    unit = "nats" if table.metric == "perplexity" else "bits"
    return [[f"{unit} above {best}", *table.rows()[0][1:]], *_paired_rows(others, table.lengths, cell)]


def _paired_rows(names: Sequence[str], lengths: Sequence[int], cell: Callable[[str, int], str]) -> Rows:
    """A row a name, a column a length; "-" where the tokens differ."""

    def text(name: str, length: int) -> str:
        try:
            return cell(name, length)
        except ValueError:
            return "-"

    return [[name, *(text(name, length) for length in lengths)] for name in names]


def paper_tables() -> dict[str, Any]:
    """The perplexities of the CABLE paper, `lengths` and `tables` by name and encoding; and the same of `retrieval`."""
    content: dict[str, Any] = json.loads((files("lengthwise.study") / "paper_tables.json").read_text())
    return content


def check_paper(name: str | None) -> None:
    """An error unless it is the name of one of the paper's tables, or None."""
    known = [*paper_tables()["tables"], *paper_tables()["retrieval"]["tables"]]
    if name is not None and name not in known:
        raise ValueError(f"unknown table of the paper {name!r}; known: {', '.join(map(repr, known))}")


def paper_rows(name: str | None, table: LengthTable) -> Rows:
    """The paper's value and ours in each cell; none without a name."""
    check_paper(name)
    if name not in paper_tables()["tables"]:
        return []
    lengths = paper_tables()["lengths"]
    rows = [["paper / here", *(f"{length:,}" for length in lengths)]]
    for encoding, values in paper_tables()["tables"][name].items():
        # A learned table ends at the training length, and so do its values.
        paper = [f"{value:,.2f}" for value in values] + ["-"] * (len(lengths) - len(values))
        here = [str(table.cell(encoding, n)) if encoding in table.names else "-" for n in lengths]
        rows.append([encoding, *(f"{a} / {b}" for a, b in zip(paper, here, strict=True))])
    return rows


def read_beside(folder: str | None) -> dict[str, Any] | None:
    """The values of another study; an error where its folder has none."""
    if folder is None:
        return None
    path = Path(folder) / "study.json"
    if not path.is_file():
        raise FileNotFoundError(f"--beside must be the folder of a finished study, got {folder}, without study.json")
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def check_beside(config: StudyConfig) -> None:
    """An error unless another study that is to stand beside was trained at the same length, for the same objective."""
    other = read_beside(config.beside)
    if other is None:
        return
    here = config.training.resolved()
    same = {
        "training length": (here.length, other.get("train_length")),
        "objective": (here.objective, other.get("settings", {}).get("objective")),
        "metric": ("perplexity", other.get("metric")),
    }
    for name, (ours, theirs) in same.items():
        if ours != theirs:
            raise ValueError(f"--beside must be a study of the same {name}, {ours}, got {theirs} in {config.beside}")


def beside_differences(config: StudyConfig, other: dict[str, Any]) -> list[str]:
    """In what another study has other tokens, so that its values are not compared with those of this one."""
    here, there = config.training.resolved(), other["settings"]
    pairs = {
        "data": (here.data, there.get("data")),
        "tokenizer": (here.tokenizer, there.get("tokenizer")),
        "text": (config.evaluation.text or here.data, other.get("text", there.get("data"))),
    }
    return [f"{name} {ours} / {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]


def beside_rows(results: StudyResults, other: dict[str, Any]) -> Rows:
    """Value and rank at the training length, and rise beyond it, here and in another study of the same length.

    Without values where the tokens are others.
    """
    table, length, far = results.table, results.train_length, results.far_length
    if table is None:
        return []
    here = {name: table.cell(name, length).value for name in table.names if table.seeds(name, length)}
    rows_there = {row["encoding"]: row for row in other["rows"]}
    there = {name: row["values"].get(str(length)) for name, row in rows_there.items()}
    names = [name for name in here if there.get(name) is not None]
    orders = [sorted(names, key=study.__getitem__) for study in (here, there)]
    has_values = not beside_differences(results.config, other)
    rows = [["here / there", f"{results.metric_name} at {length:,}", "rank", f"rise at {far or 0:,}"]]
    for name in names:
        values = " / ".join(format_value(study[name]) for study in (here, there))
        ranks = " / ".join(str(order.index(name) + 1) for order in orders)
        rises = (far and results.rise(name, far), far and _rise_there(rows_there[name], length, far))
        rows.append([name, values, ranks, " / ".join("-" if r is None else f"{r:+.1%}" for r in rises)])
    return rows if has_values else [[row[0], *row[2:]] for row in rows]


def _rise_there(row: dict[str, Any], length: int, far: int) -> float | None:
    """The mean over seeds of each one's rise; of a report that does not have them, of one seed, by its values."""
    rise = row.get("rise", {})
    if rise.get("length") == far and rise["seeds"]:
        return float(sum(rise["seeds"]) / len(rise["seeds"]))
    later = row["values"].get(str(far))
    return None if later is None else float(later / row["values"][str(length)] - 1)


def task_sections(results: StudyResults) -> list[Section]:
    """Answers that are right as a whole, and how many of their tokens are, by task, encoding and length."""
    shares = results.task_shares()
    if not shares:
        return []
    over = interval_words((len(share.counts) for share in shares), single="examples, Wilson's")
    whole = f"Share of answers that are right as a whole, all depths together, with 95 % intervals {over}."
    tokens = (
        "Share of the answers' tokens that are right, given the right ones before, all depths and seeds together. "
        "Guessing gives 4 % of letters, 10 % of digits and 50 % of parity's bits."
    )
    figure = Picture(png(task_figure(shares)), tokens, "tasks")
    return [
        Section("Tasks", [whole, *task_notes(results.tasks)], task_rows(shares, _whole_cell)),
        Section("Tasks by token", [tokens], task_rows(shares, _token_cell), [figure]),
    ]


def task_rows(shares: Sequence[TaskShare], cell: Callable[[TaskShare], str]) -> Rows:
    """A line per task and encoding, a column per length."""
    lengths = sorted({share.length for share in shares})
    lines: dict[tuple[str, str], dict[int, str]] = {}
    for share in shares:
        lines.setdefault((share.task, share.encoding), {})[share.length] = "-" if share.refused else cell(share)
    head = ["task", "encoding", *(f"{length:,}" for length in lengths)]
    return [head, *([*line, *(cells.get(n, "-") for n in lengths)] for line, cells in lines.items())]


def _whole_cell(share: TaskShare) -> str:
    return f"{share.share:.0%} ({_ends(share.interval, '{:.0%}'.format)})"


def _token_cell(share: TaskShare) -> str:
    return f"{share.tokens:.0%}"


def task_figure(shares: Sequence[TaskShare]) -> Figure:
    """The share of right tokens: a panel a task, a row an encoding, a column a length."""
    encodings, lengths = list(dict.fromkeys(s.encoding for s in shares)), sorted({s.length for s in shares})
    panels = []
    for task in dict.fromkeys(share.task for share in shares):
        tokens = {(s.encoding, s.length): s.tokens for s in shares if s.task == task}
        values = [[tokens.get((encoding, n), math.nan) for n in lengths] for encoding in encodings]
        panels.append(HeatMap(task, [f"{n:,}" for n in lengths], encodings, values))
    return heat_maps_figure(
        panels, title="Share of the answers' tokens that are right", across="length in tokens", up=""
    )


def loss_curves(results: StudyResults) -> list[Picture]:
    """The training loss of each encoding, and of its contrastive training, with the first seed."""
    pictures = [
        _loss_curve(results, results.runs, "Training loss", "loss (nats per token)", "losses"),
        _loss_curve(results, results.later, "Contrastive training loss", "loss (nats per query)", "contrastive"),
    ]
    return [picture for picture in pictures if picture is not None]


def _loss_curve(results: StudyResults, runs: Sequence[StudyRun], title: str, up: str, name: str) -> Picture | None:
    """A line a run that has begun."""
    lines = [
        Line(run.encoding, *map(list, zip(*results.trained[run.name].losses, strict=True)))
        for run in first_runs(results, runs)
        if run.name in results.trained
    ]
    if not lines:
        return None
    seed = f", seed {results.config.seeds[0]}" if len(results.config.seeds) > 1 else ""
    drawing = lines_figure(lines, title=title, across="step", up=up, log=False, lengths=False)
    return Picture(png(drawing), f"{title}, a mean over a hundredth of the steps at a time{seed}.", name)


def first_runs(results: StudyResults, runs: Sequence[StudyRun]) -> list[StudyRun]:
    """Those with the first seed: one picture of each encoding is enough."""
    return [run for run in runs if run.seed == results.config.seeds[0]]


def head_maps(results: StudyResults, out: Path) -> list[Picture]:
    """The heads of each encoding's run with the first seed."""
    paths = [(run.encoding, out / "maps" / f"{run.name}.png") for run in first_runs(results, results.runs)]
    return [Picture(path.read_bytes(), encoding) for encoding, path in paths if path.exists()]


def notes(results: StudyResults) -> list[str]:
    """What the values are, what is missing, and where they were measured."""
    born = origin(command_line())
    versions = ", ".join(f"{name} {version}" for name, version in born["versions"].items())
    commits = sorted({commit for record in results.records.values() if (commit := record.born.get("commit"))})
    share = results.scoring_share
    return [
        *(results.table.notes() if results.table is not None else []),
        *(f"{name} is missing: {reason}" for name, reason in results.missing.items()),
        *(f"the heads of {name} could not be drawn: {reason}" for name, reason in results.undrawn.items()),
        *([f"runs were measured at commit {', '.join(commits)}"] if commits else []),
        *([f"scoring took {share:.0%} of the time of training and scoring"] if share is not None else []),
        f"this report: {born['command']} at commit {born['commit']}, {born['date']}, {born['machine']}; {versions}; "
        f"{results.seconds / 60:.1f} minutes in all calls",
    ]
