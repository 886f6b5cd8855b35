"""Losses of short trainings, kept in the repository: a change of the recipe, the data or the model's numbers shows.

`python tests/test_golden_losses.py` writes them anew; say in the commit why they changed.
"""

import json
import tempfile
from pathlib import Path

import pytest

from lengthwise.train import TrainConfig, train

GOLDEN = Path(__file__).with_name("golden_losses.json")
CASES = {"cable": "adamw", "t5-clamped": "adamw", "rope": "adamw", "fire": "muon"}
"""The optimizer of each encoding."""
STEPS = 20
TOLERANCE = {"adamw": 1e-5, "muon": 2 * 8.6e-5}
"""Relative, by optimizer. Processors sum in different orders: by row_block instead of the kernel the largest difference
is 3e-7. They round Muon's iteration in bfloat16 differently too: float32 in its place changes a loss by up to 8.6e-5,
so two that round differently may be twice that apart. A learning rate that is 1 % off changes one by 8e-3.
"""


def losses(encoding: str, folder: Path) -> list[float]:
    """Of every step of preset nano on a text of our own: the standard library's differs from Python to Python."""
    text = folder / "corpus"
    text.mkdir(parents=True)
    for number in range(60):
        words = [f"{(number * k * k + 7 * k) % 97} by {(number + k) % 13}" for k in range(200)]
        (text / f"{number:02}.txt").write_text("; ".join(words) + "\n")
    config = TrainConfig(
        out=str(folder / "run"),
        encoding=encoding,
        data=str(text),
        tokenizer="bytes",
        steps=STEPS,
        optimizer=CASES[encoding],
        learning_rate=1e-3,
        final_learning_rate=1e-4,
        encoding_learning_rate=1e-2 if CASES[encoding] == "muon" else 1e-3,
        warmup=10,
        evaluate_every=STEPS,
        evaluate_tokens=512,
        device="cpu",
    )
    return [line["loss"] for line in train(config).metrics]


LATER = ("t5-clamped", "rope")
"""Ten seconds each; their kernels have laws of their own."""


@pytest.mark.parametrize(
    "encoding", [pytest.param(name, marks=[pytest.mark.prove] if name in LATER else []) for name in CASES]
)
def test_the_losses_of_twenty_steps_are_those_in_the_repository(encoding, tmp_path, monkeypatch):
    monkeypatch.setenv("LENGTHWISE_DATA", str(tmp_path / "cache"))
    golden = json.loads(GOLDEN.read_text())[encoding]
    assert losses(encoding, tmp_path) == pytest.approx(golden, rel=TOLERANCE[CASES[encoding]])
    assert len(golden) == STEPS
    assert golden[-1] < 0.8 * golden[0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        kept = {name: losses(name, Path(folder) / name) for name in CASES}
    GOLDEN.write_text(json.dumps(kept, indent=1) + "\n")
