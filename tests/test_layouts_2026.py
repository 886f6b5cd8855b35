"""Models of 2026 as schedules of ours: with copied weights every layer's attention gives transformers' own output."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import lengthwise as lw
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM
from lengthwise.testing import assert_near

LENGTH, WINDOW = 40, 8
SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,  # so that attention is not flat
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
OWN = {"vocab_size": 64, "n_positions": 512, "n_embd": 48, "n_layer": 4, "n_head": 4, "n_kv_head": 2, "head_dim": 16}


@dataclass
class Layout:
    """A family of transformers, how it is told its layers, and the same in our words."""

    name: str
    layers: Any
    theirs: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    bias: bool = False
    weights: dict[str, str] = field(default_factory=dict)
    """Parameters of the encoding, by the name that they have there."""
    norm: float = 1.0
    """What is added to the weight of a norm: Gemma multiplies by 1 + weight."""
    zeroed: str = ""
    """Parameters that are 0 in this test, by a part of their names: what attention does beside the layout."""


def rope(window: Any = None, *more: str, **options: Any) -> dict[str, Any]:
    name = "+".join(["rope", *more])
    return {"encoding": name, "encoding_options": {"rope": options} if more else options, "window": window}


LAYOUTS = {
    "gpt-oss": Layout(
        "GptOss",
        [
            rope(window, "sink", base=150000.0, scaling={"type": "yarn", "original_length": 4096, **YARN})
            for window in (WINDOW, None)
        ],
        {
            "sliding_window": WINDOW,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "original_max_position_embeddings": 4096,
                **YARN,
            },
        },
        bias=True,
        weights={"sinks": "parts.sink.logit"},
    ),
    "llama 4": Layout(
        "Llama4Text",
        [
            *([rope("chunk16", base=500000.0, layout="interleaved")] * 3),
            {"encoding": "llama4-scale", "encoding_options": {"floor": 4, "strength": 0.1}},
        ],
        {
            "attention_chunk_size": 16,
            "floor_scale": 4,
            "attn_scale": 0.1,
            "no_rope_layers": [1, 1, 1, 0],
            "num_local_experts": 2,
            "intermediate_size_mlp": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
        {"qk_norm": "l2", "qk_norm_place": "after", "layer_norm_epsilon": 1e-5},
    ),
    "gemma 3": Layout(
        "Gemma3Text",
        [*([rope(WINDOW)] * 3), rope(base=1e6, scaling={"type": "linear", "factor": 8.0})],
        {
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
        {"qk_norm": "rms", "scale": 24**-0.5, "layer_norm_epsilon": 1e-6},
    ),
    "granite swa": Layout(
        "GraniteSWA",
        [{"encoding": "sink"}, rope(WINDOW, "sink"), rope(WINDOW, "sink", base=50000.0), rope(WINDOW, "sink")],
        {
            "sliding_window": WINDOW,
            "layer_types": [FULL, SLIDING, SLIDING, SLIDING],
            "layer_rope_theta": [0, 10000.0, 50000.0, 10000.0],
            "attention_multiplier": 0.3,
        },
        {"scale": 0.3},
        weights={"sinks": "parts.sink.logit"},
    ),
    "cohere 2": Layout(
        "Cohere2",
        [*([rope(WINDOW, base=50000.0, layout="interleaved")] * 3), {"encoding": "none"}],
        {
            "sliding_window": WINDOW,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        },
    ),
    "inkling": Layout(
        "InklingText",
        [
            *([{"encoding": "inkling", "encoding_options": {"profiles": 5, "extent": WINDOW}, "window": WINDOW}] * 3),
            {
                "encoding": "inkling+log-floor",
                "encoding_options": {
                    "inkling": {"profiles": 5, "extent": 24},
                    "log-floor": {"floor": 16, "strength": 0.1},
                },
            },
        ],
        {
            "sliding_window_size": WINDOW,
            "layer_types": ["hybrid_sliding"] * 3 + ["hybrid"],
            "mlp_layer_types": ["dense"] * 4,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 16,
            "d_rel": 5,
            "rel_extent": 24,
            "log_scaling_n_floor": 16,
            "log_scaling_alpha": 0.1,
        },
        {"qk_norm": "rms", "scale": 1 / 16, "layer_norm_epsilon": 1e-6},
        weights={"r_proj.weight": "to_rows.weight", "rel_logits_proj.proj": "profiles"},
        norm=0.0,
        zeroed="sconv",
    ),
    "smollm 3": Layout(
        "SmolLM3",
        [*([rope(base=2e6)] * 3), {"encoding": "none"}],
        {
            "no_rope_layers": [1, 1, 1, 0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 2e6},
        },
    ),
}


def attention_of(model: Any) -> list[nn.Module]:
    return [layer.self_attn for layer in model.model.layers]


def copy_attention(theirs: Any, ours: Any, layout: Layout) -> None:
    projections = [theirs.q_proj, theirs.k_proj, theirs.v_proj]
    ours.c_attn.weight.copy_(torch.cat([part.weight for part in projections]).T)
    ours.c_proj.weight.copy_(theirs.o_proj.weight.T)
    if ours.c_attn.bias is not None:
        ours.c_attn.bias.copy_(torch.cat([part.bias for part in projections]))
        ours.c_proj.bias.copy_(theirs.o_proj.bias)
    if hasattr(theirs, "q_norm"):
        for norm in ("q_norm", "k_norm"):
            getattr(ours, norm).weight.copy_(getattr(theirs, norm).weight + layout.norm)
    for name, own in layout.weights.items():
        # A composition has its parts' names before theirs.
        (parameter,) = (p for n, p in ours.encoding.named_parameters() if n.endswith(own.rpartition(".")[2]))
        parameter.copy_(theirs.get_parameter(name).view_as(parameter))


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_every_layer_gives_the_attention_output_of_transformers(name):
    layout = LAYOUTS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{layout.name}Config")(**SIZES, **layout.theirs, attention_bias=layout.bias)
    model = getattr(transformers, f"{layout.name.removesuffix('Text')}ForCausalLM")(config).eval()
    own = LengthwiseConfig(**OWN, layers=layout.layers, qkv_bias=layout.bias, out_bias=layout.bias, **layout.ours)
    ours = LengthwiseForCausalLM(own).eval()
    for one, other in zip(attention_of(model), ours.transformer.h, strict=True):
        for parameter_name, parameter in one.named_parameters():
            if "proj.weight" not in parameter_name:  # which start at 0 or 1 and would hide a fault
                parameter.copy_(torch.randn_like(parameter))
            if layout.zeroed and layout.zeroed in parameter_name:
                parameter.zero_()
        copy_attention(one, other.attn, layout)

    seen = []

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"], output[0]))

    for attention in attention_of(model):
        attention.register_forward_hook(record, with_kwargs=True)
    model(torch.randint(3, 64, (2, LENGTH)), use_cache=False)
    tokens = lw.layout(LENGTH)
    for number, ((x, wanted), block) in enumerate(zip(seen, ours.transformer.h, strict=True)):
        assert_near(block.attn(x, tokens)[0], wanted, f"layer {number} of {name}")


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_a_model_so_laid_out_decodes_as_it_reads(name):
    layout = LAYOUTS[name]
    torch.manual_seed(0)
    own = LengthwiseConfig(**OWN, layers=layout.layers, initializer_range=0.4, **layout.ours)
    model, ids = LengthwiseForCausalLM(own).eval(), torch.randint(3, 64, (2, LENGTH))
    cache = transformers.DynamicCache(config=own)
    parts = [model(part, past_key_values=cache).logits for part in ids.split([21] + [1] * 19, 1)]
    assert_near(torch.cat(parts, 1), model(ids, use_cache=False).logits, name)
    reaches = [spec.reach for spec in own.schedule]
    assert [layer.keys.shape[2] for layer in cache.layers] == [LENGTH if r is None else r - 1 for r in reaches]
