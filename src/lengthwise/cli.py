"""The command line: parsing only. torch is loaded when a command runs, so that --help answers at once."""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from jsonargparse import ActionYesNo, ArgumentParser

from lengthwise import __version__
from lengthwise.errors import UserError
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
    commands.add_subcommand("show", show_parser(), help="a picture or a page of the positional part of every head")
    commands.add_subcommand("serve", serve_parser(), help="the interactive page over runs and checkpoints")
    trainer = train_parser()
    commands.add_subcommand("train", trainer, help="train one model; the same command under torchrun")
    commands.add_subcommand("evaluate", evaluate_parser(), help="perplexity against length, and tasks")
    commands.add_subcommand("study", study_parser(), help="train, measure and compare several encodings: one report")
    chosen = parser.parse_args(argv)
    if chosen.subcommand == "train" and chosen.train.resume:
        # A run goes on with its own config; what is said on the command line is compared with it.
        trainer.default_config_files = config_of_run(chosen.train.out)
        chosen = parser.parse_args(argv)
    arguments = chosen[chosen.subcommand] or {}
    try:
        print(COMMANDS[chosen.subcommand](**dict(arguments)))
    except UserError as error:
        print(f"lengthwise {chosen.subcommand}: {error}", file=sys.stderr)
        sys.exit(2)


def show_parser() -> ArgumentParser:
    """The arguments of `lengthwise show`."""
    parser = ArgumentParser()
    parser.add_argument(
        "what_to_show",
        nargs="*",
        metavar="WHAT",
        help="an encoding's name, a run, a checkpoint folder or a name on the hub; several are drawn side by side",
    )
    parser.add_argument(
        "--out", help="the picture (.png, .svg, .pdf), the interactive page (.html), or with --paper a folder"
    )
    parser.add_argument("--paper", action="store_true", help="figures 8 to 15 of the CABLE paper, of runs if given")
    parser.add_argument(
        "--layer", type=str, help="from 1 on, such as 3 or 1-4; 'last' or 'all'; a picture has the last, a page all"
    )
    parser.add_argument("--detail", type=str, help="heads of which a page keeps every cell, as LAYER.HEAD: 12.1,12.3")
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
    from lengthwise.encodings.table import table

    return table()


def info() -> str:
    """What works on this machine."""
    from lengthwise.attention.info import report

    return report()


def export(source: str, out: str) -> str:
    """A flat folder with weights and code."""
    from lengthwise.loading import resolve_checkpoint
    from lengthwise.model.export import export

    folder = export(resolve_checkpoint(source), out)
    return f"{folder} loads with AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)"


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
    except UserError:
        raise  # `main` says it
    except (ArithmeticError, ImportError, LookupError, OSError, ValueError) as error:
        sys.exit(f"lengthwise train: {error}")
    return f"{run.final} has the model"


def show(**options: Any) -> str:
    """A picture, a page, or all of the paper's; what cannot be shown ends with a sentence, not with a trace."""
    names, paper, detail = (options.pop(name) for name in ("what_to_show", "paper", "detail"))
    decided = {name: options.pop(name) for name in ("layer", "heads", "what", "part", "length", "text") if paper}
    try:
        for name, value in decided.items():
            if value is not None:
                raise ValueError(f"the paper's figures decide {name} themselves; {value!r} came. Leave out --{name}.")
        if paper:
            from lengthwise.show.paper_figures import show_paper

            return show_paper(names, **options)
        out, force = options.pop("out"), options.pop("force")
        from lengthwise.show.options import ShowOptions

        chosen = ShowOptions(detail=detail, **options)
        if (out or "").lower().endswith(".html"):
            from lengthwise.show.page import show_page

            return show_page(names, chosen, out=out, force=force)
        from lengthwise.show.figure import show_figure

        return show_figure(names, chosen, out=out, force=force)
    except (NotImplementedError, OSError, ValueError) as error:
        sys.exit(f"lengthwise show: {error}")


def serve_parser() -> ArgumentParser:
    """The arguments of `lengthwise serve`."""
    parser = ArgumentParser()
    parser.add_argument(
        "sources", nargs="*", metavar="RUN", help="runs, checkpoints, studies, or folders of them; runs and study"
    )
    parser.add_argument("--port", type=int, default=8710, help="on 127.0.0.1; 0 takes any that is free")
    parser.add_argument("--max_tokens", type=int, default=2048, help="how many tokens a model reads at most")
    return parser


def serve(sources: list[str], port: int, max_tokens: int) -> str:
    """The page, until it is interrupted."""
    try:
        from lengthwise.serve.server import serve

        return serve(sources, port=port, max_tokens=max_tokens)
    except ModuleNotFoundError as error:
        sys.exit(f"lengthwise serve: {error.name} must be installed; it is not. Use: pip install 'lengthwise[serve]'")
    except (OSError, ValueError) as error:
        sys.exit(f"lengthwise serve: {error}")


def evaluate_parser() -> ArgumentParser:
    """What to measure, and how."""
    parser = ArgumentParser()
    parser.add_argument("sources", metavar="RUN", nargs="*", help="runs, checkpoint folders or hub names; NAME=RUN")
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
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto")
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
    try:
        found = measure(sources, what, device=device)
        written = found.write(Path(out)) if out is not None else []
    except UserError:
        raise  # `main` says it
    except (LookupError, OSError, ValueError) as error:
        sys.exit(f"lengthwise evaluate: {error}")
    return "\n".join([found.text(), *(f"wrote {path}" for path in written)])


def study_parser() -> ArgumentParser:
    """One option for each field of the study's config; `--config` reads a file first."""
    from lengthwise.study.config import StudyConfig

    parser = ArgumentParser(description="Train several encodings, measure them, draw their heads, write one report.")
    parser.add_argument("--config", action="config", help="a YAML file with any of these options")
    kinds = get_type_hints(StudyConfig)
    for option in fields(StudyConfig):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        kind = {"action": ActionYesNo} if kinds[option.name] is bool else {"type": kinds[option.name]}
        parser.add_argument(f"--{option.name}", default=default, help=option.metadata["help"], **kind)
    parser.add_argument("--plan", action="store_true", help="print one command per run that is missing, and stop")
    return parser


def study(plan: bool, **options: Any) -> str:
    """The whole study, or the commands of its runs."""
    from lengthwise.study.config import StudyConfig

    options.pop("config", None)
    config = StudyConfig(**options)
    try:
        if plan:
            from lengthwise.study.parts import commands

            return "\n".join(commands(config))
        from lengthwise.study.study import run_study

        logging.basicConfig(level=logging.INFO, format="%(message)s")
        return run_study(config)
    except UserError:
        raise  # `main` says it
    except (LookupError, OSError, ValueError) as error:
        sys.exit(f"lengthwise study: {error}")


COMMANDS: dict[str, Callable[..., str]] = {
    "encodings": encodings,
    "info": info,
    "export": export,
    "show": show,
    "serve": serve,
    "train": train,
    "evaluate": evaluate,
    "study": study,
}

if __name__ == "__main__":
    main(sys.argv[1:])
