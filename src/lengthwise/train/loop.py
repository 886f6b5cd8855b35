"""The training loop, top to bottom, on plain torch: the same for one process and for many.

Everything that decides a number (weights, order of the data, learning rate) is a function of the config and the step.
So a run that was killed and resumed is, bit for bit, the run that was not.
"""

import logging
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedTokenizerFast

from lengthwise.data import Batches, Tokens, load_tokenizer, prepare
from lengthwise.data.tokens import document_positions
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.runs import Run, RunWriter
from lengthwise.train.config import Settings, TrainConfig
from lengthwise.train.held_out import HeldOut
from lengthwise.train.keeping import begin, check_folder, finish, save_checkpoint, whole_weights
from lengthwise.train.processes import Objective, World, clip, families, processes
from lengthwise.train.schedule import learning_rate
from lengthwise.train.snapshot import save_snapshot
from lengthwise.train.state import load, seed_everything
from lengthwise.train.telling import Board, Progress, Signals

log = logging.getLogger(__name__)


class Stopped(Exception):  # noqa: N818
    """A signal ended a run early, after a checkpoint."""

    def __init__(self, message: str, number: signal.Signals) -> None:
        super().__init__(message)
        self.number = number


def train(config: TrainConfig) -> Run:
    """Train a model as the config says, and give its run; one that is finished already is given as it is."""
    settings = config.resolved()
    check_folder(settings)
    with processes(settings) as world:
        run(settings, world)
    return Run(settings.out)


def run(settings: Settings, world: World) -> None:
    """One process's part of the run."""
    # Whatever a config or its data can have wrong is found before the run's folder is made.
    tokenizer, tokens, held_out_tokens = read_data(settings)
    seed_everything(settings.seed)
    model = LengthwiseForCausalLM(model_config(settings, len(tokenizer), end=tokenizer.eos_token_id))
    batches = Batches(tokens, length=settings.length, seed=settings.seed)
    held_out = HeldOut(settings, held_out_tokens, model)
    with ExitStack() as stack:
        writer = world.alone(lambda: stack.enter_context(RunWriter(settings.out)))
        found = world.first(lambda: begin(settings, writer, tokens))
        if world.first(lambda: Run(settings.out).is_finished):
            return

        if settings.recompute:
            model.gradient_checkpointing_enable()
        precision = chosen_precision(settings, world.device)
        objective = world.wrap(Objective(model), precision)
        optimizer = make_optimizer(settings, model)
        start, seconds = 0, 0.0
        seed_everything(settings.seed, world.rank)
        if found is not None:
            folder, note = found
            start, seconds = note["step"], note["seconds"]
            if not load(folder, model, optimizer, step=start, rank=world.rank, many=world.is_many):
                # There are more processes than before: the new ones have no random state yet.
                seed_everything(settings.seed, world.rank, start)
            log.info("resumed %s after step %d", settings.out, start)

        forward = torch.compile(objective) if settings.compile else objective
        parameters = list(model.parameters())
        targets = settings.sequences * (settings.length - 1)
        signals = stack.enter_context(Signals(patient=world.size > 1))
        progress = Progress(start=start, steps=settings.steps, every=settings.log_every, quiet=not world.is_first)
        stack.callback(progress.close)
        events = Path(settings.out) / "tensorboard" if settings.tensorboard and world.is_first else None
        board = Board(events, start=start)
        stack.callback(board.close)
        began = time.monotonic() - seconds
        objective.train()

        for step in range(start + 1, settings.steps + 1):
            rate = learning_rate(
                step,
                highest=settings.learning_rate,
                final=settings.final_learning_rate,
                warmup=settings.warmup,
                steps=settings.steps,
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            total = torch.zeros(2, dtype=torch.float64, device=world.device)
            for ids, positions, is_last in micro_batches(settings, batches, step, world):
                with world.gathering(objective, is_last):
                    with torch.autocast(world.device.type, torch.bfloat16, enabled=precision == torch.bfloat16):
                        loss = forward(ids, positions) / targets
                    # Processes average their gradients, but the loss is the sum of their shares.
                    (loss * world.size).backward()
                total[0] += loss.detach()
            total[1] = signals.came is not None
            loss_now, signalled = world.sum(total).tolist()
            world.gather_whole(parameters)
            gradient = float(clip(parameters, settings.clip))
            if not math.isfinite(loss_now) or not math.isfinite(gradient):
                raise FloatingPointError(not_finite(settings, step, loss_now, gradient))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

            line: dict[str, Any] = {"step": step, "loss": loss_now, "tokens": step * settings.batch_tokens}
            line |= {"seconds": round(time.monotonic() - began, 3), "lr": rate, "gradient": gradient}
            if step % settings.evaluate_every == 0 or step == settings.steps:
                line["held_out"] = held_out.losses(objective, world, precision)
            if settings.maps_every and (step % settings.maps_every == 0 or step == settings.steps):
                save_snapshot(Run(settings.out).map_path(step), model, held_out.sample(), world)
            if writer is not None:
                writer.log(line)
            board.add(line)
            progress.tell(line, settings.batch_tokens)
            if step % settings.checkpoint_every == 0 or step == settings.steps or signalled:
                note = {"step": step, "seconds": line["seconds"], "tokens": line["tokens"], "data": tokens.sha256}
                save_checkpoint(settings, world, writer, model, optimizer, note)
            if signalled and step < settings.steps:
                raise Stopped(
                    f"stopped after step {step} of {settings.steps}, with a checkpoint. Go on with: "
                    f"lengthwise train --resume --out {settings.out}",
                    signals.came or signal.SIGTERM,
                )

        weights = whole_weights(model)
        world.alone(lambda: finish(settings, writer, model, weights, tokenizer))


def read_data(settings: Settings) -> tuple[PreTrainedTokenizerFast, Tokens, Tokens]:
    """The tokenizer, and the tokens to train on and to measure with; processes of one machine wait for the first."""
    verify = os.environ.get("LOCAL_RANK", "0") == "0"
    tokenizer = load_tokenizer(settings.tokenizer, source=settings.data)
    if settings.held_out is None:
        train, held_out = (prepare(settings.data, tokenizer, split=s, verify=verify) for s in ("train", "held-out"))
    else:
        sources = (settings.data, settings.held_out)
        train, held_out = (prepare(source, tokenizer, split="all", verify=verify) for source in sources)
    return tokenizer, train, held_out


def model_config(settings: Settings, vocabulary: int, *, end: int | None = None) -> LengthwiseConfig:
    """The model's config; the vocabulary is rounded up to 64, which matrix units like: 50,257 is 50,304."""
    sizes = {"n_positions": settings.length, "vocab_size": -(-vocabulary // 64) * 64} | (settings.sizes or {})
    return LengthwiseConfig.preset(
        settings.preset,
        encoding=settings.encoding,
        encoding_options=settings.encoding_options,
        share_encoding=settings.share_encoding,
        bos_token_id=end,
        eos_token_id=end,
        **sizes,
    )


def chosen_precision(settings: Settings, device: torch.device) -> torch.dtype:
    """What matrix products are taken in; weights, gradients and encodings are float32 always."""
    if settings.precision == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if settings.precision == "bfloat16" else torch.float32


def make_optimizer(settings: Settings, model: LengthwiseForCausalLM) -> AdamW:
    """AdamW with the model's own groups: matrices decay, and what encodings say must not does not."""
    groups = [
        {**group, "params": family}
        for group in model.parameter_groups(settings.weight_decay)
        for family in families(group["params"])
    ]
    return AdamW(groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), eps=1e-8)


def micro_batches(
    settings: Settings, batches: Batches, step: int, world: World
) -> Iterator[tuple[Tensor, Tensor | None, bool]]:
    """This process's share of a step's sequences, a few at a time: tokens, positions, and whether they are the last."""
    share = world.share(settings.sequences)
    first = (step - 1) * settings.sequences
    for part in range(share.start, share.stop, settings.micro_batch):
        stop = min(part + settings.micro_batch, share.stop)
        ids = batches.read(first + part, stop - part)
        positions = document_positions(ids, batches.tokens.end) if settings.separate_documents else None
        yield ids.to(world.device), None if positions is None else positions.to(world.device), stop == share.stop


def not_finite(settings: Settings, step: int, loss: float, gradient: float) -> str:
    """What is said of a loss that is not a number."""
    kept = Run(settings.out).checkpoints
    last = f"the last good checkpoint is {kept[-1]}" if kept else "there was no checkpoint yet"
    return (
        f"loss and gradient must be finite; at step {step} the loss is {loss} and the gradient's norm {gradient}. "
        f"Nothing of this step is kept: {last}. Start a new run with a smaller --learning_rate or --clip."
    )
