"""Write the generated tables into README and docs: `make table`. Numbers come from the measurements' own JSON lines."""

import json
import re
from pathlib import Path

import which_encoding
from results import stored_results

from lengthwise.encodings import ENCODINGS
from lengthwise.encodings.catalogue import grouped, overview, page, two_sided_table

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CATALOGUE = ROOT / "docs/encodings.md"
ENCODERS = ROOT / "docs/encoders.md"
MEASURED = ROOT / "benchmarks/results/attention-full.jsonl"
LENGTHS = (1024, 4096, 16384)
WORDS = {
    "dape": "kerple+dape",
    "dapev2": "kerple+dapev2",
    "plain": "*no bias*",
    "fire-512": "fire",
    "fire": "fire (L beyond the length)",
}
STUDY = "default"
"""The study of the README, in docs/results."""
MODEL = {
    "train": ("training step of preset tiny, 1,024 tokens", "ratio", "{:.2f}"),
    "decode": ("one token of preset small after 4,096", "ratio", "{:.2f}"),
    "memory": ("peak memory of a process, preset tiny forward over 16,384 tokens", "gigabytes", "{:.2f} GB"),
}
"""What of the whole model is shown: in words, by which number, and how it is written."""
RATIOS = {
    "any_model.md": ("fit-train", "fit-decode", "accelerated-train", "accelerated-decode", "accelerated-memory"),
    "encoders.md": ("encoder-train", "encoder-padding"),
    "stretching.md": ("stretch",),
}
"""Pages with a table of ratios, and the files in benchmarks/results that it comes from."""


def filled(text: str, name: str, content: str) -> str:
    """The text with what stands between <!-- name --> and <!-- /name --> replaced."""
    between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    return between.sub(lambda match: match[1] + content + "\n" + match[2], text)


def rows_of(path: Path = MEASURED) -> list[dict]:
    """The measurements."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(rows: list[dict]) -> str:
    """Training time as ratios to SDPA and to our own call, both without a bias, and other numbers worth a column."""
    names = list(dict.fromkeys(row["encoding"] for row in rows if row["length"] == 4096 and "rival" not in row))
    limit = _one(rows, {"encoding": "sdpa", "mode": "train", "length": 4096})
    lengths = [n for n in LENGTHS if _one(rows, {"encoding": "sdpa", "mode": "train", "length": n})]
    lines = [
        "| encoding | " + " | ".join(f"{n:,}" for n in lengths) + " | skipped | peak memory |",
        "|---" * (len(lengths) + 3) + "|",
    ]
    shown: list[dict] = []
    for name in [name for name in names if name != "sdpa"]:
        times = [_one(rows, {"encoding": name, "length": n, "mode": "train"}) for n in lengths]
        middle = times[1]
        shown += [row for row in times if row is not None]
        share = middle.get("skipped_share") if middle else None
        cells = [
            WORDS.get(name, name),
            *(_both_ratios(row) for row in times),
            "" if not share else f"{share:.0%}",
            "" if not middle or not limit else f"{middle['peak_bytes'] / limit['peak_bytes']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    spreads = sorted((r["quartiles"][1] - r["quartiles"][0]) / 2 / r["median"] for r in (x["to_sdpa"] for x in shown))
    born = rows[0]["born"]
    lines += [
        "",
        f"Medians of {min(row['rounds'] for row in shown)} rounds; half the distance between the quartiles is "
        f"{spreads[len(spreads) // 2]:.1%} of the median in the typical case and {spreads[-1]:.0%} at most. "
        f"{_dense(rows)}Measured on "
        f"{born['date']} by `{born['command']}` at commit {born['commit']}: {born['machine']}, torch "
        f"{born['versions']['torch']}, Python {born['versions']['python']}.",
    ]
    return "\n".join(lines)


def _dense(rows: list[dict]) -> str:
    """The usual way, where it was measured."""
    dense = [row for row in rows if row.get("rival") == "dense SDPA" and row["length"] == 4096]
    if not dense:
        return ""
    ratios = [row["to_sdpa"]["median"] for row in dense]
    return (
        f"The usual alternative, SDPA with the bias as a full matrix, takes {min(ratios):.1f} to {max(ratios):.1f} "
        f"times as long as SDPA without a bias at 4,096 tokens ({dense[0]['rounds']} rounds). "
    )


def _both_ratios(row: dict | None) -> str:
    return "" if row is None else f"{row['to_sdpa']['median']:.2f} / {row['to_plain']['median']:.2f}"


def model(files: dict[str, list[dict]]) -> str:
    """The whole model: a row for each thing measured, a column for each rival."""
    rivals = list(dict.fromkeys(row["rival"] for rows in files.values() for row in rows))
    lines = ["| | " + " | ".join(rivals) + " |", "|---" * (len(rivals) + 1) + "|"]
    for what, rows in files.items():
        words, number, form = MODEL[what]
        own = {row["rival"]: form.format(row[number]) for row in rows}
        lines.append(f"| {words} | " + " | ".join(own.get(rival, "") for rival in rivals) + " |")
    born = [rows[0]["born"] for rows in files.values()]
    lines += ["", _measured(born)]
    return "\n".join(lines)


def _measured(born: list[dict]) -> str:
    """By which commands numbers were measured, when, and on which machine."""
    runs = dict.fromkeys(f"`{one['command']}` at commit {one['commit']} on {one['date']}" for one in born)
    return f"Measured by {'; '.join(runs)}: {born[0]['machine']}."


def ratios(rows: list[dict]) -> str:
    """A line a case: the median of the ratios in a round and its quartiles, beside the target."""
    lines, missed = ["| | ratio | quartiles | target |", "|---" * 4 + "|"], []
    for row in rows:
        case, ratio, limit = _case(row)
        # Memory is measured once.
        middle, ends = (ratio, ()) if isinstance(ratio, float) else (ratio["median"], ratio["quartiles"])
        missed += [case] if limit is not None and middle > limit else []
        cells = [case, f"{middle:.2f}", " to ".join(f"{end:.2f}" for end in ends), limit and f"{limit:.2f}"]
        lines.append("| " + " | ".join(cell or "" for cell in cells) + " |")
    born = [row["born"] for row in rows]
    met = f"missed by {', '.join(missed)}" if missed else "met by all that have one"
    lines += ["", f"The target is the highest ratio that we set ourselves; it is {met}. {_measured(born)}"]
    return "\n".join(lines)


def _case(row: dict) -> tuple[str, dict | float, float | None]:
    """What a row of a benchmark is about, in words, its ratio, and its target."""
    if "target" in row:
        return row["target"], row["ratio"], row["most"]
    if "spec" in row:
        limit = None if row["verdict"] == "no limit" else row["limit"]
        return f"`{row['spec']}`, {row['zones']} bands", row["bands"]["ratio"], limit
    return f"{row['case']} / {row['best']}", row["ratio"], row["limit"]


def study(results: dict) -> str:
    """The default study: perplexity by length, and the rise at eight times the training length."""
    length = results["train_length"]
    lengths = sorted(map(int, results["rows"][0]["values"]))
    far = str(8 * length)
    lines = [
        "| encoding | " + " | ".join(f"{n:,}" for n in lengths) + f" | rise at {int(far):,} |",
        "|---" * (len(lengths) + 2) + "|",
    ]
    for row in results["rows"]:
        values = [row["values"][str(n)] for n in lengths]
        rise = _rise(row, str(length), far)
        cells = [
            row["encoding"] + (" (under-trained)" if row["under_trained"] else ""),
            *("-" if value is None else f"{value:.1f}" for value in values),
            "-" if rise is None else f"{rise:+.1%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    born, settings = results["born"], results["settings"]
    protocol, text = results["notes"][:2]
    if not protocol.startswith("perplexity; fair: "):
        raise ValueError(f"the note on the table says what the protocol fair scores, got {protocol!r}")
    lines += [
        "",
        f"Perplexity of held-out text, lower is better ({text}): the same tokens at every length, each with at least "
        f"three quarters of that length before it. *Rise* is the increase from {length} to {int(far):,} tokens. "
        f"Trained at {length} tokens, {settings['steps']} steps of {settings['batch_tokens']:,} tokens, "
        f"{settings['optimizer']}, each encoding with the learning rates chosen for it. *Under-trained*: more than a "
        f"quarter above the best encoding at {length} tokens, so its values beyond that length are not to be judged. "
        f"`{born['command']}`{_commit(born)} on {born['date']}: {born['machine']}, torch "
        f"{born['versions']['torch']}, Python {born['versions']['python']}{_version(results)}. "
        f"[The whole report](docs/results/{STUDY}/report.md).",
    ]
    return "\n".join(lines)


def _rise(row: dict, length: str, far: str) -> float | None:
    """The mean over seeds of each one's rise; of a report that does not have them, of one seed, by its values."""
    if seeds := row.get("rise", {}).get("seeds"):
        return sum(seeds) / len(seeds)
    near, away = row["values"][length], row["values"][far]
    return None if near is None or away is None else away / near - 1


def _commit(born: dict) -> str:
    return f" at commit {born['commit']}" if born.get("commit") else ""


def _version(results: dict) -> str:
    other = results["of_another_version"]
    return "" if other is None else f", Lengthwise {other}, which is not this version"


def catalogue() -> str:
    """docs/encodings.md: every encoding in a few words, and its page."""
    pages = "\n\n".join(f"## {name}\n\n```\n{page(name)}\n```" for name in ENCODINGS)
    head = "# The encodings\n\nWritten by `make table`; `lengthwise encodings NAME` prints one page."
    return f"{head}\n\n{grouped()}\n\n{pages}\n"


def _one(rows: list[dict], wanted: dict) -> dict | None:
    return next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)


if __name__ == "__main__":
    text = filled(README.read_text(), "encodings", overview())
    CATALOGUE.write_text(catalogue())
    ENCODERS.write_text(filled(ENCODERS.read_text(), "two-sided", two_sided_table()))
    for name, names in RATIOS.items():
        paths = [ROOT / f"benchmarks/results/{one}.jsonl" for one in names]
        if rows := [row for path in paths if path.exists() for row in rows_of(path) if "rival" not in row]:
            (ROOT / "docs" / name).write_text(filled((ROOT / "docs" / name).read_text(), "ratios", ratios(rows)))
    if MEASURED.exists():
        text = filled(text, "measured", measured(rows_of()))
    files = {what: ROOT / f"benchmarks/results/model-{what}.jsonl" for what in MODEL}
    if all(path.exists() for path in files.values()):
        text = filled(text, "model", model({what: rows_of(path) for what, path in files.items()}))
    studies, tasks = which_encoding.stored_studies(), stored_results(which_encoding.TASKS)
    if studies and tasks is not None and which_encoding.STEPS.exists():
        (ROOT / "docs/which_encoding.md").write_text(which_encoding.page(studies, tasks, rows_of(which_encoding.STEPS)))
    if (stored := stored_results(STUDY)) is not None:
        text = filled(text, "study", study(stored))
    README.write_text(text)
