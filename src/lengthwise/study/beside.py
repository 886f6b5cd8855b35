"""What stands beside a study's values: the tables of the CABLE paper, and the values of another study."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from lengthwise import __version__
from lengthwise.evaluate import LengthTable
from lengthwise.evaluate.retrieval_table import RetrievalTable
from lengthwise.evaluate.table import format_value
from lengthwise.study.config import StudyConfig
from lengthwise.study.results import StudyResults
from lengthwise.study.sections import Rows, Section


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


def beside_differences(results: StudyResults, other: dict[str, Any]) -> list[str]:
    """In what another study has other tokens, so that its values are not compared with those of this one."""
    config, table = results.config, results.table
    here, there = config.training.resolved(), other["settings"]
    pairs: dict[str, tuple[Any, Any]] = {
        "data": (here.data, there.get("data")),
        "tokenizer": (here.tokenizer, there.get("tokenizer")),
        "text": (config.evaluation.text or here.data, other.get("text", there.get("data"))),
    }
    if table is not None:
        # Which tokens are scored hangs on the longest length and on the shortest, too.
        lengths = sorted({int(length) for row in other["rows"] for length in row["values"]})
        pairs["lengths"] = (f"{table.lengths[0]} to {table.lengths[-1]}", f"{lengths[0]} to {lengths[-1]}")
        pairs["protocol"] = (table.notes()[0], other["notes"][0])
    return [f"{name} {ours} / {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]


def beside_sections(results: StudyResults) -> list[Section]:
    """The values of the other study that the config names, if any, beside those of this one."""
    other = read_beside(results.config.beside)
    rows = beside_rows(results, other) if other is not None else []
    if other is None or len(rows) < 2:
        return []
    about = [f"Here: this study. There: {other['title']}. Ranks are among the encodings that both have."]
    version = other["born"]["versions"]["lengthwise"]
    if version != __version__:
        about.append(f"There was measured with Lengthwise {version}, which is not this version.")
    if differing := beside_differences(results, other):
        others = "; ".join(differing)
        about.append(f"Ranks and rises only, since values of other tokens are not compared: {others}.")
    return [Section("Beside another study", about, rows)]


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
    has_values = not beside_differences(results, other)
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
