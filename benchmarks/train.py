"""What the training loop costs beside the model: its tokens a second against a bare loop of the same model.

Every step of the run is followed by one of the bare loop, in the same process, so that both meet the same noise; the
bare loop has the same weights, batch, clipping and AdamW, and no data, logs, checkpoints or held-out loss.

    python benchmarks/train.py --steps 250
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from certificate import certificate
from torch.nn.utils import clip_grad_norm_

from lengthwise.model import LengthwiseForCausalLM
from lengthwise.runs import RunWriter
from lengthwise.train import TrainConfig, train
from lengthwise.train.setup import make_optimizer, model_config


class BareLoop:
    """The model, a batch in memory, and nothing else."""

    def __init__(self, config: TrainConfig, vocabulary: int) -> None:
        settings = config.resolved()
        self.model = LengthwiseForCausalLM(model_config(settings, vocabulary)).train()
        self.optimizer = make_optimizer(settings, self.model)
        self.tokens = torch.randint(vocabulary, (settings.sequences, settings.length))
        self.clocks = {"wall": 0.0, "cpu": 0.0}

    def step(self) -> None:
        began = time.perf_counter(), time.process_time()
        self.model.loss(self.tokens, self.tokens).backward()
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.clocks["wall"] += time.perf_counter() - began[0]
        self.clocks["cpu"] += time.process_time() - began[1]


def measure(steps: int, encoding: str) -> dict[str, float]:
    """Tokens a second of the run over those of the bare loop, by the wall's clock and by the processor's."""
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(out=f"{folder}/run", encoding=encoding, steps=steps, checkpoint_every=steps)
        bare, log, began = BareLoop(config, 1024), RunWriter.log, {}

        def logged(self: RunWriter, line: dict[str, object]) -> None:
            log(self, line)
            if line["step"] == 2:  # the first two warm everything up
                began.update(wall=time.perf_counter(), cpu=time.process_time())
                bare.clocks.update(wall=0.0, cpu=0.0)
            if line["step"] != 2:
                bare.step()

        RunWriter.log = logged
        train(config)
        RunWriter.log = log
    now = {"wall": time.perf_counter(), "cpu": time.process_time()}
    return {clock: bare.clocks[clock] / (now[clock] - began[clock] - bare.clocks[clock]) for clock in now}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--encoding", default="cable")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/train.jsonl")
    arguments = parser.parse_args()
    found = {"preset": "nano", "encoding": arguments.encoding, "steps": arguments.steps}
    found |= {f"tokens_per_second_by_{k}": round(v, 4) for k, v in measure(arguments.steps, arguments.encoding).items()}
    line = json.dumps(
        found | certificate(f"python benchmarks/train.py --steps {arguments.steps} --encoding {arguments.encoding}")
    )
    with arguments.out.open("a") as file:
        file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
