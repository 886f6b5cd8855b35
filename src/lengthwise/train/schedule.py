"""The learning rate: up in a straight line, then down along half a cosine. A function of the step alone."""

import math


def learning_rate(step: int, *, highest: float, final: float, warmup: int, steps: int) -> float:
    """The rate of a step, counted from 1.

    >>> [round(learning_rate(s, highest=1.0, final=0.1, warmup=2, steps=6), 3) for s in (1, 2, 3, 5, 6)]
    [0.5, 1.0, 1.0, 0.55, 0.232]
    """
    if step <= warmup:
        return highest * step / warmup
    done = (step - 1 - warmup) / (steps - warmup)
    return final + 0.5 * (1 + math.cos(math.pi * done)) * (highest - final)
