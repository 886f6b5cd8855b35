"""The command line: parsing only. torch is loaded when a command runs, so that --help answers at once."""

import sys
from collections.abc import Callable, Sequence

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
    export = ArgumentParser()
    export.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="a run, a checkpoint folder, or a name on the hub")
    export.add_argument("--out", required=True, help="the folder to write, new or empty")
    commands.add_subcommand("export", export, help="a checkpoint as a folder that loads where Lengthwise is not there")
    chosen = parser.parse_args(argv)
    arguments = chosen[chosen.subcommand] or {}
    print(COMMANDS[chosen.subcommand](**dict(arguments)))


def encodings() -> str:
    """The table of encodings."""
    from lengthwise.encodings.catalogue import table

    return table()


def info() -> str:
    """What works on this machine."""
    from lengthwise.attention.survey import report

    return report()


def export(source: str, out: str) -> str:
    """A flat folder with weights and code."""
    from lengthwise.model.export import export

    return f"{export(source, out)} loads with AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)"


COMMANDS: dict[str, Callable[..., str]] = {"encodings": encodings, "info": info, "export": export}

if __name__ == "__main__":
    main(sys.argv[1:])
