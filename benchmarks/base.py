"""The working tree against another revision: two processes in turn, every case checked before it is timed.

The ratio is ours / base, a median over paired rounds with its exact interval by order statistics; a case is slower if
that lies wholly above 1.03.
"""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median

from job import Case
from paired import Entry, against_limit, compare, heading, line, workers

ROOT = Path(__file__).parents[1]
LIMIT = 1.03
NAMES = ("ours", "base")
LENGTHS = (1024, 4096)

WITHOUT_BIAS = ("plain", "none", "rope", "cope")
BIASED = ("alibi", "kerple", "kerple-power", "t5", "t5-clamped", "fire", "fire-512")
BIASED += ("shaw", "transformer-xl", "deberta", "inkling")
BIASED += ("cable", "cable-nw", "k-cable", "fox", "dape", "dapev2")
RESCORED = ("cope", "dape", "dapev2")


def cases(lengths: tuple[int, ...] = LENGTHS) -> Iterator[Case]:
    """Every encoding that acts inside attention; those that rescore at the first length only.

    Nothing is built in decoding where there is no bias, and a decoder turns one key of many: rope there is `none`.
    """
    for length in lengths:
        for encoding in (*WITHOUT_BIAS, *BIASED):
            if encoding in RESCORED and length != lengths[0]:
                continue
            modes = ["forward", "train"]
            modes += ["decode-ready"] * (encoding != "rope") + ["decode-built"] * (encoding in BIASED)
            yield from (Case(encoding, mode, length) for mode in modes)


def commit_of(revision: str) -> str:
    """The short hash of a revision, or an error in git's words."""
    command = ["git", "rev-parse", "--short", "--verify", f"{revision}^{{commit}}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise ValueError(f"expected a revision of this repository, got {revision!r}")
    return done.stdout.strip()


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A temporary worktree of a commit, removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], check=True, cwd=ROOT)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], check=True, cwd=ROOT)


def measure(chosen: list[Case], commit: str, rounds: int) -> Iterator[dict[str, object]]:
    """A row for each case; a line of the table is printed with it."""
    print(heading(NAMES), flush=True)
    widths = []
    with checked_out(commit) as tree, workers(ROOT / "src", tree / "src") as (ours, base):
        for case in chosen:
            row = compare(Entry("ours", ours, case), Entry("base", base, case), rounds, same=True)
            verdict = "wrong" if "wrong" in row else against_limit(row, LIMIT).replace("over", "slower")
            print(line(case, row, "" if verdict in ("within", "open") else verdict, NAMES), flush=True)
            if row.get("interval"):
                widths.append(row["interval"][1] - row["interval"][0])
            yield asdict(case) | row | {"verdict": verdict}
    if widths:
        print(f"half of the intervals are narrower than {median(widths):.3f}; a busy machine widens them")
