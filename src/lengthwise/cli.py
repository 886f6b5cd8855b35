"""The command line: parsing only. torch is loaded when a command runs, so that --help is fast."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

from lengthwise import __version__
from lengthwise.errors import UserError, how_to_install
from lengthwise.evaluate.config import EvalConfig
from lengthwise.files import check_folder_to_write
from lengthwise.options import OptionParser, fail
from lengthwise.study.config import NOT_SHARED, StudyConfig
from lengthwise.train.config import FORMAT, TrainConfig

P = ParamSpec("P")
T = TypeVar("T")
FIXABLE = (
    UserError,
    ArithmeticError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors in the input, the files or the machine, whose message is all that a user needs."""

EXTRAS = {
    "datasets": "data",
    "pyarrow": "data",
    "ray": "ray",
    "starlette": "serve",
    "submitit": "slurm",
    "uvicorn": "serve",
}
"""Packages of extras other than `lab`."""


class Command(NamedTuple):
    """A command: its line in --help, its parser, and the function that gets the parsed options and gives the output."""

    help: str
    parser: Callable[[], OptionParser]
    run: Callable[..., str]


def main(argv: Sequence[str] | None = None) -> None:
    """Run `lengthwise COMMAND ...`; quiet where the reader of its output, such as `head`, has ended before it."""
    try:
        try:
            run_command(list(sys.argv[1:] if argv is None else argv))
        finally:
            if sys.stdout is not None:  # closed before the command began
                sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def run_command(words: list[str]) -> None:
    """Parse the words of a command line, and do it."""
    if not words:
        fail("lengthwise", f"expected a COMMAND, got none; known: {', '.join(COMMANDS)}")
    parser = OptionParser(
        prog="lengthwise", description="The workbench for positional encodings of transformers.", version=__version__
    )
    subcommands = parser.add_subcommands(required=True, metavar="COMMAND")
    parsers = {}
    for name, command in COMMANDS.items():
        # The others are only listed: `lengthwise --help` need not make them.
        parsers[name] = command.parser() if name in words else OptionParser()
        subcommands.add_subcommand(name, parsers[name], help=command.help)
    parse = user_errors(words[0], parser.parse_args, but=BrokenPipeError)  # --print-config prints
    chosen = parse(words)
    if chosen.subcommand == "train" and chosen.train.resume:
        # A run continues with its own config; options of the command line are compared with it.
        parsers["train"].default_config_files = user_errors("train", config_of_run)(chosen.train.out)
        chosen = parse(words)
    # Without what jsonargparse notes beside the options, such as the files that it read.
    options = dict(chosen[chosen.subcommand].clone(with_meta=False)) if chosen[chosen.subcommand] else {}
    options.pop("config", None)
    print(user_errors(chosen.subcommand, COMMANDS[chosen.subcommand].run)(**options))


def user_errors(name: str, function: Callable[P, T], *, but: type[Exception] | tuple[()] = ()) -> Callable[P, T]:
    """The same function, but an error that a user can fix, and is none to be raised, ends the command with one line.

    Its exit code is 2.
    """

    @wraps(function)
    def guarded(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return function(*arguments, **options)
        except but:
            raise
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            extra = EXTRAS.get(package, "lab")
            fail(f"lengthwise {name}", f"the package {package!r} must be installed; {how_to_install(extra)}")
        except FIXABLE as error:
            fail(f"lengthwise {name}", str(error) or type(error).__name__)

    return guarded


def encodings_parser() -> OptionParser:
    """The options of `lengthwise encodings`."""
    parser = OptionParser(description="All encodings in a few words each, or everything about one of them.")
    parser.add_argument("name", nargs="?", metavar="NAME", type=str, help="an encoding: its formula, options and cost")
    parser.add_argument("--all", action="store_true", help="one table with every column")
    return parser


def encodings(name: str | None, all: bool) -> str:
    """The catalogue of encodings, or the page of one."""
    from lengthwise.encodings.catalogue import grouped, page, table

    if name is not None:
        return page(name)
    return table() if all else grouped()


def info_parser() -> OptionParser:
    """The options of `lengthwise info`."""
    parser = OptionParser()
    parser.add_argument(
        "--prove", action="store_true", help="laws, times and memory on a device, to paste into an issue"
    )
    parser.add_argument("--device", type=str, help="with --prove: cpu, the default, cuda or cuda:1")
    parser.add_argument("--quick", action="store_true", help="with --prove: short lengths, in seconds")
    return parser


def info(prove: bool, device: str | None, quick: bool) -> str:
    """The backends that work on this machine, or a proof on one of its devices."""
    if prove:
        from lengthwise.attention.prove import report as proof

        return proof(device or "cpu", quick)
    for name, chosen in (("device", device), ("quick", quick)):
        if chosen:
            raise ValueError(f"--{name} must be with --prove")
    from lengthwise.attention.info import report

    return report()


def export_parser() -> OptionParser:
    """The options of `lengthwise export`."""
    parser = OptionParser()
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="a run, a checkpoint folder, or a name on the hub")
    parser.add_argument("--out", required=True, help="the folder to write, new or empty")
    return parser


def export(source: str, out: str) -> str:
    """A flat folder with weights and code."""
    from lengthwise.loading import progress_bars_on_terminals_only, readable, resolve_checkpoint, undamaged
    from lengthwise.model.export import class_of, export

    check_folder_to_write(out)
    checkpoint = resolve_checkpoint(source)
    with readable(checkpoint):
        loader = class_of(checkpoint).__name__.replace("Lengthwise", "AutoModel")
    with undamaged(checkpoint), progress_bars_on_terminals_only():
        folder = export(checkpoint, out)
    return f"{folder} loads with {loader}.from_pretrained(..., trust_remote_code=True)"


def show_parser() -> OptionParser:
    """The options of `lengthwise show`."""
    parser = OptionParser()
    parser.add_argument(
        "what_to_show",
        nargs="*",
        metavar="MODEL",
        help="an encoding's name, a run, a checkpoint folder or a name on the hub; several are drawn side by side",
    )
    parser.add_argument(
        "--out", help="the picture (.png, .svg, .pdf), the interactive page (.html), or with --paper a folder"
    )
    parser.add_argument(
        "--paper", action="store_true", help="figures 8 to 15 of the CABLE paper, trained; of runs if given"
    )
    parser.add_argument("--initial", action="store_true", help="with --paper: at their initial parameters")
    parser.add_argument("--by-step", action="store_true", help="how a run's heads moved, from its snapshots")
    parser.add_argument(
        "--style",
        type=Literal["paper", "annotated"] | None,
        help="as the CABLE paper prints figures, the default of --paper, or with numbers in the panels",
    )
    parser.add_argument(
        "--layer", type=str, help="from 1 on, such as 3 or 1-4; 'last' or 'all'; a picture has the last, a page all"
    )
    parser.add_argument(
        "--detail",
        type=str,
        help="heads of which a page keeps every cell, as LAYER.HEAD: 12.1,12.3; one at up to 2048 tokens, two at 1448",
    )
    parser.add_argument("--heads", type=str, help="from 1 on, such as 1-3,12; all by default")
    parser.add_argument(
        "--quantity", "--what", type=str, help="bias, content, scores, weights or profile; bias if there is one"
    )
    parser.add_argument("--part", type=str, help="decoder, encoder or cross, where a model has them")
    parser.add_argument("--length", type=int, help="how many tokens; 512 if the model takes them")
    parser.add_argument("--text", type=str, help="the text that the model reads; by default sampled from held-out text")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and of an encoding's initial parameters")
    parser.add_argument("--force", action="store_true", help="overwrite a picture that is there")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with a checkpoint")
    return parser


def show(**options: Any) -> str:
    """A picture, a page, or all of the paper's figures."""
    names, paper, by_step = (options.pop(name) for name in ("what_to_show", "paper", "by_step"))
    if paper and by_step:
        raise ValueError("--by-step must be without --paper: it draws one run")
    if paper:
        for name in ("layer", "heads", "quantity", "part", "length", "text", "detail"):
            if (value := options.pop(name)) is not None:
                raise ValueError(f"the paper's figures decide {name} themselves, got --{name} {value}; leave it out")
        from lengthwise.show.paper import show_paper

        return show_paper(names, **options)
    if options.pop("initial"):
        raise ValueError("--initial must be with --paper; an encoding by its name is drawn so anyway")
    from lengthwise.show.options import ShowOptions

    out, force = options.pop("out"), options.pop("force")
    chosen = ShowOptions(**options)
    if by_step:
        from lengthwise.show.steps import show_steps

        return show_steps(names, chosen, out=out, force=force)
    if (out or "").lower().endswith(".html"):
        from lengthwise.show.page import show_page

        return show_page(names, chosen, out=out, force=force)
    from lengthwise.show.figure import show_figure

    return show_figure(names, chosen, out=out, force=force)


def serve_parser() -> OptionParser:
    """The options of `lengthwise serve`."""
    parser = OptionParser()
    parser.add_argument(
        "sources", nargs="*", metavar="RUN", help="runs, checkpoints, studies, or folders of them; runs and study"
    )
    parser.add_argument("--port", type=int, default=8710, help="on 127.0.0.1; 0 takes any that is free")
    parser.add_argument("--max-tokens", type=int, default=2048, help="how many tokens a model reads at most")
    return parser


def serve(sources: list[str], port: int, max_tokens: int) -> str:
    """The page, until it is interrupted."""
    from lengthwise.serve.server import serve

    return serve(sources, port=port, max_tokens=max_tokens)


def train_parser() -> OptionParser:
    """The options of `lengthwise train`; `--config` reads a file first, and `--resume` the run's own."""
    parser = OptionParser(description="Train one model. Options that are left out come from the preset's recipe.")
    parser.add_argument("--config", action="config", help="a YAML file with any of these options")
    parser.add_config(TrainConfig)
    return parser


def config_of_run(out: str) -> list[str]:
    """The config file of a run that this version can continue."""
    from lengthwise.runs import CONFIG, read_config

    path = Path(out) / CONFIG
    return [str(path)] if path.is_file() and read_config(path).get("version") == FORMAT else []


def train(**options: Any) -> str:
    """One run; a signal ends it with a checkpoint and the exit code that shells expect."""
    config = TrainConfig(**options)
    if config.dry_run:
        from lengthwise.train.setup import dry_run

        return dry_run(config)
    from transformers.utils.logging import disable_progress_bar

    from lengthwise.train.loop import train
    from lengthwise.train.signals import Stopped

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    disable_progress_bar()  # transformers' own, for each file it writes
    try:
        run = train(config)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(128 + stopped.number)
    return f"{run.final} has the model"


def evaluate_parser() -> OptionParser:
    """The options of `lengthwise evaluate`."""
    parser = OptionParser()
    parser.add_argument("sources", metavar="RUN", nargs="*", help="runs, checkpoint folders or hub names; NAME=RUN")
    parser.add_config(EvalConfig)
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with a checkpoint")
    parser.add_argument("--out", type=str | None, help="a folder for JSON, CSV, Markdown, LaTeX and figures")
    return parser


def evaluate(sources: list[str], device: str, trust_remote_code: bool, out: str | None, **options: Any) -> str:
    """The table, and the files that were written."""
    from lengthwise.distributed import joined
    from lengthwise.evaluate.retrieval import evaluate_retrieval
    from lengthwise.evaluate.run import evaluate_models
    from lengthwise.loading import local_device

    config = EvalConfig(**options)
    if out is not None:
        check_folder_to_write(out)
    measure: Callable[..., Any] = evaluate_retrieval if config.retrieval else evaluate_models
    # Under torchrun all processes share each text; the first one speaks.
    with joined(local_device(device)) as is_first:
        logging.basicConfig(level=logging.INFO if is_first else logging.ERROR, format="%(message)s")
        result = measure(sources, config, device=str(local_device(device)), trust_remote_code=trust_remote_code)
        if not is_first:
            sys.exit(0)
        written = result.write(Path(out)) if out is not None else []
    return "\n".join([result.text(), *(f"wrote {path}" for path in written)])


def study_parser() -> OptionParser:
    """The options of `lengthwise study`: its own, and those of training and evaluation that its runs share."""
    parser = OptionParser(description="Train several encodings, measure them, draw their heads, write one report.")
    parser.add_argument("--config", action="config", help="a YAML file with any of these options")
    parser.add_config(StudyConfig, skip=("training", "evaluation"))
    parser.add_config(TrainConfig, skip=NOT_SHARED)
    parser.add_config(EvalConfig)
    parser.add_argument("--plan", action="store_true", help="print one command per run that is missing, and stop")
    parser.add_argument(
        "--watch", action="store_true", help="show how far its runs are, until all have ended; train none"
    )
    return parser


def study(plan: bool, watch: bool, **options: Any) -> str:
    """The whole study, the commands of its runs, or how far they are."""
    config = StudyConfig.from_options(**options)
    if plan and watch:
        raise ValueError("--plan and --watch do one thing each and stop, got both; leave one of them out")
    if (plan or watch) and config.tune:
        raise ValueError(
            "--plan and --watch are for a study whose learning rates are known, got --tune, which trains to choose "
            "them; run it with --tune first, then give its rates, 'chosen' in tuning.json, as --rates"
        )
    if watch:
        from lengthwise.study.watch import watch_study

        return watch_study(config)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if plan:
        from lengthwise.study.watch import missing_commands

        return "\n".join(missing_commands(config))
    from lengthwise.study.execute import run_study

    return run_study(config)


COMMANDS = {
    "encodings": Command("the catalogue of encodings, or the page of one", encodings_parser, encodings),
    "info": Command("which attention backends work here, and why others do not; --prove measures", info_parser, info),
    "export": Command("a checkpoint as a folder that loads without Lengthwise", export_parser, export),
    "show": Command("a picture or a page of the positional part of every head", show_parser, show),
    "serve": Command("the interactive page over runs and checkpoints", serve_parser, serve),
    "train": Command("train one model; the same command under torchrun", train_parser, train),
    "evaluate": Command("perplexity against length, tasks, and retrieval", evaluate_parser, evaluate),
    "study": Command("train, measure and compare several encodings: one report", study_parser, study),
}

if __name__ == "__main__":
    main(sys.argv[1:])
