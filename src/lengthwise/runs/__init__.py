"""A run is a folder; only this package reads and writes it.

config.yaml         the whole config of the run; `lengthwise train --config` repeats it
metrics.jsonl       one JSON object a step: step, loss, tokens, seconds, lr, gradient, and held_out at some
checkpoints/        step-00000100/ and so on: the last few, for `--resume`
maps/               snapshots of the position maps, with --maps-every
final/              the trained model with its tokenizer, as `save_pretrained` writes it
"""

from lengthwise.runs.run import Run
from lengthwise.runs.writer import RunWriter

__all__ = ["Run", "RunWriter"]
