"""What the tests of the model share: small models with loud weights, and ways to run them through a cache."""

import copy

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

import lengthwise as lw
from lengthwise.encodings.registry import find
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.testing import LOUD, RELATIVE

VARIANTS = {
    "rope-dynamic": ("rope", {"scaling": {"type": "dynamic", "factor": 4.0}}),
    "fire-short": ("fire", {"threshold": 8.0}),
    "dapev2-cable": ("cable+dapev2", {}),
    "learned-long": ("learned", {"length": 97}),
}
CASES = {name: (name, {}) for name in lw.ENCODINGS} | VARIANTS
RESCORING = [case for case, (name, _) in CASES.items() if find(name).overrides("rescore")]
ADDITIVE = [case for case in CASES if case not in RESCORING]
SCHEDULES = {
    "window and none": {"layers": "rope:7,none"},
    "two windows": {"layers": "fox:7,alibi+sink:1"},
    "chunks": {"layers": "rope+fox:chunk8,alibi+ssmax+sink"},
    "grouped": {"layers": "cable:7,carope", "n_head": 4, "n_kv_head": 2, "head_dim": 8},
    "normed": {"layers": "rope:7,fire", "qk_norm": "rms", "scale": 0.3, "softcap": 5.0},
    "normed after": {"layers": "rope:chunk8,none", "qk_norm": "l2", "qk_norm_place": "after", "qkv_bias": False},
    "rescored": {"layers": "cable+dapev2:6,none", "out_bias": False},
    "contextual": {"layers": "cope:6,rope"},
    "embedded": {"layers": "kerple:9,rope", "embed": {"encoding": "learned", "encoding_options": {"length": 97}}},
    "shared": {"layers": [{"encoding": "t5", "window": 7}, {"encoding": "t5"}], "share_encoding": True},
    "bands": {"layers": [{"encoding": "rope", "window": [{"first": 3}, {"farthest": 6}]}]},
}
"""Layers that differ, and what else attention can be told."""

ONE_OF_EACH_KIND = ["alibi", "kerple", "fire-short", "k-cable", "cable", "rope-dynamic", "learned", "dapev2-cable"]

VOCABULARY, LENGTH = 101, 29


def make_config(case: str, **changes: object) -> LengthwiseConfig:
    """Two layers of three heads; trained at 23 tokens, so that 29 are beyond it, except where there is an end."""
    name, options = CASES.get(case, (None, None))
    sizes = {"vocab_size": VOCABULARY, "n_positions": 23, "n_embd": 24, "n_layer": 2, "n_head": 3}
    if case in ("learned", "swin"):
        sizes["n_positions"] = 64
    if case == "rope-dynamic":
        # Beyond the training length a longer sequence turns earlier tokens anew, which a second layer's cached keys
        # cannot follow: by its definition, dynamic scaling decodes as one pass in one layer only.
        sizes["n_layer"] = 1
    own = SCHEDULES.get(case, {"encoding": name, "encoding_options": options})
    return LengthwiseConfig(**(sizes | own | changes))


def loud_model(case: str, **changes: object) -> LengthwiseForCausalLM:
    """A model with weights 20 times GPT-2's, the same every time: small ones would hide a wrong position."""
    torch.manual_seed(0)
    model = LengthwiseForCausalLM(make_config(case, **changes)).eval()
    make_loud(model)
    return model


def make_loud(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ln_" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=LOUD)


ROUNDINGS = 4
"""As in rounding.py: about so many roundings does a number go through on its way."""


@torch.no_grad()
def assert_decodes(found: Tensor, expected: Tensor, label: str, model: LengthwiseForCausalLM, ids: Tensor) -> None:
    """As near as the law asks, or as near as the model's own conditioning allows in float32.

    Loud weights amplify: where the law's bound is exceeded, the logits in float64 are computed again with every weight
    rounded at random as float32 rounds it, and what that changes at most bounds what float32 can promise.
    """
    largest = expected.abs().max()
    off = float((found - expected).abs().max() / largest)
    if off <= RELATIVE:
        return
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("eager")
    whole, generator, most = exact(ids).logits, torch.Generator().manual_seed(0), 0.0
    for _ in range(8):
        rounded = copy.deepcopy(exact)
        for parameter in rounded.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.mul_(1 + noise * torch.finfo(torch.float32).eps / 2)
        most = max(most, float((rounded(ids).logits - whole).abs().max() / largest))
    assert off <= ROUNDINGS * most, f"{label}: off by {off:.1e} of the largest, roundings of weights by {most:.1e}"


def tokens(batch: int = 2, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def make_cache(kind: str, model: LengthwiseForCausalLM, length: int = LENGTH + 8):
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    cache = StaticCache(config=model.config, max_cache_len=length)
    if kind == "early":
        cache.early_initialization(
            2, model.config.n_kv_head or model.config.n_head, model.config.head_dim, model.dtype, model.device
        )
    return cache


def by_chunks(model, ids: Tensor, chunks: list[int], cache, **inputs: Tensor) -> Tensor:
    """The logits of all tokens, given to the model in chunks; masks grow with what was given, positions go along."""
    found, first = [], 0
    for stop in torch.tensor(chunks).cumsum(0).tolist():
        now = {}
        if "attention_mask" in inputs:
            now["attention_mask"] = inputs["attention_mask"][:, :stop]
        if "position_ids" in inputs:
            now["position_ids"] = inputs["position_ids"][:, first:stop]
        found.append(model(ids[:, first:stop], past_key_values=cache, use_cache=True, **now).logits)
        first = stop
    return torch.cat(found, 1)
