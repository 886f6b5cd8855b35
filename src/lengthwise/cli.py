"""The command line: parsing only. torch is loaded when a command runs, so that --help answers at once."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

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
    commands.add_subcommand("evaluate", _evaluate_parser(), help="perplexity against length, and tasks")
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


def _evaluate_parser() -> ArgumentParser:
    parser = ArgumentParser()
    parser.add_argument("sources", metavar="RUN", nargs="+", help="runs, checkpoint folders or hub names; NAME=RUN")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024], help="in tokens")
    parser.add_argument(
        "--protocol",
        type=Literal["fair", "paper", "sliding"],
        default="fair",
        help="fair: the same tokens at every length; paper: consecutive windows; sliding: every token once",
    )
    parser.add_argument("--text", default="stdlib", help="the source whose held-out text is used")
    parser.add_argument("--windows", type=int, default=256, help="windows at most, at each length")
    parser.add_argument("--stride", type=int | None, help="tokens scored in a window (fair, sliding)")
    parser.add_argument("--chunk", type=int | None, help="read windows in chunks of so many tokens through the cache")
    parser.add_argument("--rope", type=str, nargs="+", default=[], help="RoPE scalings to compare, as yarn:8")
    parser.add_argument("--tasks", type=str, nargs="+", default=[], help="synthetic tasks, e.g. copy passkey")
    parser.add_argument("--examples", type=int, default=100, help="of each task, length and depth")
    parser.add_argument("--device", default="cpu", help="where the models run")
    parser.add_argument("--out", type=str | None, help="a folder for JSON, CSV, Markdown, LaTeX and figures")
    return parser


def evaluate(
    sources: list[str],
    lengths: list[int],
    protocol: Literal["fair", "paper", "sliding"],
    text: str,
    windows: int,
    stride: int | None,
    chunk: int | None,
    rope: list[str],
    tasks: list[str],
    examples: int,
    device: str,
    out: str | None,
) -> str:
    """The table, and what was written."""
    from lengthwise.evaluate.measuring import Measure, measure

    what = Measure(lengths, protocol, text, windows, stride, chunk, rope, tasks, examples)
    found = measure(sources, what, device=device)
    written = found.write(Path(out)) if out is not None else []
    return "\n".join([found.text(), *(f"wrote {path}" for path in written)])


COMMANDS: dict[str, Callable[..., str]] = {"encodings": encodings, "info": info, "export": export, "evaluate": evaluate}

if __name__ == "__main__":
    main(sys.argv[1:])
