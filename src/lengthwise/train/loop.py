"""The training loop, top to bottom, on plain torch: the same for one process and for many.

Everything that decides a number (weights, order of the data, learning rate) is a function of the config and the step.
So a run that was killed and resumed is, bit for bit, the run that was not.

A step reads nothing back from its device: losses are read every `log_every` steps, and before whatever depends on them
being finite. On a CPU that is every step.
"""

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from lengthwise.bias import widest_dtype
from lengthwise.origin import origin
from lengthwise.runs import Run, RunWriter
from lengthwise.train.checkpoint import (
    check_folder,
    load_checkpoint,
    open_run,
    save_checkpoint,
    save_final,
    seed_everything,
    whole_weights,
)
from lengthwise.train.config import ResolvedTrainConfig, TrainConfig
from lengthwise.train.contrastive import ContrastiveObjective
from lengthwise.train.distributed import World, clip_gradients, join_processes
from lengthwise.train.logging import MetricsBuffer, ProgressLog, TensorBoardLog
from lengthwise.train.objectives import Inputs, Objective, TokenObjective
from lengthwise.train.optimizers import Optimizers
from lengthwise.train.setup import matmul_dtype
from lengthwise.train.signals import SignalHandler, Stopped
from lengthwise.train.validation import save_map_snapshot

log = logging.getLogger(__name__)


class SummedLoss(nn.Module):
    """The summed loss of some sequences, as a forward pass: DDP and FSDP2 hook no other method."""

    def __init__(self, model: PreTrainedModel, objective: Objective, world: World) -> None:
        super().__init__()
        self.model, self.objective, self.world = model, objective, world

    def forward(self, *inputs: Tensor | None) -> Float[Tensor, ""]:
        """The sum of the losses of these inputs; of sequences that processes share, this one's part."""
        return self.objective.loss(self.model, *inputs, world=self.world)


def pass_outside_graphs(
    config: ResolvedTrainConfig, objective: Objective, summed_loss: nn.Module, world: World, dtype: torch.dtype
) -> None:
    """One pass forward and backward that leaves nothing behind: a GPU's kernels prove themselves in it.

    Inside a compiled graph they cannot, and another backend would be taken, for as long as the graph is.
    """
    summed_loss.train()
    inputs, _ = next(iter(micro_batches(config, objective, 1, world)))
    with torch.random.fork_rng(), world.sync_gradients(summed_loss, last=True):
        with world.autocast(dtype):
            loss = summed_loss(*inputs)
        loss.backward()
    summed_loss.zero_grad()


def train(config: TrainConfig) -> Run:
    """Train a model and return its run; one that is finished already is returned as it is."""
    resolved = config.resolved()
    check_folder(resolved)
    with join_processes(resolved) as world:
        run(resolved, world)
    return Run(resolved.out)


def run(config: ResolvedTrainConfig, world: World) -> None:
    """One process's part of the run."""
    # Every error that a config or its data can have is raised before the run's folder is made.
    objective = make_objective(config)
    objective.check(world)
    seed_everything(config.seed)
    model = objective.make_model()
    validation = objective.held_out(model)
    with ExitStack() as stack:
        writer = world.on_first(lambda: stack.enter_context(RunWriter(config.out)))
        world.check_shared(Path(config.out))
        checkpoint = world.from_first(lambda: open_run(config, writer, objective.data_hashes))
        if world.from_first(lambda: Run(config.out).is_finished):
            return

        for words in config.unused_options() if world.is_first else ():
            log.info("%s: it changes nothing of this training", words)
        if config.recompute:
            model.gradient_checkpointing_enable()
        dtype = matmul_dtype(config, world.device)
        layers: Any = getattr(model.base_model, "h", ())  # only models of ours are sharded
        summed_loss = world.wrap(SummedLoss(model, objective, world), layers, dtype)
        optimizers = Optimizers(config, model)
        start, seconds = 0, 0.0
        born: list[dict[str, Any]] = []
        seed_everything(config.seed, world.rank)
        if checkpoint is not None:
            folder, note = checkpoint
            start, seconds, born = note["step"], note["seconds"], note.get("born", [])
            if not load_checkpoint(folder, world, model, optimizers, step=start):
                # There are more processes than before: the new ones have no random state yet.
                seed_everything(config.seed, world.rank, start)
            log.info("resumed %s after step %d", config.out, start)
        if world.is_first and start < config.steps:
            born = [*born, origin() | {"processes": world.size, "first_step": start + 1}]

        parameters = list(model.parameters())
        forward: Callable[..., Tensor] = summed_loss
        if config.compile:
            if world.device.type == "cuda":
                pass_outside_graphs(config, objective, summed_loss, world, dtype)
            forward = torch.compile(summed_loss)
        signals = stack.enter_context(SignalHandler(ignore_repeats=world.size > 1))
        progress = ProgressLog(start=start, steps=config.steps, every=config.log_every, quiet=not world.is_first)
        stack.callback(progress.close)
        events = Path(config.out) / "tensorboard" if config.tensorboard and world.is_first else None
        tensorboard = TensorBoardLog(events, start=start)
        stack.callback(tensorboard.close)
        buffer = MetricsBuffer()
        began = time.monotonic() - seconds
        summed_loss.train()

        if config.maps_every and start == 0:
            save_map_snapshot(Run(config.out).map_path(0), model, validation.sample(), world)
        for step in range(start + 1, config.steps + 1):
            rate = learning_rate(
                step,
                highest=config.learning_rate,
                final=config.final_learning_rate,
                warmup=config.warmup,
                steps=config.steps,
            )
            total = torch.zeros((), dtype=widest_dtype(world.device), device=world.device)
            for inputs, is_last in micro_batches(config, objective, step, world):
                with world.sync_gradients(summed_loss, last=is_last):
                    with world.autocast(dtype):
                        loss = forward(*inputs) / objective.targets
                    # Processes average their gradients, but the loss is the sum of their parts.
                    (loss * world.size).backward()
                total += loss.detach()
            world.average_unsharded_gradients(parameters)
            gradient = clip_gradients(parameters, config.clip)
            optimizers.step(rate)

            line: dict[str, Any] = {"step": step, "loss": None, "tokens": step * config.batch_tokens}
            line |= {"seconds": round(time.monotonic() - began, 3), "lr": rate, "gradient": None}
            buffer.add(line, loss=world.sum(total), gradient=gradient)
            stopping = world.any(signals.received is not None)
            evaluates = is_due(step, config.evaluate_every, config.steps)
            draws_maps = bool(config.maps_every) and is_due(step, config.maps_every, config.steps)
            saves = stopping or is_due(step, config.checkpoint_every, config.steps)
            reads = world.reads_for_free or step % config.log_every == 0
            # What depends on numbers being finite comes after they were looked at.
            for line in buffer.read() if reads or evaluates or draws_maps or saves else ():
                if not math.isfinite(line["loss"]) or not math.isfinite(line["gradient"]):
                    raise FloatingPointError(not_finite(config, line["step"], line["loss"], line["gradient"]))
                if evaluates and line["step"] == step:
                    line["held_out"] = validation.losses(summed_loss, world, dtype)
                if draws_maps and line["step"] == step:
                    save_map_snapshot(Run(config.out).map_path(step), model, validation.sample(), world)
                if writer is not None:
                    writer.log(line)
                tensorboard.add(line)
                progress.add(line, config.batch_tokens)
            if saves:
                note = {"step": step, "seconds": line["seconds"], "tokens": line["tokens"]}
                note |= objective.data_hashes | {"born": born}
                save_checkpoint(config, world, writer, model, optimizers, note)
            if stopping and step < config.steps:
                raise Stopped(
                    f"stopped after step {step} of {config.steps}, with a checkpoint; continue with: "
                    f"lengthwise train --resume --out {config.out}",
                    signals.received or signal.SIGTERM,
                )

        weights = whole_weights(model)
        world.on_first(lambda: save_final(config, writer, model, weights, objective.save, born))


def learning_rate(step: int, *, highest: float, final: float, warmup: int, steps: int) -> float:
    """The rate of a step, counted from 1: up in a straight line, then down along half a cosine.

    >>> [round(learning_rate(s, highest=1.0, final=0.1, warmup=2, steps=6), 3) for s in (1, 2, 3, 5, 6)]
    [0.5, 1.0, 1.0, 0.55, 0.232]
    """
    if step <= warmup:
        return highest * step / warmup
    done = (step - 1 - warmup) / (steps - warmup)
    return final + 0.5 * (1 + math.cos(math.pi * done)) * (highest - final)


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether a step is one of every few, or the last."""
    return step % every == 0 or step == steps


def micro_batches(
    config: ResolvedTrainConfig, objective: Objective, step: int, world: World
) -> Iterator[tuple[Inputs, bool]]:
    """This process's part of a step, a few sequences at a time: the inputs, and whether they are the last."""
    own = world.own_part(config.sequences)
    first = (step - 1) * config.sequences
    for start in range(own.start, own.stop, config.micro_batch):
        stop = min(start + config.micro_batch, own.stop)
        inputs = objective.inputs(first + start, stop - start)
        yield tuple(map(world.put, inputs)), stop == own.stop


def make_objective(config: ResolvedTrainConfig) -> Objective:
    """The objective of a run, with its data."""
    return ContrastiveObjective(config) if config.objective == "contrastive" else TokenObjective(config)


def not_finite(config: ResolvedTrainConfig, step: int, loss: float, gradient: float) -> str:
    """The message for a loss or gradient that is not finite."""
    checkpoints = Run(config.out).checkpoints
    last = f"the last good checkpoint is {checkpoints[-1]}" if checkpoints else "there was no checkpoint yet"
    return (
        f"loss and gradient must be finite, got loss {loss} and gradient norm {gradient} at step {step}. This step is "
        f"not kept: {last}. Start a new run with a smaller --learning-rate or --clip."
    )
