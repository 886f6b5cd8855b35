"""How long it takes to see every head of GPT-2 Small at 2,048 tokens, and how much memory, beyond the forward pass.

python benchmarks/see.py            one JSON line per case
Each case is a process of its own, so that its peak of memory is its own.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from certificate import certificate

CASES = ("gpt2 scores", "gpt2 weights", "alibi bias", "cable bias", "cable scores")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--case", choices=CASES)
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(measure(chosen.case, chosen.length)))
        return
    for case in CASES:
        command = [sys.executable, __file__, "--case", case, "--length", str(chosen.length)]
        subprocess.run(command, check=True)


def make_model(name: str, length: int) -> torch.nn.Module:
    """GPT-2 Small, 12 layers of 12 heads, at its initial parameters."""
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(n_positions=length)).eval()
    from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM

    return LengthwiseForCausalLM(LengthwiseConfig.preset("small", encoding=name, n_positions=length)).eval()


def measure(case: str, length: int) -> dict[str, object]:
    from lengthwise.inspect import position_maps
    from lengthwise.views.style import save_picture

    name, quantity = case.split()
    model = make_model(name, length)
    ids = torch.randint(50257, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        body = model.base_model
        body(ids, use_cache=False)
        forward, forward_work = min(timed(lambda: body(ids, use_cache=False)) for _ in range(3))
    before = resident()
    with Peak() as peak, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "all.png"

        def see() -> None:
            save_picture(position_maps(model, ids, "all", quantity).overview(), path)

        seconds, work = timed(see)
        size = path.stat().st_size
    return {
        "case": case,
        "length": length,
        "forward_seconds": round(forward, 2),
        "seconds_beyond_forward": round(seconds - forward, 2),
        "processor_seconds_beyond_forward": round(work - forward_work, 2),
        "extra_megabytes": round((peak.most - before) / 2**20),
        "picture_megabytes": round(size / 2**20, 2),
        "born": certificate(" ".join(["python benchmarks/see.py", *sys.argv[1:]])),
    }


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor, which tells more where the machine is shared."""
    start, work = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - work


def resident() -> int:
    """Bytes of memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class Peak:
    """The most memory this process had while inside, looked at every few milliseconds."""

    def __enter__(self) -> "Peak":
        self.most, self.over = resident(), threading.Event()
        self.thread = threading.Thread(target=self._look)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.over.wait(0.005):
            self.most = max(self.most, resident())


if __name__ == "__main__":
    main()
