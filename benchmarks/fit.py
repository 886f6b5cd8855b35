"""A fitted Llama against its own attention, in turn in one process: a training step and a decoded token.

    python benchmarks/fit.py train        forward and backward at 1,024 tokens, batch 1
    python benchmarks/fit.py decode       a token after 2,048 cached ones, and the ones after it, one a round

6 layers, width 512, 8 heads of 64, vocabulary 4,096. Fitted with its own rope it must give its own logits before
anything is timed. The ratio is to the model as it was, under sdpa. With --quick all is small, to see that it runs, and
nothing is stored.
"""

import argparse
import copy
from collections.abc import Iterator

import torch
from in_turn import Job, check_close, ratio_to_best, write
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import lengthwise as lw

V = 4096


def make() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 1408}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, max_position_embeddings=4096, **sizes))


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, V, (1, length), generator=torch.Generator().manual_seed(0))


def step_of(model: LlamaForCausalLM, ids: torch.Tensor) -> Job:
    model.train()

    def step() -> None:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()

    return step


def token_of(model: LlamaForCausalLM, ids: torch.Tensor) -> Job:
    """One token after those that are cached; it is cached too, as in `generate`."""
    model.eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)

    @torch.no_grad()
    def step() -> torch.Tensor:
        return model(ids[:, :1], past_key_values=cache).logits

    return step


def rows_of(what: str, encodings: list[str], length: int, rounds: int, limit: float) -> Iterator[dict[str, object]]:
    """One a name, measured when it is asked for."""
    job_of = {"train": step_of, "decode": token_of}[what]
    own, ids = make().eval(), tokens(length)
    own.set_attn_implementation("sdpa")
    with torch.no_grad():
        same, short = lw.fit(copy.deepcopy(own), "own"), ids[:, :300]
        check_close(same(short).logits, own(short).logits, "own over own")
        ours, theirs = token_of(same, short), token_of(own, short)
        for number in range(3):
            check_close(ours(), theirs(), f"own over own, decoded token {number}")
    for name in encodings:
        row = ratio_to_best(job_of(lw.fit(make(), name), ids), {"sdpa": job_of(own, ids)}, rounds, limit)
        yield {"what": what, "case": f"{name} {what} {length}", "length": length} | row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "decode"])
    parser.add_argument("--encodings", nargs="+", default=["rope", "kerple", "cable"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    length, limit, rounds = {"train": (1024, 1.0, 20), "decode": (2048, 1.1, 100)}[chosen.what]
    length, rounds = (64, 6) if chosen.quick else (length, chosen.rounds or rounds)
    write("fit", rows_of(chosen.what, chosen.encodings, length, rounds, limit), store=not chosen.quick)


if __name__ == "__main__":
    main()
