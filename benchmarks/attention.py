"""Attention, measured against three things; a case is correct before it is timed, and each is a JSON line.

make bench          rivals, the short form, for every day: a few minutes
make bench-full     rivals, every encoding to 8,192 tokens, one per kind to 32,768: under an hour
make bench-base     another revision of Lengthwise, in alternating processes: BASE=9fcc0ca
--against-plain     our own call without a bias: what an encoding, a sink, a softcap or a logit scale costs
"""

import argparse
import json
import re
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from certificate import certificate

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the JSON lines")
    parser.add_argument("--lengths", help="lengths, separated by commas")
    rivals = parser.add_argument_group("against rivals")
    rivals.add_argument("--form", choices=("short", "full"), default="short")
    rivals.add_argument("--only", help="encodings, separated by commas")
    rivals.add_argument("--modes", help="modes, separated by commas")
    rivals.add_argument("--fast", action="store_true", help="leave out the rivals that fill in the bias")
    paired = parser.add_argument_group("against another revision, or our own plain call")
    paired.add_argument("--base", metavar="REV", help="compare the working tree with this revision")
    paired.add_argument("--against-plain", action="store_true", help="compare with attend(q, k, v)")
    paired.add_argument("--rounds", type=int, default=20, help="paired rounds, 20 or more for a claim")
    paired.add_argument("--cases", metavar="PATTERN", default="", help="a regular expression in encoding/mode/length")
    options = parser.parse_args()
    born = certificate(" ".join(["python benchmarks/attention.py", *sys.argv[1:]]))
    # Each way imports its own: only the rivals need x-transformers and transformers.
    if not options.base and not options.against_plain:
        import against_rivals

        out = options.out or RESULTS / f"attention-{options.form}.jsonl"
        return written(against_rivals.measured(options), out, born)
    if options.base and options.against_plain:
        parser.error("--base and --against-plain are two measurements: give one of them")
    if options.rounds < 1:
        parser.error(f"--rounds must be 1 or more, got {options.rounds}")
    import base
    import plain

    way = base if options.base else plain
    lengths = tuple(map(int, options.lengths.split(","))) if options.lengths else way.LENGTHS
    chosen = [case for case in way.cases(lengths) if re.search(options.cases, case.name)]
    if not chosen:
        parser.error(f"no case matches {options.cases!r}; they are named like kerple/train/1024")
    # An end by `timeout` or `kill` removes the worktree, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if way is plain:
        return written(plain.measure(chosen, options.rounds), options.out, born)
    try:
        commit = base.commit_of(options.base)
    except ValueError as error:
        parser.error(str(error))
    return written(base.measure(chosen, commit, options.rounds), options.out, born | {"base": commit})


def written(rows: Iterable[dict], out: Path | None, born: dict) -> int:
    """One JSON line a row, as it comes; then how many were slower or wrong, and 1 if any was wrong."""
    verdicts: dict[str, int] = {}
    if out:
        out.parent.mkdir(exist_ok=True)
        out.write_text("")
    for row in rows:
        if out:
            with out.open("a") as file:
                file.write(json.dumps(row | {"born": born}) + "\n")
        if "verdict" in row:
            verdicts[row["verdict"]] = verdicts.get(row["verdict"], 0) + 1
    if verdicts:
        print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items() if verdict))
    return 1 if "wrong" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
