"""Accelerated models against transformers' own, in turn in one process: a training step, a decoded token, and memory.

    python benchmarks/accelerated.py train        forward and backward at 1,024 and 2,048 tokens, batch 1
    python benchmarks/accelerated.py decode       a token after 2,048 cached ones, and the ones after it, one a round
    python benchmarks/accelerated.py memory       peak of a training step at 2,048, each in a process of its own

6 layers, 8 heads of 64, vocabulary 4,096, no dropout. Logits and gradients are compared before anything is timed. The
ratio is to the best of transformers' attention implementations that the family has. With --quick all is small, to see
that it runs, and nothing is stored.
"""

import argparse
import copy
import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import torch
import transformers as hf
from in_turn import Job, check_close, ratio_to_best, write

import lengthwise as lw

V = 4096
T5 = {"vocab_size": V, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_heads": 8, "num_layers": 6, "dropout_rate": 0.0}
T5 |= {"num_decoder_layers": 6, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}
FALCON = {"vocab_size": V, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "alibi": True}
FALCON |= {"multi_query": False, "new_decoder_architecture": False}
MPNET = {"vocab_size": V, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
MPNET |= {"intermediate_size": 2048, "max_position_embeddings": 4098}
MPNET |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
    "umt5": lambda: hf.UMT5ForConditionalGeneration(hf.UMT5Config(**T5)),
    "mpnet": lambda: hf.MPNetForMaskedLM(hf.MPNetConfig(**MPNET)),
    "mpt": lambda: hf.MptForCausalLM(hf.MptConfig(vocab_size=V, d_model=512, n_layers=6, n_heads=8, max_seq_len=4096)),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=V, hidden_size=512, n_layer=6, n_head=8)),
    "falcon": lambda: hf.FalconForCausalLM(hf.FalconConfig(**FALCON)),
}
CHOICES = {"t5": ("sdpa", "eager"), "umt5": ("sdpa", "eager"), "falcon": ("sdpa",)}
"""The implementations that a family has; the others have one, which has no name to choose it by."""
LIMITS = {
    1024: {"t5": 0.72, "umt5": 0.72, "mpnet": 0.80, "mpt": 0.80, "bloom": 0.88, "falcon": 0.88},
    2048: {"t5": 0.52, "umt5": 0.52, "mpnet": 0.64, "mpt": 0.52, "bloom": 0.64, "falcon": 0.75},
}
MEMORY_LIMIT = {"falcon": 0.9}
PAIRS = ("t5", "umt5")
LONGEST, SMALLER = 2048, 16
"""Tokens, and what they are divided by where all is small."""


def make(name: str) -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[name]()


def rivals(name: str) -> tuple[hf.PreTrainedModel, dict[str, hf.PreTrainedModel]]:
    """An accelerated model, and the same one under each implementation of its own."""
    own = make(name)
    others = {}
    for choice in CHOICES.get(name, ("own",)):
        others[choice] = copy.deepcopy(own)
        if choice != "own":
            others[choice].set_attn_implementation(choice)
    return lw.accelerate(own), others


def inputs(name: str, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, V, (1, length), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "labels": ids}
    return given if name in (*PAIRS, "mpnet") else given | {"use_cache": False}


def step_of(model: hf.PreTrainedModel, given: dict[str, torch.Tensor]) -> Job:
    model.train()

    def step() -> None:
        model.zero_grad()
        model(**given).loss.backward()

    return step


def check(name: str, ours: hf.PreTrainedModel, others: dict[str, hf.PreTrainedModel]) -> None:
    """Logits and gradients at 300 tokens."""
    given = inputs(name, 300)
    gradients = {}
    for label, model in {"ours": ours, **others}.items():
        model.train()
        output = model(**given)
        output.loss.backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        gradients[label] = output.logits.detach(), flat
    for label in others:
        check_close(gradients["ours"][0], gradients[label][0], f"{name}, logits against {label}")
        check_close(gradients["ours"][1], gradients[label][1], f"{name}, gradients against {label}")


def train(names: list[str], rounds: int, quick: bool, lengths: list[int]) -> Iterator[dict[str, object]]:
    for name in names:
        ours, others = rivals(name)
        check(name, ours, others)
        for asked in lengths:
            limits, length = LIMITS[asked], asked // SMALLER if quick else asked
            given = inputs(name, length)
            jobs = {label: step_of(model, given) for label, model in others.items()}
            row = ratio_to_best(step_of(ours, given), jobs, rounds, limits[name])
            yield {"what": "train", "case": f"{name} {length}", "length": length} | row


def token_of(model: hf.PreTrainedModel, name: str, length: int) -> tuple[Job, torch.Tensor]:
    """One token after those that are cached; it is cached too, as in `generate`. And the logits of the first."""
    model.eval()
    ids = inputs(name, length)["input_ids"]
    given: dict[str, object] = {}
    with torch.no_grad():
        if name in PAIRS:
            given = {"encoder_outputs": model.get_encoder()(ids[:, :64])}
            out = model(decoder_input_ids=ids, **given, use_cache=True)
        else:
            out = model(ids, use_cache=True)
    cache, key = out.past_key_values, "decoder_input_ids" if name in PAIRS else "input_ids"
    token = ids[:, :1]

    @torch.no_grad()
    def step() -> torch.Tensor:
        return model(**{key: token}, **given, past_key_values=cache, use_cache=True).logits

    return step, step()


def decode(names: list[str], rounds: int, quick: bool) -> Iterator[dict[str, object]]:
    length = LONGEST // SMALLER if quick else LONGEST
    for name in names:
        if name == "mpnet":
            continue  # an encoder
        ours, others = rivals(name)
        job, logits = token_of(ours, name, length)
        jobs = {}
        for label, model in others.items():
            jobs[label], expected = token_of(model, name, length)
            check_close(logits, expected, f"{name}, a decoded token against {label}")
        row = ratio_to_best(job, jobs, rounds, 1.05)
        yield {"what": "decode", "case": f"{name} after {length}", "length": length} | row


def grown(name: str, choice: str, length: int) -> float:
    """By how many gigabytes a step over so many tokens raises the peak of a process over a step of 64."""
    command = [sys.executable, __file__, "grow", "--models", name, "--choice", choice, "--length", str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return float(done.stdout.split()[-1])


def grow(name: str, choice: str, length: int) -> float:
    model = make(name)
    if choice == "ours":
        lw.accelerate(model)
    elif choice != "own":
        model.set_attn_implementation(choice)
    step_of(model, inputs(name, 64))()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step_of(model, inputs(name, length))()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e9


def memory(names: list[str], quick: bool) -> Iterator[dict[str, object]]:
    length = LONGEST // SMALLER if quick else LONGEST
    for name in names:
        ours = grown(name, "ours", length)
        others = {choice: grown(name, choice, length) for choice in CHOICES.get(name, ("own",))}
        best, limit = min(others, key=others.__getitem__), MEMORY_LIMIT.get(name, 0.55)
        ratio = ours / others[best]
        row = {"best": best, "gigabytes": {"ours": ours, **others}, "ratio": ratio, "limit": limit}
        verdict = "within" if ratio <= limit else "over"
        yield {"what": "memory", "case": f"{name} memory {length}", "length": length, "verdict": verdict} | row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "decode", "memory", "grow"])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--choice")
    parser.add_argument("--length", type=int)
    parser.add_argument("--lengths", nargs="+", type=int, choices=list(LIMITS), default=list(LIMITS), help="of train")
    chosen = parser.parse_args()
    if chosen.what == "grow":
        print(grow(chosen.models[0], chosen.choice, chosen.length))
        return
    if chosen.what == "memory":
        rows = memory(chosen.models, chosen.quick)
    elif chosen.what == "train":
        rows = train(chosen.models, 6 if chosen.quick else chosen.rounds or 20, chosen.quick, chosen.lengths)
    else:
        rows = decode(chosen.models, 6 if chosen.quick else chosen.rounds or 100, chosen.quick)
    write("accelerated", rows, store=not chosen.quick)


if __name__ == "__main__":
    main()
