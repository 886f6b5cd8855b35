"""The command line: parsing only. torch is loaded when a command runs, so that --help answers at once."""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from jsonargparse import ActionYesNo, ArgumentParser

from lengthwise import __version__
from lengthwise.train.config import FORMAT, TrainConfig


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
    commands.add_subcommand("show", show_parser(), help="a picture of the positional part of every head")
    trainer = train_parser()
    commands.add_subcommand("train", trainer, help="train one model; the same command under torchrun")
    chosen = parser.parse_args(argv)
    if chosen.subcommand == "train" and chosen.train.resume:
        # A run goes on with its own config; what is said on the command line is compared with it.
        trainer.default_config_files = config_of_run(chosen.train.out)
        chosen = parser.parse_args(argv)
    arguments = chosen[chosen.subcommand] or {}
    print(COMMANDS[chosen.subcommand](**dict(arguments)))


def show_parser() -> ArgumentParser:
    """The arguments of `lengthwise show`."""
    parser = ArgumentParser()
    parser.add_argument(
        "what_to_show",
        nargs="*",
        metavar="WHAT",
        help="an encoding's name, a run, a checkpoint folder or a name on the hub; several are drawn side by side",
    )
    parser.add_argument("--out", help="the picture (.png, .svg, .pdf), or with --paper a folder")
    parser.add_argument("--paper", action="store_true", help="figures 8 to 15 of the CABLE paper, of runs if given")
    parser.add_argument("--layer", type=str, default="last", help="from 1 on, such as 3 or 1-4; 'last' or 'all'")
    parser.add_argument("--heads", type=str, help="from 1 on, such as 1-3,12; all if not given")
    parser.add_argument("--what", type=str, help="bias, content, scores, weights or profile; bias if there is one")
    parser.add_argument("--part", type=str, help="decoder, encoder or cross, where a model has them")
    parser.add_argument("--length", type=int, help="how many tokens; 512 if the model takes them")
    parser.add_argument("--text", type=str, help="what the model reads; sampled from held-out text if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="overwrite a picture that is there")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with a checkpoint")
    return parser


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


def train_parser() -> ArgumentParser:
    """One option for each field of the config; `--config` reads a file first, and `--resume` the run's own."""
    parser = ArgumentParser(description="Train one model. What is left out comes from the preset's recipe.")
    parser.add_argument("--config", action="config", help="a YAML file with any of these options")
    kinds = get_type_hints(TrainConfig)
    for option in fields(TrainConfig):
        kind = {"action": ActionYesNo} if kinds[option.name] is bool else {"type": kinds[option.name]}
        parser.add_argument(f"--{option.name}", default=option.default, help=option.metadata["help"], **kind)
    return parser


def config_of_run(out: str) -> list[str]:
    """The config file of a run that this version can go on with."""
    from lengthwise.runs.run import CONFIG, read_config

    path = Path(out) / CONFIG
    return [str(path)] if path.is_file() and read_config(path).get("version") == FORMAT else []


def train(**options: Any) -> str:
    """One run; a signal ends it with a checkpoint and the exit code that shells expect."""
    config = TrainConfig(**{option.name: options[option.name] for option in fields(TrainConfig)})
    if config.dry_run:
        from lengthwise.train.plan import plan

        return plan(config)
    from transformers.utils.logging import disable_progress_bar

    from lengthwise.train.loop import Stopped, train

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    disable_progress_bar()  # transformers' own, for each file it writes
    try:
        run = train(config)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(128 + stopped.number)
    except (ArithmeticError, ImportError, LookupError, OSError, ValueError) as error:
        sys.exit(f"lengthwise train: {error}")
    return f"{run.final} has the model"


def show(**options: Any) -> str:
    """A picture, or all of the paper's; what cannot be shown ends with a sentence, not with a trace."""
    from lengthwise.inspect.paper import show_paper
    from lengthwise.inspect.show import show

    names, paper = options.pop("what_to_show"), options.pop("paper")
    decided = {name: options.pop(name) for name in ("layer", "heads", "what", "part", "length", "text") if paper}
    try:
        for name, value in decided.items():
            if value not in (None, "last"):
                raise ValueError(f"the paper's figures decide {name} themselves; {value!r} came. Leave out --{name}.")
        return show_paper(names, **options) if paper else show(names, **options)
    except (NotImplementedError, OSError, ValueError) as error:
        sys.exit(f"lengthwise show: {error}")


COMMANDS: dict[str, Callable[..., str]] = {
    "encodings": encodings,
    "info": info,
    "export": export,
    "show": show,
    "train": train,
}

if __name__ == "__main__":
    main(sys.argv[1:])
