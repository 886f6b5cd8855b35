"""The report of a study: what each of its sections says, from the results."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from lengthwise.evaluate import LengthTable
from lengthwise.evaluate.statistics import UNKNOWN, Interval, interval_words
from lengthwise.evaluate.table import format_value, has_bars, length_figure, rise_figure
from lengthwise.files import json_text, write_atomic
from lengthwise.origin import origin
from lengthwise.study.beside import beside_sections, paper_rows
from lengthwise.study.config import HYPOTHESIS_KINDS
from lengthwise.study.results import BEHIND, StudyResults
from lengthwise.study.retrieval_sections import retrieval_sections, retrieval_summary
from lengthwise.study.runs import StudyRun
from lengthwise.study.sections import Picture, Rows, Section, as_html, as_json, as_markdown
from lengthwise.study.task_sections import task_sections
from lengthwise.views.estimates_plot import Estimate, estimates_figure
from lengthwise.views.line_plot import Line, lines_figure
from lengthwise.views.style import png


def write_report(results: StudyResults, out: Path) -> Path:
    """Write HTML, Markdown and JSON, each whole or not at all; the HTML file's path."""
    title, sections = results.config.title, report_sections(results, out)
    content = results.as_json() | {"title": title, "sections": [as_json(section) for section in sections]}
    write_atomic(out / "study.json", json_text(content))
    write_atomic(out / "report.md", as_markdown(title, sections))
    for picture in (picture for section in sections for picture in section.pictures if picture.name):
        write_atomic(out / f"{picture.name}.png", picture.content)
    return write_atomic(out / "report.html", as_html(title, sections))


def report_sections(results: StudyResults, out: Path) -> list[Section]:
    """All sections that these results have something for."""
    sections = [Section("Summary", summary(results))]
    if (table := results.table) is not None:
        metric = results.metric_name.capitalize()
        if rows := rise_rows(results):
            rises = rise_figure(table, train_length=results.train_length, metric=results.metric_name)
            over = interval_words(len(table.rises(name, n, results.train_length)) for name, n in _beyond(results))
            words = f"Every length scores the same tokens, so how hard they are cancels; 95 % intervals {over}."
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
                "Written down before the runs. A hypothesis held or failed only if the whole interval is on one side "
                f"of its bound; else it is not decided. 95 % confidence intervals {over}."
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
            words = f"Paired, on the same tokens, 95 % intervals {over}. If one contains 0, the two are not ranked."
            sections.append(Section(f"Above the best at {results.train_length:,} tokens", [words], rows))
        if rows := difference_rows(table):
            over = interval_words(_pairs(table, best_far(table), table.lengths))
            sections.append(Section("Paired differences on the same tokens", [f"95 % intervals {over}."], rows))
        if rows := paper_rows(results.config.paper, table):
            sections.append(Section("Beside the paper", table=rows))
    sections += [*beside_sections(results), *retrieval_sections(results), *task_sections(results)]
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


def summary(results: StudyResults) -> list[str]:
    """The results in sentences."""
    table, length, far = results.table, results.train_length, results.far_length
    if table is None:
        return ["No run is measured: there is nothing to compare yet."]
    training, encodings = results.runs[0].resolved, {run.encoding for run in results.runs} & {*table.names}
    sentences = [
        f"{len(encodings)} encodings, {seed_words(results)} each, trained at {length:,} tokens for "
        f"{training.steps:,} steps of {training.batch_tokens:,} tokens."
    ]
    if far is not None and length in table.lengths:
        rises = sorted((rise, name) for name in table.names if (rise := results.rise(name, far)) is not None)
        changes = ", ".join(f"{name} {rise:+.1%}" for rise, name in rises)
        if rises:
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
            f"Under-trained, so not to be judged beyond the training length; in brackets, how far they are above "
            f"{results.best_unchanged} at the training length: {gaps}."
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
    if not choices or results.is_test is None:
        return []
    texts = ", ".join(results.rates_chosen_on)
    numbers = ", ".join(map(str, sorted({choice.seed for choice in choices})))
    chosen = f"learning rates were chosen on the training text of {texts}, with seed {numbers}"
    if results.is_test:
        return [f"This is a test of them: {chosen}; neither this text nor these seeds were used for it."]
    return [f"This is no test of them: {chosen}; so this text, or one of these seeds, was used to choose the rates."]


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
        rows.append([name, *("-" if cell.refused else cell.interval.text(format_value) for cell in cells)])
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
        return f"{value:+.1%} ({interval.text('{:+.1%}'.format)})"

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
    has_bars = any(math.isfinite(end) for estimate in measured for end in estimate.interval)
    bars = f", each bar a 95 % interval {over}" if has_bars else ""
    title = f"Rise of the {results.metric_name} from {results.train_length:,} to {far:,} tokens, same tokens"
    caption = f"Each point is a seed{bars}. The axis is straight to 1 %, then logarithmic."
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
        interval = (results.rise_interval(name, far) or UNKNOWN) if len(rises) > 1 else UNKNOWN
        cells = [f"{rises[seed]:+.1%}" if seed in rises else "-" for seed in seeds]
        mean = f"{sum(rises.values()) / len(rises):+.1%}" if rises else "-"
        rows.append([name, *cells, mean, interval.text("{:+.1%}".format)])
    return rows


def hypothesis_rows(results: StudyResults) -> Rows:
    """What was expected, what was measured, and whether it held."""
    rows = [["encoding", f"expected at {8 * results.train_length:,}", "measured", "95 % interval", "verdict"]]
    for judged in results.hypotheses():
        kind = HYPOTHESIS_KINDS[judged.kind]
        expected = f"{kind.words} {judged.bound:{kind.format}}"
        measured = ", ".join(f"{value:{kind.format}}" for value in judged.values) or "-"
        interval = (judged.interval or UNKNOWN).text(f"{{:{kind.format}}}".format)
        verdict = judged.verdict + (", under-trained" if judged.encoding in results.under_trained() else "")
        rows.append([judged.encoding, expected, measured, interval, verdict])
    return rows if results.config.hypotheses else []


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
    return f"{value:+.3f}", interval.text("{:+.3f}".format)


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
        return f"{value:+.3f} ({interval.text('{:+.3f}'.format)})"

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
    born = origin()
    versions = ", ".join(f"{name} {version}" for name, version in born["versions"].items())
    commits = sorted({commit for record in results.records.values() if (commit := record.born.get("commit"))})
    calls = [call for record in results.records.values() for call in record.training_born]
    trainings = sorted({commit for call in calls if (commit := call.get("commit"))})
    share = results.scoring_share
    return [
        *(results.table.notes() if results.table is not None else []),
        *(f"{name} is missing: {reason}" for name, reason in results.missing.items()),
        *(f"the heads of {name} could not be drawn: {reason}" for name, reason in results.undrawn.items()),
        *([f"runs were trained at commit {', '.join(trainings)}"] if trainings else []),
        *([f"runs were measured at commit {', '.join(commits)}"] if commits else []),
        *([f"scoring took {share:.0%} of the time of training and scoring"] if share is not None else []),
        f"this report: {born['command']} at commit {born['commit']}, {born['date']}, {born['machine']}; {versions}; "
        f"{results.seconds / 60:.1f} minutes in all calls",
    ]
