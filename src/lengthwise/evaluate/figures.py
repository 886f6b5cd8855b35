"""Scores as figures: perplexity against length, and loss by place in the window."""

from matplotlib.figure import Figure

from lengthwise.evaluate.table import WORDS, LengthTable
from lengthwise.views.line_plot import Line, lines_figure


def length_figure(table: LengthTable, *, train_length: int | None = None) -> Figure:
    """A line per row of the table with its interval, the training length marked."""
    lines = []
    for name in table.names:
        known = [(n, table.cell(name, n)) for n in table.lengths if table.seeds(name, n)]
        if known:
            lines.append(
                Line(
                    name,
                    [n for n, _ in known],
                    [cell.value for _, cell in known],
                    [cell.interval.low for _, cell in known],
                    [cell.interval.high for _, cell in known],
                )
            )
    protocol = table.scores[0].protocol.partition(":")[0]
    title = f"{WORDS[table.metric].capitalize()} against length, protocol {protocol}, with 95 % intervals"
    up = WORDS[table.metric]
    return lines_figure(lines, title=title, across="length in tokens", up=up, marked=train_length)


def position_figure(table: LengthTable, length: int, *, train_length: int | None = None) -> Figure:
    """The mean loss by place in a window of one length, a line per row (its first seed)."""
    lines = []
    for name in table.names:
        if seeds := table.seeds(name, length):
            lines.append(Line(name, [p for p, _ in seeds[0].positions], [v for _, v in seeds[0].positions]))
    return lines_figure(
        lines,
        title=f"Loss by place in windows of {length:,} tokens",
        across="place in the window",
        up="loss (nats per token)",
        marked=train_length,
        log=False,
        lengths=False,
    )
