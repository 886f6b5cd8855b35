"""Encoders against their rivals, in turn in one process: a masked training step, and what padding costs.

    python benchmarks/encoder.py train           preset tiny, 1,024 tokens, 15 % masked; and transformers' BERT
    python benchmarks/encoder.py padding         preset tiny, 8 texts of up to 1,024 tokens, 60 % filled on average
    python benchmarks/encoder.py train --quick   two rounds of 128 tokens, not kept: that it runs, not how fast

A step is forward and backward. Ours has logits for the masked tokens alone, as its training has; BERT for all, as its
own has, and "transformers BERT, sdpa, same head" for as many as ours. Before padding is timed, the losses of the padded
and the unpadded way are compared. Rivals run round robin. A target is the median over rounds of a rival's time divided
by that of another in the same round, with its quartiles. One JSON line a rival and a target, with its birth
certificate, kept in benchmarks/results.
"""

import argparse
import json
import sys
from statistics import median, quantiles

import torch
from certificate import certificate
from model import RESULTS, Job, timed_in_turn
from transformers import BertConfig, BertForMaskedLM

from lengthwise.model import LengthwiseEncoderConfig, LengthwiseForMaskedLM
from lengthwise.model.losses import head_loss

MASK, VOCABULARY = 4, 30528
BERT = "transformers BERT, sdpa"
MOST_ABOVE_NONE, MOST_ABOVE_BERT, MOST_OF_PADDED = 1.05, 1.0, 0.75
"""The targets: of a step with an encoding beside one with none, and beside BERT; of a step without padding."""
FILLED = (0.3, 0.4, 0.5, 0.55, 0.6, 0.65, 0.8, 1.0)
"""The share of each of eight texts that is not padding; 0.6 on average."""


def masked(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of which 15 % are masked, and the labels of these."""
    ids = torch.randint(5, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))
    chosen = torch.rand(batch, length, generator=torch.Generator().manual_seed(1)) < 0.15
    return ids.masked_fill(chosen, MASK), ids.masked_fill(~chosen, -100)


def encoder(name: str) -> LengthwiseForMaskedLM:
    """Preset tiny, long enough for encodings with an end."""
    torch.manual_seed(0)
    return LengthwiseForMaskedLM(LengthwiseEncoderConfig.preset("tiny", encoding=name, n_positions=1024)).train()


def train_jobs(names: list[str], length: int) -> dict[str, Job]:
    """A forward and a backward pass of one text."""
    ids, labels = masked(1, length)

    def ours(name: str) -> Job:
        model = encoder(name)

        def step() -> None:
            model.zero_grad()
            model.loss(ids, labels).backward()

        return step

    sizes = LengthwiseEncoderConfig.preset("tiny", encoding="learned")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.n_embd,
        num_hidden_layers=sizes.n_layer,
        num_attention_heads=sizes.n_head,
        intermediate_size=4 * sizes.n_embd,
        max_position_embeddings=1024,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="sdpa",
    )
    bert = BertForMaskedLM(config).train()

    def theirs() -> None:
        bert.zero_grad()
        bert(ids, labels=labels).loss.backward()

    def same_head() -> None:
        bert.zero_grad()
        x = bert.bert(ids).last_hidden_state[labels != -100]
        transformed = bert.cls.predictions.transform(x)[None]
        head_loss(transformed, bert.cls.predictions.decoder.weight, labels[labels != -100][None]).backward()

    jobs: dict[str, Job] = {name: ours(name) for name in names}
    return jobs | {BERT: theirs, f"{BERT}, same head": same_head}


def padding_jobs(names: list[str], length: int) -> dict[str, Job]:
    """A forward and a backward pass of eight texts, padded and not."""
    ids, labels = masked(len(FILLED), length)
    sizes = torch.tensor([round(share * length) for share in FILLED])
    mask = (torch.arange(length) < sizes[:, None]).long()
    labels = labels.masked_fill(mask == 0, -100)
    jobs: dict[str, Job] = {}
    for name in names:
        model = encoder(name)

        def step(model: LengthwiseForMaskedLM = model, **options: object) -> torch.Tensor:
            model.zero_grad()
            x = model.transformer(ids, attention_mask=mask, **options).last_hidden_state
            loss = head_loss(x[labels != -100][None], model.lm_head.weight, labels[labels != -100][None])
            loss.backward()
            return loss.detach()

        def padded(step: Job = step) -> object:
            # Where hidden states are asked for, the layers see the padding.
            return step(output_hidden_states=True)

        a, b = step(), padded()
        assert abs(a - b) < 1e-5 * abs(b), f"{name}: {a} without padding and {b} with it"
        jobs |= {f"{name}, padded": padded, f"{name}, unpadded": step}
    return jobs


def targets(what: str, names: list[str]) -> list[tuple[str, str, float]]:
    """What is divided by what, and the most that it is to be."""
    if what == "padding":
        return [(f"{name}, unpadded", f"{name}, padded", MOST_OF_PADDED) for name in names]
    own = [name for name in names if name != "none"]
    beside_none = [(name, "none", MOST_ABOVE_NONE) for name in own if "none" in names]
    return beside_none + [(name, BERT, MOST_ABOVE_BERT) for name in own]


def spread(values: list[float]) -> dict[str, object]:
    """The median and the quartiles."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return {"median": median(values), "quartiles": [low, high]}


def main() -> None:
    """Time the rivals and keep the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["train", "padding"])
    parser.add_argument("--encodings", nargs="+", default=["none", "kerple", "cable"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    rounds, length = (2, 128) if chosen.quick else (chosen.rounds, chosen.length)
    jobs = {"train": train_jobs, "padding": padding_jobs}[chosen.what](chosen.encodings, length)
    times = timed_in_turn(jobs, rounds)
    born = certificate("python benchmarks/encoder.py " + " ".join(sys.argv[1:]))
    shared = {"what": chosen.what, "length": length, "rounds": rounds, "born": born}
    rows = [{"rival": name, "seconds": spread(seconds)} for name, seconds in times.items()]
    for name, base, most in targets(chosen.what, chosen.encodings):
        ratio = spread([a / b for a, b in zip(times[name], times[base], strict=True)])
        rows.append({"target": f"{name} / {base}", "ratio": ratio, "most": most, "met": ratio["median"] <= most})
    lines = [json.dumps(row | shared) for row in rows]
    if not chosen.quick:
        (RESULTS / f"encoder-{chosen.what}.jsonl").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
