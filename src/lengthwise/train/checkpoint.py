"""Checkpoints and the final model, written by all processes of a run into its folder and read back from it.

Weights and the optimizers' moments are one flat dictionary of tensors, written by torch.distributed.checkpoint as
safetensors: each process writes its part, and any number of processes can read it. Random states are a small file per
process. No file is a pickle. The schedule and the place in the data are functions of the step, which the seal's note
has.
"""

import json
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lengthwise.files import check_folder_to_write
from lengthwise.runs import Run, RunWriter
from lengthwise.train.config import ResolvedTrainConfig
from lengthwise.train.distributed import World
from lengthwise.train.optimizers import Optimizers

log = logging.getLogger(__name__)
WRITE_ERRORS = (OSError, SafetensorError, CheckpointException)


def check_folder(config: ResolvedTrainConfig) -> None:
    """An error unless the run's folder is free, or has this run and it is to be resumed."""
    if not config.out:
        raise ValueError("--out must be the run's folder, got ''; give one, e.g. --out runs/first")
    check_folder_to_write(config.out)
    if not Run.is_run(config.out):
        return
    if not config.resume:
        raise FileExistsError(
            f"a new run needs a folder of its own, got {config.out}, which has a run; choose another --out, or add "
            "--resume"
        )
    config.check_resumes(Run(config.out).config)


def open_run(
    config: ResolvedTrainConfig, writer: RunWriter | None, data: dict[str, str]
) -> tuple[Path, dict[str, Any]] | None:
    """Prepare the folder of a new run, or of one to continue: the checkpoint to continue from and its note.

    `data` has the hashes of what is trained on and of what is held out.
    """
    assert writer is not None
    check_folder(config)  # another process may have begun, stopped or finished a run there while data was prepared
    if not Run.is_run(config.out):
        if config.resume:
            log.info("there is no run in %s to resume: a new one begins at the first step", config.out)
        writer.write_config(config.stored())
        return None
    if Run(config.out).is_finished:  # its checkpoints may have been removed since
        return None
    checkpoint = writer.newest_checkpoint()
    if checkpoint is not None:
        _check_data(config, checkpoint[1], data)
    writer.cut(0 if checkpoint is None else checkpoint[1]["step"])
    return checkpoint


def _check_data(config: ResolvedTrainConfig, note: dict[str, Any], data: dict[str, str]) -> None:
    sources = {"data": ("data", config.data), "held_out": ("held-out data", config.held_out or config.data)}
    for name, now in data.items():
        kind, source = sources[name]
        if note.get(name, now) != now:  # checkpoints of before held-out data were checked have no hash of them
            raise ValueError(
                f"a run must be resumed with the {kind} it was started with; {source!r} has changed since (other "
                "files, another Python for 'stdlib', or another Lengthwise). Bring the data back, or start a new run."
            )


def save_checkpoint(
    config: ResolvedTrainConfig,
    world: World,
    writer: RunWriter | None,
    model: nn.Module,
    optimizers: Optimizers,
    note: dict[str, Any],
) -> None:
    """All processes write their parts; the first makes a checkpoint of them."""
    try:
        partial = world.from_first(lambda: writer.begin_checkpoint(note["step"]) if writer else Path())
        (partial / f"random-{world.rank}.json").write_text(json.dumps(_random_state()))
        storage = HuggingFaceStorageWriter(str(partial), save_distributed=True)
        with _silence_single_process_warning():
            state_dict_saver.save(_state(model, optimizers), storage_writer=storage, no_dist=not world.is_distributed)
        world.on_first(lambda: writer.seal_checkpoint(partial, note, keep=config.keep) if writer else None)
    except WRITE_ERRORS as error:
        raise OSError(_not_written(config, f"the checkpoint of step {note['step']}", error)) from error


def load_checkpoint(folder: Path, world: World, model: nn.Module, optimizers: Optimizers, *, step: int) -> bool:
    """Bring model and optimizers to the state after a step; whether the random state of this process was there too."""
    optimizers.start_moments(step)
    storage = HuggingFaceStorageReader(str(folder))
    with _silence_single_process_warning():
        state_dict_loader.load(_state(model, optimizers), storage_reader=storage, no_dist=not world.is_distributed)
    random_state = folder / f"random-{world.rank}.json"
    if random_state.exists():
        _set_random_state(json.loads(random_state.read_text()))
    return random_state.exists()


def save_final(
    config: ResolvedTrainConfig,
    writer: RunWriter | None,
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    save_rest: Callable[[Path], None],
    born: list[dict[str, Any]],
) -> None:
    """Write the trained model as save_pretrained does, and the rest, such as its tokenizer, by a function.

    `born` has the certificate of each call that trained it.
    """

    def fill(folder: Path) -> None:
        model.save_pretrained(folder, state_dict=weights)
        save_rest(folder)

    assert writer is not None
    try:
        writer.finish(fill, {"steps": config.steps, "born": born})
    except WRITE_ERRORS as error:
        raise OSError(_not_written(config, "the final model", error)) from error


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's weights, put together from all processes' shards, and what else its files have."""
    named = dict(model.named_parameters())
    stored = model.state_dict().keys()
    tensors = [*named.items(), *((name, x) for name, x in model.named_buffers() if name in stored)]
    whole = ((name, x.detach()) for name, x in tensors)
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).cpu() for name, x in whole}


def seed_everything(seed: int, *more: int) -> None:
    """Seed all generators with a mix of the numbers."""
    mixed = int(np.random.SeedSequence([seed, *more]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def _not_written(config: ResolvedTrainConfig, content: str, error: BaseException) -> str:
    return (
        f"{content} could not be written to {config.out}: {str(error).strip().splitlines()[-1]}. Checkpoints before it "
        f"are whole. Make room, then: lengthwise train --resume --out {config.out}"
    )


def _state(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """The tensors of model and optimizers themselves, by name: loading writes into them."""
    tensors: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for moment, tensor in optimizers.moments(parameter).items():
            tensors[f"optimizer.{name}.{moment}"] = tensor
    return tensors


@contextmanager
def _silence_single_process_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _random_state() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    return {
        "torch": _to_text(torch.get_rng_state()),
        "cuda": [_to_text(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "numpy": [str(kind), np.asarray(keys).tolist(), *map(float, rest)],
        "python": [version, list(numbers), gauss],
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(_from_text(state["torch"]))
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_from_text(text) for text in state["cuda"]])
    kind, keys, place, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), int(place), int(has_gauss), gauss))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))


def _to_text(state: Tensor) -> str:
    return bytes(state.numpy()).hex()


def _from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
