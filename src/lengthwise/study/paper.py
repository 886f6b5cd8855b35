"""The perplexities that the CABLE paper reports (Veisi et al. 2025, arXiv 2503.08067), to print beside our own.

GPT-2, trained at 1,024 tokens, measured on consecutive windows (our protocol `paper`).
"""

from collections.abc import Sequence

from lengthwise.evaluate import LengthTable

LENGTHS = (512, 1024, 2048, 4096, 8192, 15360)
COLUMNS = ("cable", "cable-nw", "alibi", "fire", "t5-clamped", "kerple", "rope", "sinusoidal")

PAPER: dict[str, dict[str, Sequence[float]]] = {
    name: dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    for name, rows in {
        "fineweb-edu-medium": (
            (17.00, 17.22, 17.30, 17.60, 17.79, 17.22, 17.39, 17.98),
            (16.52, 16.73, 16.79, 17.11, 17.26, 16.70, 16.89, 17.48),
            (15.97, 16.24, 16.56, 19.60, 38.32, 16.28, 38.95, 219.80),
            (15.34, 15.79, 16.67, 101.98, 243.69, 16.78, 146.72, 1058.84),
            (15.41, 15.97, 17.23, 383.08, 799.53, 20.32, 361.26, 2485.84),
            (15.41, 16.03, 17.46, 835.92, 1450.83, 26.13, 691.90, 3355.86),
        ),
        "fineweb-edu-small": (
            (21.19, 21.42, 21.55, 21.84, 22.17, 21.46, 21.43, 22.38),
            (20.63, 20.89, 20.99, 21.26, 21.57, 20.86, 20.87, 21.83),
            (20.02, 20.34, 20.67, 22.48, 29.37, 20.38, 58.59, 207.53),
            (19.24, 19.67, 21.23, 53.25, 131.36, 21.11, 225.78, 956.41),
            (19.31, 19.81, 22.42, 155.32, 405.94, 26.59, 554.12, 2376.51),
            (19.28, 19.82, 22.89, 333.91, 757.36, 34.91, 957.87, 3589.97),
        ),
        "fineweb-edu-tiny": (
            (29.37, 30.12, 29.88, 30.23, 30.78, 29.60, 29.44, 30.67),
            (28.73, 29.57, 29.25, 29.56, 30.08, 28.95, 28.81, 30.03),
            (27.96, 28.88, 28.82, 29.60, 33.81, 28.32, 76.29, 275.28),
            (26.90, 27.85, 28.28, 37.86, 86.33, 28.31, 239.95, 1166.46),
            (26.97, 27.92, 26.80, 70.72, 222.60, 32.00, 452.67, 2561.54),
            (26.80, 27.75, 28.52, 124.29, 448.08, 37.67, 652.52, 3679.78),
        ),
        "wikitext-103-medium": (
            (20.33, 20.80, 20.80, 22.18, 23.33, 20.96, 20.81, 24.16),
            (19.12, 19.63, 19.62, 20.89, 22.00, 19.73, 19.60, 22.77),
            (18.36, 18.91, 19.04, 21.86, 35.46, 19.01, 20.78, 143.58),
            (17.87, 18.47, 18.91, 46.60, 124.19, 18.63, 31.22, 467.51),
            (17.58, 18.23, 18.89, 106.27, 363.59, 18.61, 51.54, 1006.37),
            (17.36, 17.95, 18.60, 195.93, 726.18, 18.79, 91.53, 1516.97),
        ),
        "wikitext-103-small": (
            (20.93, 21.34, 21.46, 22.03, 22.80, 21.50, 21.38, 23.09),
            (19.71, 20.15, 20.22, 20.74, 21.49, 20.22, 20.13, 21.73),
            (18.95, 19.42, 19.62, 21.28, 33.85, 19.45, 30.14, 163.49),
            (18.47, 18.98, 19.39, 36.02, 123.05, 19.04, 63.75, 580.86),
            (18.20, 18.75, 19.29, 81.77, 347.22, 18.91, 117.81, 1121.08),
            (17.92, 18.48, 19.06, 163.91, 659.72, 19.00, 202.23, 1652.53),
        ),
        "wikitext-103-tiny": (
            (23.70, 24.32, 24.09, 24.34, 25.06, 23.95, 23.66, 25.18),
            (22.32, 23.01, 22.74, 22.90, 23.60, 22.56, 22.26, 23.73),
            (21.48, 22.19, 22.05, 22.68, 27.64, 21.72, 41.40, 172.33),
            (20.94, 21.70, 21.73, 29.57, 73.99, 21.32, 114.77, 607.48),
            (20.65, 21.46, 21.58, 54.89, 198.64, 21.33, 220.56, 1348.23),
            (20.33, 21.13, 21.30, 104.79, 411.09, 21.58, 375.62, 2017.42),
        ),
    }.items()
}

# A learned table ends at the training length.
PAPER["fineweb-edu-medium"]["learned"] = (17.99, 17.47)
PAPER["wikitext-103-tiny"]["learned"] = (24.94, 23.53)


def check_paper(name: str | None) -> None:
    """An error unless it is the name of one of the paper's tables, or None."""
    if name is not None and name not in PAPER:
        raise ValueError(
            f"unknown table of the paper {name!r}; there are {', '.join(map(repr, PAPER))}. Take one, or leave it out."
        )


def paper_rows(name: str | None, table: LengthTable) -> list[list[str]]:
    """The paper's figure and ours in each cell; none without a name."""
    if name is None:
        return []
    check_paper(name)
    rows = [["paper / here", *(f"{length:,}" for length in LENGTHS)]]
    for encoding, values in PAPER[name].items():
        cells = []
        for place, length in enumerate(LENGTHS):
            there = f"{values[place]:,.2f}" if place < len(values) else "-"
            here = str(table.cell(encoding, length)) if encoding in table.names else "-"
            cells.append(f"{there} / {here}")
        rows.append([encoding, *cells])
    return rows
