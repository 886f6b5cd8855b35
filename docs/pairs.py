"""How much more one encoding costs than another in a stored full study, on the same tokens, by length.

python docs/pairs.py full-wikipedia kerple kerple+dapev2
"""

import argparse
import json

from results import STORED

from lengthwise.evaluate import LengthTable, Score


def stored_table(name: str) -> LengthTable:
    """The scores of a stored study's records, seeds of an encoding in one row."""
    scores, rows = [], {}
    for path in sorted((STORED / name / "records").glob("*.json")):
        encoding, _, seed = path.stem.rpartition("-")
        found = list(map(Score.from_json, json.loads(path.read_text())["scores"]))
        scores += found
        rows |= {score.name: (encoding, int(seed)) for score in found}
    return LengthTable(scores, rows=rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", help="its name in docs/results")
    parser.add_argument("first", help="an encoding, as its records are named")
    parser.add_argument("second", help="the one that it is compared with")
    options = parser.parse_args()
    table = stored_table(options.study)
    if unknown := [name for name in (options.first, options.second) if name not in table.names]:
        parser.error(f"{options.study} has {', '.join(table.names) or 'no records'}; got {', '.join(unknown)}")
    for length in table.lengths:
        value, interval = table.difference(options.first, options.second, length)
        seeds = table.paired_seeds(options.first, options.second, length)
        print(f"{length:,}: {value:+.3f} nats ({interval.text('{:+.3f}'.format)}), {seeds} seeds")
