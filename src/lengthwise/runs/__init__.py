"""A run is a folder, and this is the only place that reads and writes one.

config.yaml         everything that the run was started with; `lengthwise train --config` repeats it
metrics.jsonl       one JSON object a step: step, loss, tokens, seconds, lr, gradient, and held_out at some
checkpoints/        step-00000100/ and so on: what `--resume` needs, the last few of them
maps/               snapshots of the position maps, if they were asked for
final/              the trained model with its tokenizer, as `save_pretrained` writes it
"""

from lengthwise.runs.run import Run
from lengthwise.runs.writer import RunWriter

__all__ = ["Run", "RunWriter"]
