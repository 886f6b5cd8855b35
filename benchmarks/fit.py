"""A fitted Llama against its own attention, in turn in one process: a training step and a decoded token.

    python benchmarks/fit.py train        forward and backward at 1,024 tokens, batch 1
    python benchmarks/fit.py decode       a token after 2,048 cached ones, and the ones after it, one a round

6 layers, width 512, 8 heads of 64, vocabulary 4,096. Fitted with its own rope it must give its own logits before
anything is timed. The ratio is to the model as it was, under sdpa.
"""

import argparse
import copy

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["train", "decode"])
    parser.add_argument("--encodings", nargs="+", default=["rope", "kerple", "cable"])
    parser.add_argument("--rounds", type=int)
    chosen = parser.parse_args()
    length, limit = {"train": (1024, 1.0), "decode": (2048, 1.1)}[chosen.what]
    job_of = {"train": step_of, "decode": token_of}[chosen.what]
    rounds = chosen.rounds or {"train": 20, "decode": 100}[chosen.what]
    own, ids = make().eval(), tokens(length)
    own.set_attn_implementation("sdpa")
    with torch.no_grad():
        same = lw.fit(copy.deepcopy(own), "own")
        check_close(same(ids[:, :300]).logits, own(ids[:, :300]).logits, "own over own")
        check_close(token_of(same, ids[:, :300])(), token_of(own, ids[:, :300])(), "own over own, decoded")
    rows = []
    for name in chosen.encodings:
        row = ratio_to_best(job_of(lw.fit(make(), name), ids), {"sdpa": job_of(own, ids)}, rounds, limit)
        rows.append({"what": chosen.what, "case": f"{name} {chosen.what} {length}", "length": length} | row)
    write("fit", rows)


if __name__ == "__main__":
    main()
