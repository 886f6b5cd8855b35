"""What a run keeps: how its folder is opened, how a checkpoint and the final model get into it, from all processes."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from transformers import PreTrainedTokenizerFast

from lengthwise.data import Tokens
from lengthwise.model import LengthwiseForCausalLM
from lengthwise.runs import Run, RunWriter
from lengthwise.train.config import Settings
from lengthwise.train.processes import World
from lengthwise.train.state import save

WRITING_FAILED = (OSError, SafetensorError, CheckpointException)


def check_folder(settings: Settings) -> None:
    """An error unless the run's folder is free, or has this run and it is to be resumed; before all processes meet."""
    if not settings.out:
        raise ValueError("a run must have a folder; --out is empty. Give one, e.g. --out runs/first.")
    if not Run.is_run(settings.out):
        return
    if not settings.resume:
        raise FileExistsError(
            f"a new run needs a folder of its own; {settings.out} has a run. Choose another --out, or add --resume."
        )
    settings.check_resumes(Run(settings.out).config)


def begin(settings: Settings, writer: RunWriter | None, tokens: Tokens) -> tuple[Path, dict[str, Any]] | None:
    """Make the run's folder ready: for a new run, or to go on after the checkpoint that is given back."""
    assert writer is not None
    if not Run.is_run(settings.out):
        writer.write_config(settings.kept())
        return None
    found = writer.newest_checkpoint()
    if found is not None and found[1]["data"] != tokens.sha256:
        raise ValueError(
            f"a run must be resumed with the data it was started with; {settings.data!r} has changed since (other "
            "files, or another Python for 'stdlib'). Bring the data back, or start a new run."
        )
    writer.cut(0 if found is None else found[1]["step"])
    return found


def save_checkpoint(
    settings: Settings,
    world: World,
    writer: RunWriter | None,
    model: nn.Module,
    optimizer: AdamW,
    note: dict[str, Any],
) -> None:
    """All processes write their parts; the first makes a checkpoint of them."""
    try:
        partial = world.first(lambda: writer.begin_checkpoint(note["step"]) if writer else Path())
        save(partial, model, optimizer, rank=world.rank, many=world.is_many)
        world.alone(lambda: writer.seal_checkpoint(partial, note, keep=settings.keep) if writer else None)
    except WRITING_FAILED as error:
        raise OSError(not_written(settings, f"the checkpoint of step {note['step']}", error)) from error


def finish(
    settings: Settings,
    writer: RunWriter | None,
    model: LengthwiseForCausalLM,
    weights: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Write the trained model as save_pretrained does, with its tokenizer."""

    def fill(folder: Path) -> None:
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)

    assert writer is not None
    try:
        writer.finish(fill, {"steps": settings.steps})
    except WRITING_FAILED as error:
        raise OSError(not_written(settings, "the final model", error)) from error


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights, put together from all processes' shards."""
    named = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).cpu() for name, p in named}


def not_written(settings: Settings, what: str, error: BaseException) -> str:
    """What is said of a full disk and the like."""
    return (
        f"{what} could not be written to {settings.out}: {str(error).strip().splitlines()[-1]}. Checkpoints before it "
        f"are whole. Make room, then: lengthwise train --resume --out {settings.out}"
    )
