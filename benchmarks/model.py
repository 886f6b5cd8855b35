"""The whole model against its rivals, in turn in one process: a training step, a decode step, and the memory of length.

    python benchmarks/model.py train             preset tiny, 1,024 tokens: every encoding, and transformers' GPT-2
    python benchmarks/model.py study             a batch of the full study, preset nano: every encoding of it
    python benchmarks/model.py decode            preset small, one token after 4,096 cached ones
    python benchmarks/model.py memory            preset tiny, forward over 16,384 tokens, each in a process of its own
    python benchmarks/model.py loss              the loss of 32,768 tokens through a vocabulary of 50,304

Losses of rivals are compared before they are timed. Rivals run round robin; the ratio is the median over rounds of the
time divided by that of encoding "none" in the same round. One JSON line a rival, with its birth certificate, kept in
benchmarks/results; `make bench-model` runs all five.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch
from certificate import certificate
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM, convert_gpt2
from lengthwise.model.losses import head_loss
from lengthwise.study.config import StudyConfig
from lengthwise.study.runs import training_of
from lengthwise.train.setup import model_config

RESULTS = Path(__file__).parent / "results"
STUDY = Path(__file__).parents[1] / "docs/results/full-stdlib/study.json"
BASE = "none"
LENGTHS = {"train": 1024, "study": 128, "decode": 4096, "memory": 16384, "loss": 32768}
ROUNDS = {"train": 15, "study": 20, "decode": 150}
Job = Callable[[], object]


def train_jobs(names: list[str], length: int) -> dict[str, Job]:
    """A forward and a backward pass of preset tiny, as training takes them."""
    ids = torch.randint(0, 50304, (1, length))

    def ours(name: str) -> Job:
        torch.manual_seed(0)
        model = LengthwiseForCausalLM(LengthwiseConfig.preset("tiny", encoding=name)).train()

        def step() -> None:
            model.zero_grad()
            model.loss(ids, ids).backward()

        return step

    sizes = LengthwiseConfig.preset("tiny", encoding="learned")
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    fields = {name: getattr(sizes, name) for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")}
    gpt2 = GPT2LMHeadModel(GPT2Config(**fields, **dropouts, attn_implementation="sdpa", use_cache=False)).train()
    same = convert_gpt2(gpt2)
    with torch.no_grad():
        a, b = gpt2(ids, labels=ids).loss, same.loss(ids, ids)
    assert abs(a - b) < 1e-5 * a, f"the rivals differ: {a} and {b}"

    def theirs() -> None:
        gpt2.zero_grad()
        gpt2(ids, labels=ids).loss.backward()

    return {name: ours(name) for name in names} | {"transformers GPT-2, sdpa": theirs}


def study_jobs(names: list[str], length: int) -> dict[str, Job]:
    """A forward and a backward pass over a batch of the full study, with the model that it trains for each encoding."""

    def ours(name: str) -> Job:
        torch.manual_seed(0)
        config = training_of(StudyConfig(), name).resolved()
        model = LengthwiseForCausalLM(model_config(config, 1024)).train()
        ids = torch.randint(0, 1024, (config.batch_tokens // length, length))

        def step() -> None:
            model.zero_grad()
            model.loss(ids, ids).backward()

        return step

    return {name: ours(name) for name in names}


def encodings_of_the_study() -> list[str]:
    """Every encoding of the stored full study."""
    return [row["encoding"] for row in json.loads(STUDY.read_text())["rows"]]


def decode_jobs(names: list[str], length: int) -> dict[str, Job]:
    """One token of preset small after `length` cached ones; what a step adds to the cache is taken off again."""
    prompt, token = torch.randint(0, 50304, (1, length)), torch.randint(0, 50304, (1, 1))

    def ours(name: str) -> Job:
        torch.manual_seed(0)
        options = {"length": length + 1} if name == "learned" else {}
        config = LengthwiseConfig.preset("small", encoding=name, encoding_options=options)
        model = LengthwiseForCausalLM(config).eval()
        cache = DynamicCache(config=config)
        with torch.no_grad():
            for part in prompt.split(512, 1):
                model(part, past_key_values=cache, logits_to_keep=1)

        @torch.no_grad()
        def step() -> None:
            model(token, past_key_values=cache)
            cache.crop(-1)

        return step

    return {name: ours(name) for name in names}


def round_robin(jobs: dict[str, Job], rounds: int) -> dict[str, dict[str, object]]:
    """Median seconds, and median and quartiles of the ratio to encoding "none" of the same round."""
    times = timed_in_turn(jobs, rounds)
    ratios = {name: [t / base for t, base in zip(found, times[BASE], strict=True)] for name, found in times.items()}
    return {
        name: {
            "rounds": rounds,
            "seconds": median(times[name]),
            "ratio": median(ratios[name]),
            "quartiles": quantiles(ratios[name])[::2],
        }
        for name in jobs
    }


def timed_in_turn(jobs: dict[str, Job], rounds: int) -> dict[str, list[float]]:
    """The seconds of every job in every round, after one that does not count."""
    for job in jobs.values():
        job()
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            times[name].append(time.perf_counter() - start)
    return times


def memory(name: str, length: int) -> float:
    """Peak gigabytes of a process that runs one forward pass over so many tokens and keeps one token's logits."""
    code = f"""
import torch
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
options = {{"length": {length}}} if {name!r} == "learned" else {{}}
model = LengthwiseForCausalLM(LengthwiseConfig.preset("tiny", encoding={name!r}, encoding_options=options)).eval()
with torch.no_grad():
    out = model(torch.randint(0, 50304, (1, {length})), logits_to_keep=1, use_cache=False)
assert out.logits.isfinite().all()
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return used.ru_maxrss * 1024 / 1e9


def loss_seconds(length: int) -> dict[str, float]:
    """Seconds and peak gigabytes of the loss of so many tokens through GPT-2's vocabulary, gradient included."""
    x = torch.randn(1, length, 512, requires_grad=True)
    weight = torch.randn(50304, 512, requires_grad=True)
    labels = torch.randint(0, 50304, (1, length))
    start = time.perf_counter()
    head_loss(x, weight, labels).backward()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=[*LENGTHS])
    parser.add_argument("--encodings", nargs="+")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--length", type=int)
    chosen = parser.parse_args()
    length = chosen.length or LENGTHS[chosen.what]
    usual = encodings_of_the_study() if chosen.what == "study" else ["none", "kerple", "cable"]
    encodings = chosen.encodings or usual
    if chosen.what == "memory":
        rows = {name: {"gigabytes": memory(name, length)} for name in encodings}
    elif chosen.what == "loss":
        rows = {"head_loss": loss_seconds(length)}
    else:
        jobs = {"train": train_jobs, "study": study_jobs, "decode": decode_jobs}[chosen.what](encodings, length)
        rows = round_robin(jobs, chosen.rounds or ROUNDS[chosen.what])
    born = certificate("python benchmarks/model.py " + " ".join(sys.argv[1:]))
    lines = [
        json.dumps({"what": chosen.what, "rival": name, "length": length} | row | {"born": born})
        for name, row in rows.items()
    ]
    print(*lines, sep="\n")
    (RESULTS / f"model-{chosen.what}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
