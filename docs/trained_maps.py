"""Write the trained maps of the package from finished runs; `docs/gallery.py` then draws the gallery of them.

python docs/trained_maps.py --text "English Wikipedia of 2006" --licence "CC BY-SA 3.0" runs/kerple runs/cable ...
"""

import argparse

from lengthwise.origin import source_commit
from lengthwise.show.trained_maps import Source, check_sizes, write_trained


def main() -> None:
    """Write one file a run, and say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", help="finished runs of the paper's encodings")
    parser.add_argument("--text", required=True, help="the text that they read, in words")
    parser.add_argument("--licence", required=True, help="the licence of that text")
    parser.add_argument("--commit", help="of the code that trained them; that of this working tree by default")
    options = parser.parse_args()
    source = Source(options.text, options.licence, options.commit or source_commit())
    for run in options.runs:
        print(write_trained(run, source), flush=True)
    print(check_sizes())


if __name__ == "__main__":
    main()
