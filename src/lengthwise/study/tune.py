"""The learning rates of each encoding, chosen by one rule with an equal budget: none is starved by another's rate.

Every encoding has a ladder of six rates and four short trainings: at the middle two, and then at the two beyond the
better of them, up or down. One with parameters of its own has the ladder for these, the model's rate staying the
recipe's; one without has it for the model. Each is trained without a twentieth of the training text, and the loss on
that twentieth, at the training length, decides. The held-out text, which is what a study reports, is never looked at,
nor is the seed used again.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from lengthwise.errors import check_int
from lengthwise.files import json_text, read_stored, write_atomic
from lengthwise.origin import origin
from lengthwise.study.config import StudyConfig
from lengthwise.study.engine import StudyProgress, train_runs
from lengthwise.study.engines import make_engine
from lengthwise.study.record import TrainingOutcome
from lengthwise.study.results import TUNING
from lengthwise.study.runs import StudyRun, run_name, training_of
from lengthwise.train.config import TrainConfig, recipe_for
from lengthwise.train.distributed import encoding_parameters
from lengthwise.train.setup import MODELS, model_config

MODEL_LADDER = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Times the recipe's rate, for the model of an encoding without parameters."""
ENCODING_LADDER = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Times the recipe's rate, for an encoding's own parameters."""
MIDDLE, LOWER, UPPER = slice(2, 4), slice(0, 2), slice(4, 6)
"""Rungs of a ladder."""
SEED = 7
VALIDATION_TOKENS = 65_536


def with_tuned_rates(config: StudyConfig) -> StudyConfig:
    """The study with the rates that were chosen for each of its encodings; tries that are there are not repeated."""
    check_int("tune_steps", config.tune_steps)
    _refuse_given_rates(config)
    ladders = {encoding: rate_ladder(config, encoding) for encoding in config.encodings}
    results = _train(config, {encoding: ladder[MIDDLE] for encoding, ladder in ladders.items()})
    beyond = {encoding: ladder[next_rungs(*results[encoding])] for encoding, ladder in ladders.items()}
    for encoding, further in _train(config, beyond).items():
        results[encoding] += further
    chosen = {encoding: _best_rates(encoding, tried) for encoding, tried in results.items()}
    about = {"steps": config.tune_steps, "data": config.training.data, "seed": SEED}
    path = Path(config.out) / TUNING
    content = about | {"chosen": chosen, "tries": results, "born": _certificate(read_stored(path), about, results)}
    write_atomic(path, json_text(content))
    return dataclasses.replace(config, rates=config.rates | chosen)


def _certificate(stored: dict[str, Any], about: dict[str, Any], tries: dict[str, list[dict[str, Any]]]) -> Any:
    """That of an earlier call, which made all of these tries, or else this call's; a try has that of its training."""
    before = stored.get("tries", {})
    is_stored = about.items() <= stored.items() and all(before.get(name) == tried for name, tried in tries.items())
    return stored["born"] if is_stored and "born" in stored else origin()


def _refuse_given_rates(config: StudyConfig) -> None:
    """An error for rates that would be chosen anew; --learning-rate is where the ladders begin."""
    if both := [repr(encoding) for encoding in config.encodings if encoding in config.rates]:
        raise ValueError(f"--tune chooses all rates, got --rates for {', '.join(both)}; leave one of them out")
    for name in ("encoding_learning_rate", "final_learning_rate"):
        if (rate := getattr(config.training, name)) is not None:
            raise ValueError(f"--tune chooses the rates, got --{name.replace('_', '-')} {rate:g}; leave one out")


def _train(config: StudyConfig, tries: dict[str, list[StudyRun]]) -> dict[str, list[dict[str, Any]]]:
    """The result of every try."""
    every = [run for runs in tries.values() for run in runs]
    for run in every:
        run.check_finished()
    waiting = [run for run in every if not run.is_finished]
    engine = make_engine(config, waiting)
    try:
        with StudyProgress(every) as progress:
            # A try that fails, for instance at too high a rate, is one that is not chosen.
            # Its log has a folder of its own: a try's number could be a run's seed.
            ended = train_runs(waiting, out=Path(config.out) / "tuning", engine=engine, progress=progress)
    finally:
        engine.close()
    return {encoding: [_result(run, ended.get(run.name)) for run in runs] for encoding, runs in tries.items()}


def next_rungs(low: dict[str, Any], high: dict[str, Any]) -> slice:
    """Where to go on from the results of the middle two: to the better side, and down where neither ended well.

    >>> next_rungs({"loss": 2.7}, {"loss": 2.6}) == UPPER, next_rungs({"loss": 2.7}, {"loss": None}) == LOWER
    (True, True)
    """
    losses = [math.inf if result["loss"] is None else result["loss"] for result in (low, high)]
    return UPPER if losses[1] < losses[0] else LOWER


def rate_ladder(config: StudyConfig, encoding: str) -> list[StudyRun]:
    """The trainings of one encoding that may be tried, from the lowest rate to the highest."""
    base = dataclasses.replace(
        training_of(config, encoding),
        seed=SEED,
        resume=True,
        tuning=True,
        steps=config.tune_steps,
        evaluate_every=config.tune_steps,
        evaluate_tokens=VALIDATION_TOKENS,
    )
    length = base.resolved().length
    rate = config.training.learning_rate or recipe_for(base.objective, base.preset, base.optimizer).learning_rate
    if has_parameters(base):
        rates = [(rate, rate * factor) for factor in ENCODING_LADDER]
    else:
        rates = [(rate * factor, rate * factor) for factor in MODEL_LADDER]
    return [
        StudyRun(
            encoding,
            SEED,
            dataclasses.replace(
                base,
                out=str(Path(config.out) / "tuning" / run_name(encoding, number)),
                evaluate_lengths=[length],
                learning_rate=model,
                final_learning_rate=model / 10,
                encoding_learning_rate=own,
            ),
        )
        for number, (model, own) in enumerate(rates, 1)
    ]


def has_parameters(config: TrainConfig) -> bool:
    """Whether the encoding of a run learns anything itself."""
    with torch.device("meta"):
        resolved = config.resolved()
        model = MODELS[resolved.objective](model_config(resolved, vocabulary=64))
    return bool(encoding_parameters(model))


def _result(run: StudyRun, outcome: TrainingOutcome | None) -> dict[str, Any]:
    """The rates of a try and its loss; None with the reason where it has none."""
    resolved = run.resolved
    result: dict[str, Any] = {
        "learning_rate": resolved.learning_rate,
        "encoding_learning_rate": resolved.encoding_learning_rate,
        "loss": None,
    }
    if run.run is None or not run.is_finished:
        return result | {"failure": (outcome and outcome.failure) or "not finished"}
    if calls := run.run.born:
        result["born"] = calls
    (loss,) = run.run.metrics[-1]["held_out"].values()
    return result | ({"loss": loss} if math.isfinite(loss) else {"failure": f"diverged: its loss is {loss}"})


def _best_rates(encoding: str, results: list[dict[str, Any]]) -> dict[str, float]:
    ended_well = [result for result in results if result["loss"] is not None]
    if not ended_well:
        raise RuntimeError(f"at least one try of {encoding!r} must end well, got none: {results[-1]['failure']}")
    best = min(ended_well, key=lambda result: result["loss"])
    return {
        "learning_rate": best["learning_rate"],
        "encoding_learning_rate": best["encoding_learning_rate"],
        "final_learning_rate": best["learning_rate"] / 10,
    }
