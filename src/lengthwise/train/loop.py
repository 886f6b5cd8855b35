"""The training loop, top to bottom, on plain torch: the same for one process and for many.

Everything that decides a number (weights, order of the data, learning rate) is a function of the config and the step.
So a run that was killed and resumed is, bit for bit, the run that was not.
"""

import logging
import math
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lengthwise.data import Batches
from lengthwise.data.tokens import document_positions
from lengthwise.distributed import check_spreadable, ring_loss
from lengthwise.model import LengthwiseForCausalLM
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
from lengthwise.train.distributed import World, clip_gradients, join_processes
from lengthwise.train.logging import ProgressLog, TensorBoardLog
from lengthwise.train.optimizers import Optimizers
from lengthwise.train.positions import PositionRule
from lengthwise.train.setup import check_positions, matmul_dtype, model_config, read_data, start_weights
from lengthwise.train.signals import SignalHandler, Stopped
from lengthwise.train.validation import Validation, save_map_snapshot

log = logging.getLogger(__name__)


class SummedLoss(nn.Module):
    """The sum of the losses of some sequences, as a forward pass: DDP and FSDP2 hook no other method."""

    def __init__(self, model: LengthwiseForCausalLM, ring: ProcessGroup | None = None) -> None:
        super().__init__()
        self.model, self.ring = model, ring

    def forward(
        self, tokens: Int[Tensor, "batch position"], positions: Int[Tensor, "batch position"] | None = None
    ) -> Float[Tensor, ""]:
        """Not the mean: the parts of a batch may differ in size. Of sequences that processes share, this one's part."""
        if self.ring is not None:
            return ring_loss(self.model, tokens, position_ids=positions, group=self.ring)
        return self.model.loss(tokens, tokens, position_ids=positions, reduction="sum")


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
    tokenizer, tokens, held_out_tokens = read_data(config)
    seed_everything(config.seed)
    model = LengthwiseForCausalLM(model_config(config, len(tokenizer), end=tokenizer.eos_token_id))
    check_positions(config, model)
    if config.context_parallel > 1:
        check_spreadable(model.config)
    if config.start_from is not None:
        start_weights(model, config.start_from, tokenizer)
    batches = Batches(tokens, length=config.length, seed=config.seed)
    validation = Validation(config, held_out_tokens, model)
    with ExitStack() as stack:
        writer = world.on_first(lambda: stack.enter_context(RunWriter(config.out)))
        checkpoint = world.from_first(lambda: open_run(config, writer, tokens))
        if world.from_first(lambda: Run(config.out).is_finished):
            return

        if config.recompute:
            model.gradient_checkpointing_enable()
        dtype = matmul_dtype(config, world.device)
        summed_loss = world.wrap(SummedLoss(model, world.ring), model.transformer.h, dtype)
        optimizers = Optimizers(config, model)
        start, seconds = 0, 0.0
        seed_everything(config.seed, world.rank)
        if checkpoint is not None:
            folder, note = checkpoint
            start, seconds = note["step"], note["seconds"]
            if not load_checkpoint(folder, world, model, optimizers, step=start):
                # There are more processes than before: the new ones have no random state yet.
                seed_everything(config.seed, world.rank, start)
            log.info("resumed %s after step %d", config.out, start)

        forward = torch.compile(summed_loss) if config.compile else summed_loss
        parameters = list(model.parameters())
        targets = config.sequences * (config.length - 1)
        signals = stack.enter_context(SignalHandler(ignore_repeats=world.size > 1))
        progress = ProgressLog(start=start, steps=config.steps, every=config.log_every, quiet=not world.is_first)
        stack.callback(progress.close)
        events = Path(config.out) / "tensorboard" if config.tensorboard and world.is_first else None
        tensorboard = TensorBoardLog(events, start=start)
        stack.callback(tensorboard.close)
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
            total = torch.zeros(2, dtype=torch.float64, device=world.device)
            for ids, positions, is_last in micro_batches(config, batches, step, world):
                with world.sync_gradients(summed_loss, last=is_last):
                    with torch.autocast(world.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                        loss = forward(ids, positions) / targets
                    # Processes average their gradients, but the loss is the sum of their parts.
                    (loss * world.size).backward()
                total[0] += loss.detach()
            total[1] = signals.received is not None
            loss_now, stopping = world.sum(total).tolist()
            world.average_unsharded_gradients(parameters)
            gradient = float(clip_gradients(parameters, config.clip))
            if not math.isfinite(loss_now) or not math.isfinite(gradient):
                raise FloatingPointError(not_finite(config, step, loss_now, gradient))
            optimizers.step(rate)

            line: dict[str, Any] = {"step": step, "loss": loss_now, "tokens": step * config.batch_tokens}
            line |= {"seconds": round(time.monotonic() - began, 3), "lr": rate, "gradient": gradient}
            if step % config.evaluate_every == 0 or step == config.steps:
                line["held_out"] = validation.losses(summed_loss, world, dtype)
            if config.maps_every and (step % config.maps_every == 0 or step == config.steps):
                save_map_snapshot(Run(config.out).map_path(step), model, validation.sample(), world)
            if writer is not None:
                writer.log(line)
            tensorboard.add(line)
            progress.add(line, config.batch_tokens)
            if step % config.checkpoint_every == 0 or step == config.steps or stopping:
                note = {"step": step, "seconds": line["seconds"], "tokens": line["tokens"], "data": tokens.sha256}
                save_checkpoint(config, world, writer, model, optimizers, note)
            if stopping and step < config.steps:
                raise Stopped(
                    f"stopped after step {step} of {config.steps}, with a checkpoint; continue with: "
                    f"lengthwise train --resume --out {config.out}",
                    signals.received or signal.SIGTERM,
                )

        weights = whole_weights(model)
        world.on_first(lambda: save_final(config, writer, model, weights, tokenizer))


def learning_rate(step: int, *, highest: float, final: float, warmup: int, steps: int) -> float:
    """The rate of a step, counted from 1: up in a straight line, then down along half a cosine.

    >>> [round(learning_rate(s, highest=1.0, final=0.1, warmup=2, steps=6), 3) for s in (1, 2, 3, 5, 6)]
    [0.5, 1.0, 1.0, 0.55, 0.232]
    """
    if step <= warmup:
        return highest * step / warmup
    done = (step - 1 - warmup) / (steps - warmup)
    return final + 0.5 * (1 + math.cos(math.pi * done)) * (highest - final)


def micro_batches(
    config: ResolvedTrainConfig, batches: Batches, step: int, world: World
) -> Iterator[tuple[Tensor, Tensor | None, bool]]:
    """This process's sequences of a step, a few at a time: tokens, positions, and whether they are the last."""
    own = world.own_part(config.sequences)
    first = (step - 1) * config.sequences
    for start in range(own.start, own.stop, config.micro_batch):
        stop = min(start + config.micro_batch, own.stop)
        ids = batches.read(first + start, stop - start)
        positions = document_positions(ids, batches.tokens.end) if config.separate_documents else None
        if config.positions is not None:
            rule = PositionRule.parse(config.positions, config.length)
            positions = rule.draw(first + start, stop - start, config.length, seed=config.seed)
        yield ids.to(world.device), None if positions is None else positions.to(world.device), stop == own.stop


def not_finite(config: ResolvedTrainConfig, step: int, loss: float, gradient: float) -> str:
    """The message for a loss or gradient that is not finite."""
    checkpoints = Run(config.out).checkpoints
    last = f"the last good checkpoint is {checkpoints[-1]}" if checkpoints else "there was no checkpoint yet"
    return (
        f"loss and gradient must be finite, got loss {loss} and gradient norm {gradient} at step {step}. This step is "
        f"not kept: {last}. Start a new run with a smaller --learning-rate or --clip."
    )
