"""The command line: parsing only. torch is loaded when a command runs, so that --help answers at once."""

import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from lengthwise import __version__


def main(argv: Sequence[str] | None = None) -> None:
    """Run `lengthwise COMMAND ...`."""
    parser = ArgumentParser(
        prog="lengthwise", description="The workbench for positional encodings of transformers.", version=__version__
    )
    commands = parser.add_subcommands(required=True, metavar="COMMAND")
    commands.add_subcommand("encodings", ArgumentParser(), help="the table of encodings")
    commands.add_subcommand("info", ArgumentParser(), help="which attention backends work here, and why others do not")
    chosen = parser.parse_args(argv)
    print(COMMANDS[chosen.subcommand]())


def encodings() -> str:
    """The table of encodings."""
    from lengthwise.encodings.catalogue import table

    return table()


def info() -> str:
    """What works on this machine."""
    from lengthwise.attention.survey import report

    return report()


COMMANDS = {"encodings": encodings, "info": info}

if __name__ == "__main__":
    main(sys.argv[1:])
