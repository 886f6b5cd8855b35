"""Everything that a run needs to go on as if nothing had happened, into a checkpoint and out of it.

Weights and AdamW's moments are one flat dictionary of tensors, written by torch.distributed.checkpoint as safetensors:
each process writes its part, and any number of processes can read it. Random states are a small file per process.
No file is a pickle. The schedule and the place in the data are functions of the step, which the seal's note has.
"""

import json
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.optim import AdamW

MOMENTS = ("exp_avg", "exp_avg_sq")


def save(folder: Path, model: nn.Module, optimizer: AdamW, *, rank: int, many: bool) -> None:
    """Write this process's part of the state."""
    (folder / f"random-{rank}.json").write_text(json.dumps(_random_state()))
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _no_warning_of_being_alone():
        state_dict_saver.save(_tensors(model, optimizer), storage_writer=writer, no_dist=not many)


def load(folder: Path, model: nn.Module, optimizer: AdamW, *, step: int, rank: int, many: bool) -> bool:
    """Bring model and optimizer to the state after a step; whether the random state of this process was there too."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    reader = HuggingFaceStorageReader(str(folder))
    with _no_warning_of_being_alone():
        state_dict_loader.load(_tensors(model, optimizer), storage_reader=reader, no_dist=not many)
    own = folder / f"random-{rank}.json"
    if own.exists():
        _set_random_state(json.loads(own.read_text()))
    return own.exists()


def _tensors(model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    """The state's tensors themselves, by name: loading writes into them."""
    tensors: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        for moment in MOMENTS:
            if parameter in optimizer.state:
                tensors[f"optimizer.{name}.{moment}"] = optimizer.state[parameter][moment]
    return tensors


def seed_everything(seed: int, *more: int) -> None:
    """Seed all generators with the mix of some numbers."""
    mixed = int(np.random.SeedSequence([seed, *more]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


@contextmanager
def _no_warning_of_being_alone() -> Iterator[None]:
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
