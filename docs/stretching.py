"""The tables of docs/stretching.md: a real RoPE model at its trained length and at twice that, by way to stretch.

    python docs/stretching.py measure MODEL TEXT        one JSON line for every value, written when it is computed
    python docs/stretching.py table                     those lines as a table, into docs/stretching.md, and beside it
                                                        what `lengthwise evaluate --stretch` wrote of a run of ours,
                                                        whose picture is drawn anew

    loss      the last 512 tokens of 4 windows of the text; at every length and for every method the same tokens
    passkey   a number that stands at one of five depths of a text as long as the window, and is to be repeated

What the file has already is not measured again, so the first command can be stopped and goes on when it is started
again. At the trained length and below it the control, a window of that length, is the plain model, and is not measured.
MODEL is a folder of docs/real_models.py, such as SmolLM2-135M-Instruct; TEXT is what docs/wikipedia.py writes.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F

from lengthwise.data import documents
from lengthwise.evaluate.corpus import Corpus, plan_text_windows, read_corpus
from lengthwise.evaluate.losses import last_logits, token_losses
from lengthwise.evaluate.score import Score
from lengthwise.evaluate.statistics import t_interval
from lengthwise.evaluate.table import LengthTable, control_figure, markdown
from lengthwise.evaluate.tasks import DEPTHS, sized_examples
from lengthwise.loading import LoadedModel, load_model
from lengthwise.model.stretch import parse_stretch, stretching
from lengthwise.model.stretch import trained_length as length_in_config
from lengthwise.views.style import save_picture

DOCS = Path(__file__).parent
sys.path.append(str(DOCS.parent / "benchmarks"))

from certificate import certificate  # noqa: E402
from tables import filled  # noqa: E402

MEASURED = DOCS / "results/stretching.jsonl"
PAGE = DOCS / "stretching.md"
OURS = DOCS / "results/stretching-rope/scores.json"
PLAIN, CONTROL = "plain", "window"
METHODS = (CONTROL, PLAIN, "yarn:8", "self-extend:8", "rerope:1024", "dca", "streaming:1024")
REST = ("yarn:2", "ntk:2", "dynamic:2", "leaky-rerope:1024:8", "lm-infinite:1024", "rerope:1024+logn", "logn")
SCORED, TOKENS = 512, 1_000_000

Cell = tuple[str, str, int, float]
"""What is measured, how it is stretched, the length, and the number of a window or a depth."""


def cells(
    kinds: Sequence[str], methods: Sequence[str], lengths: Sequence[int], trained: int, windows: int
) -> list[Cell]:
    """In the order of measurement: a method after the other, the longest length first."""
    numbers: dict[str, Sequence[float]] = {"loss": range(windows), "passkey": DEPTHS}
    return [
        (kind, method, length, number)
        for kind in kinds
        for method in methods
        for length in sorted(lengths, reverse=True)
        if method != CONTROL or length > trained
        for number in numbers[kind]
    ]


def read(path: Path) -> dict[Cell, dict]:
    """The values of a file by cell; none if there is no file. A line that was cut off when a run ended is left out."""
    values: dict[Cell, dict] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        values[value["kind"], value["method"], value["length"], value["number"]] = value
    return values


def measure(
    loaded: LoadedModel, corpus: Corpus, every: Sequence[Cell], lengths: Sequence[int], windows: int
) -> Iterator[dict]:
    """The values of these cells, one at a time."""
    for kind, method, length, number in every:
        began = time.perf_counter()
        with stretching(loaded.model, None if method == PLAIN else parse_stretch(method)):
            if kind == "loss":
                value = window_loss(loaded, corpus, int(number), length, lengths, windows)
            else:
                value = passkey(loaded, number, length)
        seconds = round(time.perf_counter() - began, 1)
        yield {"kind": kind, "method": method, "length": length, "number": number} | value | {"seconds": seconds}


def window_loss(
    loaded: LoadedModel, corpus: Corpus, number: int, length: int, lengths: Sequence[int], windows: int
) -> dict[str, float]:
    """The mean loss of the last tokens of one window."""
    ends = {"shortest": min(lengths), "longest": max(lengths)}
    plan = plan_text_windows("fair", len(corpus), length, windows=windows, stride=SCORED, **ends)
    each = len(plan.windows) // windows
    nats = []
    for window in plan.windows[number * each : (number + 1) * each]:
        tokens = torch.from_numpy(corpus.tokens[window.begin : window.begin + window.length + 1])[None]
        nats += token_losses(loaded.model, tokens, scored=window.scored)[0].tolist()
    return {"loss": mean(nats), "tokens": len(nats)}


@torch.no_grad()
def passkey(loaded: LoadedModel, depth: float, length: int) -> dict[str, object]:
    """Whether every token of the answer is the likeliest one, and the mean loss of them."""
    (row,) = sized_examples(loaded.tokenizer, "passkey", length=length, count=1, depth=depth)
    tokens = torch.tensor([row.tokens])
    logits = last_logits(loaded.model, tokens[:, :-1], row.scored)[0].float()
    answer = tokens[0, -row.scored :]
    loss = float(F.cross_entropy(logits, answer))
    return {"loss": loss, "tokens": row.scored, "right": bool((logits.argmax(-1) == answer).all())}


def table(values: dict[Cell, dict]) -> str:
    """Methods by row: perplexity at every length, the difference from the control at the longest, and passkeys."""
    meta = next(iter(values.values()))["born"]
    trained, windows = meta["trained"], meta["windows"]
    lengths = sorted({length for kind, _, length, _ in values if kind == "loss"})
    longest = lengths[-1]
    has_passkeys = any(kind == "passkey" and length == longest for kind, _, length, _ in values)
    head = ["", *(f"{length:,}" for length in lengths), f"against the control at {longest:,}"]
    rows = [head + [f"passkeys at {longest:,}"] * has_passkeys]
    for method in [name for name in (*METHODS, *REST) if any(name == cell[1] for cell in values)]:
        losses = {length: losses_of(values, method, length, trained, windows) for length in lengths}
        perplexity = [f"{math.exp(mean(own)):.2f}" if own else "" for own in losses.values()]
        control = losses_of(values, CONTROL, longest, trained, windows)
        name = f"`{method}`" if method != PLAIN else "as it is"
        name += " (the control)" * (method == CONTROL)
        row = [name, *perplexity, against(losses[longest], control)]
        rows.append(row + [passkeys(values, method, longest)] * has_passkeys)
    tokens = windows * SCORED
    commits = dict.fromkeys(value["born"]["commit"] for value in values.values())
    note = (
        f"{meta['model']}, trained at {trained:,} tokens: the perplexity of the same {tokens:,} tokens, the last "
        f"{SCORED} of {windows} windows; the rise of the loss over the control's with its 95 % interval, by window"
        + has_passkeys * f"; how many passkeys at {len(DEPTHS)} depths it repeats, and the loss of their tokens"
        + f". Commits {', '.join(commits)}, {meta['date']}, {meta['machine']}."
    )
    return f"{note}\n\n{markdown(rows)}"


def own_scores(path: Path) -> tuple[LengthTable, str]:
    """What `lengthwise evaluate --stretch` wrote, and the name of the control in it."""
    scores = LengthTable([Score.from_json(score) for score in json.loads(path.read_text())["scores"]])
    return scores, next(name for name in scores.names if "+window:" in name)


def draw_own(path: Path) -> None:
    """The picture that `lengthwise evaluate` drew of these scores, drawn anew beside them."""
    scores, control = own_scores(path)
    train_length = int(control.partition("+window:")[2])
    figure = control_figure(scores, dict.fromkeys(scores.names, control), train_length=train_length)
    save_picture(figure, path.parent / "control.png", force=True)


def own_table(path: Path) -> str:
    """Perplexity at every length, how far it holds, and the difference from the control at the longest."""
    scores, control = own_scores(path)
    longest = scores.lengths[-1]
    rows = [["", *(f"{n:,}" for n in scores.lengths), "holds to", f"against the control at {longest:,}"]]
    for name in scores.names:
        value, (low, high) = scores.difference(name, control, longest)
        held = scores.holds(name)
        against = f"{math.expm1(value):+.1%} ({math.expm1(low):+.1%} to {math.expm1(high):+.1%})"
        rows.append(
            [
                f"`{name}`" + " (the control)" * (name == control),
                *(f"{scores.cell(name, n).value:.2f}" for n in scores.lengths),
                "" if held is None else f"{held.length:,}",
                against * (name != control),
            ]
        )
    return markdown(rows)


def losses_of(values: dict[Cell, dict], method: str, length: int, trained: int, windows: int) -> list[float]:
    """Window by window; none unless all are there."""
    name = PLAIN if method == CONTROL and length <= trained else method
    own = [values.get(("loss", name, length, number)) for number in range(windows)]
    return [value["loss"] for value in own if value is not None] if all(own) else []


def against(losses: list[float], control: list[float]) -> str:
    """The mean difference of two lists of losses and its interval."""
    if not losses or not control or losses is control:
        return ""
    differences = [a - b for a, b in zip(losses, control, strict=True)]
    if not any(differences):
        return ""
    if len(differences) < 2:
        return f"{mean(differences):+.3f}"
    low, high = t_interval(differences)
    return f"{mean(differences):+.3f} ({low:+.3f} to {high:+.3f})"


def passkeys(values: dict[Cell, dict], method: str, length: int) -> str:
    """How many are right, and the mean loss of the answers."""
    own = [values[cell] for cell in values if cell[:3] == ("passkey", method, length)]
    if not own:
        return ""
    return f"{sum(value['right'] for value in own)} of {len(own)}, {mean(value['loss'] for value in own):.2f}"


def main() -> None:
    """Measure, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measured = verbs.add_parser("measure")
    measured.add_argument("model", type=Path)
    measured.add_argument("text", type=Path)
    measured.add_argument("--kinds", nargs="+", default=["loss", "passkey"], choices=["loss", "passkey"])
    measured.add_argument("--methods", nargs="+", help="by default all; those that are named most often come first")
    measured.add_argument("--lengths", nargs="+", type=int, default=[8192, 16384])
    measured.add_argument("--windows", type=int, default=4)
    written = verbs.add_parser("table")
    for verb in (measured, written):
        verb.add_argument("--out", type=Path, default=MEASURED, help="the file with the lines")
    chosen = parser.parse_args()
    if chosen.verb == "table":
        text = filled(PAGE.read_text(), "ours", own_table(OURS))
        PAGE.write_text(filled(text, "measured", table(read(chosen.out))))
        draw_own(OURS)
        return
    loaded = load_model(chosen.model, dtype=torch.float32)
    trained = length_in_config(loaded.model)
    groups = (METHODS, REST) if chosen.methods is None else (chosen.methods,)
    every = [cell for group in groups for cell in cells(chosen.kinds, group, chosen.lengths, trained, chosen.windows)]
    before = read(chosen.out)
    born = certificate("python docs/stretching.py measure")
    born |= {"model": chosen.model.name, "trained": trained, "windows": chosen.windows}
    corpus = read_corpus(documents(chosen.text, "all"), loaded.tokenizer, source=chosen.text.name, limit=TOKENS)
    left = [cell for cell in every if cell not in before]
    for done, value in enumerate(measure(loaded, corpus, left, chosen.lengths, chosen.windows), 1):
        with chosen.out.open("a") as file:
            file.write(json.dumps(value | {"born": born}) + "\n")
        words = " ".join(str(value[name]) for name in ("kind", "method", "length", "number"))
        print(f"{done}/{len(left)}  {words}  loss {value['loss']:.4f}  {value['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
