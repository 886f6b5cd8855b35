"""The report of a study: one HTML file that opens offline, the same in Markdown, and the figures as JSON.

Every word that comes from outside is escaped, pictures are inside the file, and there is no script.
"""

import base64
import json
import math
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from lengthwise.evaluate.figures import length_figure
from lengthwise.evaluate.table import figure, markdown
from lengthwise.evaluate.task_scores import task_rows
from lengthwise.files import write_atomic
from lengthwise.study.findings import Findings, born
from lengthwise.study.paper import paper_rows
from lengthwise.views.line_plot import Line, lines_figure
from lengthwise.views.style import in_few_colours, png

STYLE = """
:root{color-scheme:light}body{font:16px/1.55 system-ui,sans-serif;max-width:60rem;margin:3rem auto;padding:0 1.2rem;
color:#1b1f24;background:#fff}h1{font-size:1.9rem;line-height:1.2}h2{margin-top:2.6rem;font-size:1.25rem;
border-bottom:1px solid #d8dee4;padding-bottom:.3rem}table{border-collapse:collapse;font-variant-numeric:tabular-nums;
margin:1rem 0;display:block;overflow-x:auto}td,th{padding:.28rem .8rem;text-align:right;border-bottom:1px solid #eaeef2}
td:first-child,th:first-child{text-align:left}th{border-bottom:2px solid #57606a}img{max-width:100%;height:auto}
pre{background:#f6f8fa;padding:.9rem;overflow-x:auto;font-size:.8rem;line-height:1.5}small,figcaption{color:#57606a}
.bad{color:#a40e26}figure{margin:1.4rem 0}
"""


def write_report(findings: Findings, out: Path) -> Path:
    """Write all three, each whole or not at all, and give the HTML file's path."""
    files = {
        "study.json": json.dumps(findings.as_json(), indent=1) + "\n",
        "report.md": in_markdown(findings),
        "report.html": in_html(findings, out),
    }
    for name, content in files.items():
        write_atomic(out / name, content)
    return out / "report.html"


def summary(findings: Findings) -> list[str]:
    """What was found, in sentences made of the figures."""
    table, length = findings.table, findings.train_length
    if table is None:
        return ["No run is finished: there is nothing to compare yet."]
    said = [
        f"{len(table.names)} encodings, {len(findings.config.seeds)} seed(s) each, trained at {length:,} tokens for "
        f"{findings.parts[0].settings.steps:,} steps of {findings.parts[0].settings.batch_tokens:,} tokens."
    ]
    if length in table.lengths and table.lengths[-1] > length:
        far = 8 * length if 8 * length in table.lengths else table.lengths[-1]
        known = [name for name in table.names if table.seeds(name, far) and table.seeds(name, length)]
        rises = sorted((findings.rise(name, far) - 1, name) for name in known)
        words = ", ".join(f"{name} {rise:+.1%}" for rise, name in rises)
        said.append(f"From {length:,} to {far:,} tokens the {table.metric.replace('_', ' ')} changes by: {words}.")
    if late := findings.under_trained():
        gaps = ", ".join(f"{name} ({findings.gap(name) - 1:.0%} above the best)" for name in late)
        said.append(f"Under-trained, so not to be judged beyond the training length: {gaps}.")
    return said


def result_rows(findings: Findings) -> list[list[str]]:
    """The extrapolation table with intervals at the training length and the rise at eight times it."""
    table, length = findings.table, findings.train_length
    assert table is not None
    far = [n for n in table.lengths if n > length]
    far = [8 * length] if 8 * length in far else far[-1:]
    rows = [[*table.rows()[0], *(f"rise at {n:,}" for n in far)]]
    for row, name in zip(table.rows()[1:], table.names, strict=True):
        rises = [
            f"{findings.rise(name, n) - 1:+.1%}" if table.seeds(name, n) and table.seeds(name, length) else "-"
            for n in far
        ]
        rows.append([*row, *rises])
    return rows


def interval_rows(findings: Findings) -> list[list[str]]:
    """The 95 % interval of every cell."""
    table = findings.table
    assert table is not None
    rows = [table.rows()[0]]
    for name in table.names:
        cells = [table.cell(name, n) for n in table.lengths]
        words = ["-" if c.refused else f"{figure(c.interval.low)} to {figure(c.interval.high)}" for c in cells]
        rows.append([name, *words])
    return rows


def rise_rows(findings: Findings) -> list[list[str]]:
    """How much each rises above its own value at the training length, on the same tokens, by length."""
    table, length = findings.table, findings.train_length
    assert table is not None
    far = [n for n in table.lengths if n > length]
    if table.metric != "perplexity" or length not in table.lengths or not far:
        return []
    rows = [[f"rise since {length:,}", *(f"{n:,}" for n in far)]]
    for name in table.names:
        cells = []
        for n in far:
            try:
                value, interval = table.change(name, n, length)
                low, high = (math.expm1(end) for end in interval)
                cells.append(f"{math.expm1(value):+.1%} ({low:+.1%} to {high:+.1%})")
            except ValueError:
                cells.append("-")
        rows.append([name, *cells])
    # Protocols other than fair score other tokens at each length: nothing is paired.
    return rows if any(word != "-" for row in rows[1:] for word in row[1:]) else []


def difference_rows(findings: Findings) -> list[list[str]]:
    """How much more each costs than the best at the longest length, on the same tokens, by length."""
    table = findings.table
    assert table is not None
    last = [name for name in table.names if table.seeds(name, table.lengths[-1])]
    if len(last) < 2:
        return []
    best = min(last, key=lambda name: table.cell(name, table.lengths[-1]).value)
    rows = [[f"nats above {best}" if table.metric == "perplexity" else f"bits above {best}", *table.rows()[0][1:]]]
    for name in table.names:
        if name == best:
            continue
        cells = []
        for n in table.lengths:
            try:
                value, interval = table.difference(name, best, n)
                cells.append(f"{value:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})")
            except ValueError:
                cells.append("-")
        rows.append([name, *cells])
    return rows


def curves(findings: Findings) -> Figure | None:
    """The training loss of every run, a mean over a hundredth of its steps at a time."""
    lines = []
    for part in findings.parts:
        metrics = part.run.metrics if part.run is not None else []
        size = max(1, len(metrics) // 100)
        groups = [metrics[i : i + size] for i in range(0, len(metrics), size)]
        if groups:
            losses = [sum(line["loss"] for line in group) / len(group) for group in groups]
            lines.append(Line(part.name, [group[-1]["step"] for group in groups], losses))
    if not lines:
        return None
    return lines_figure(
        lines, title="Training loss", across="step", up="loss (nats per token)", log=False, lengths=False
    )


def notes(findings: Findings) -> list[str]:
    """What the table's figures are, what is missing, and where all was measured."""
    made = born("lengthwise study")
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return [
        *(findings.table.notes() if findings.table is not None else []),
        *(f"{name} is missing: {why}" for name, why in findings.missing.items()),
        f"{made['date']}, {made['machine']}; {versions}; {findings.seconds / 60:.1f} minutes in all",
    ]


def in_markdown(findings: Findings) -> str:
    """The report without pictures."""
    lines = [f"# {findings.config.title}", "", *summary(findings), ""]
    if findings.table is not None:
        lines += [markdown(result_rows(findings)), "", "95 % intervals over documents and seeds:", ""]
        lines += [markdown(interval_rows(findings)), ""]
        if rises := rise_rows(findings):
            lines += ["Rises on the same tokens, with 95 % intervals:", "", markdown(rises), ""]
        if differences := difference_rows(findings):
            lines += ["Paired differences on the same tokens, with 95 % intervals:", "", markdown(differences), ""]
        if rows := paper_rows(findings.config.paper, findings.table):
            lines += ["## Beside the paper", "", markdown(rows), ""]
    if findings.tasks:
        lines += ["## Tasks", "", markdown(task_rows(findings.tasks)), ""]
    lines += ["## Speed and memory", "", markdown(findings.speed_rows()), "", "## Commands", "", "```"]
    lines += [*(part.command for part in findings.parts), "```", "", *(f"- {note}" for note in notes(findings))]
    return "\n".join(lines) + "\n"


def in_html(findings: Findings, out: Path) -> str:
    """The report with everything in it."""
    body = [f"<h1>{escape(findings.config.title)}</h1>", *(f"<p>{escape(line)}</p>" for line in summary(findings))]
    if findings.table is not None:
        body += ["<h2>Against length</h2>", _table(result_rows(findings))]
        picture = length_figure(findings.table, train_length=findings.train_length)
        body += [_picture(png(picture), "Each line is an encoding; the bars are its 95 % intervals over documents.")]
        body += ["<h2>How sure that is</h2>", "<p>95 % intervals over documents and seeds.</p>"]
        body += [_table(interval_rows(findings))]
        if rises := rise_rows(findings):
            body += ["<p>Rises on the same tokens, with their intervals.</p>", _table(rises)]
        if differences := difference_rows(findings):
            body += ["<p>Differences on the same tokens, with their intervals.</p>", _table(differences)]
        if rows := paper_rows(findings.config.paper, findings.table):
            body += ["<h2>Beside the paper</h2>", _table(rows)]
    if findings.tasks:
        body += [
            "<h2>Tasks</h2>",
            "<p>Share of answers that are right as a whole.</p>",
            _table(task_rows(findings.tasks)),
        ]
    if (losses := curves(findings)) is not None:
        body += ["<h2>Training</h2>", _picture(png(losses), "Mean over a hundredth of the steps at a time.")]
    heads = [
        (part, out / "maps" / f"{part.name}.png") for part in findings.parts if part.seed == findings.config.seeds[0]
    ]
    if any(path.exists() for _, path in heads):
        body += ["<h2>The heads</h2>", "<p>Final layer, held-out text, query down and key across.</p>"]
        body += [_picture(path.read_bytes(), part.encoding) for part, path in heads if path.exists()]
    body += ["<h2>Speed and memory</h2>", _table(findings.speed_rows())]
    body += ["<h2>Commands</h2>", f"<pre>{escape(chr(10).join(part.command for part in findings.parts))}</pre>"]
    body += ["<h2>Notes</h2>", "<ul>", *(f"<li>{escape(note)}</li>" for note in notes(findings)), "</ul>"]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{escape(findings.config.title)}</title><style>{STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def _table(rows: list[list[str]]) -> str:
    head, *rest = rows
    lines = [
        "<tr>" + "".join(f"<{tag}>{escape(word)}</{tag}>" for word in row) + "</tr>" for tag, row in _tagged(head, rest)
    ]
    return "<table>" + "\n".join(lines) + "</table>"


def _tagged(head: list[str], rest: list[list[str]]) -> list[tuple[str, list[str]]]:
    return [("th", head), *(("td", row) for row in rest)]


def _picture(content: bytes, caption: str) -> str:
    data = base64.b64encode(in_few_colours(content)).decode()
    words = escape(caption)
    return f'<figure><img alt="{words}" src="data:image/png;base64,{data}"><figcaption>{words}</figcaption></figure>'
