"""A model whose layers differ, in encodings and in windows, does all that one with a single encoding does."""

import copy
import itertools
import json
import pickle

import pytest
import torch
from model_kit import LENGTH, SCHEDULES, by_chunks, loud_model, make_cache, make_config, tokens
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

import lengthwise as lw
from lengthwise.bias import SumBias
from lengthwise.cli import main
from lengthwise.encodings.registry import find
from lengthwise.model import LengthwiseConfig, LengthwiseForCausalLM, convert_gpt2
from lengthwise.testing import Subject, assert_near

CACHES = ("dynamic", "static", "early")
SITUATIONS = ("plain", "padded", "packed")
CHUNKS = ([20] + [1] * 15, [3] + [1] * 32, [9, 9, 1, 8, 8])
BORDER = 13


def in_order(pair: tuple[str, str]) -> str:
    """Two encodings as one, in an order in which both can turn queries and keys."""
    return "+".join(sorted(pair, key=lambda name: find(name).turns_last))


def composes(pair: tuple[str, str]) -> bool:
    """Whether two encodings can act together: what cannot is refused in words, which are tested below."""
    try:
        find(in_order(pair))
    except ValueError:
        return False
    return True


PAIRS = [in_order(pair) for pair in itertools.combinations(lw.ENCODINGS, 2) if composes(pair)]
CHAIN = [in_order(pair) for pair in itertools.pairwise(lw.ENCODINGS) if composes(pair)]
"""Every encoding beside the next one."""


def pairwise_cover(cases):
    """Every case with every cache, every situation and every chunking, each at least once."""
    for number, case in enumerate(cases):
        for turn in range(3):
            yield case, CACHES[turn], SITUATIONS[(turn + number) % 3], CHUNKS[(turn + number // 3) % 3]


@torch.no_grad()
def assert_decodes_as_it_reads(model, kind, situation, chunks):
    """Chunks through a cache, padded or packed, give the logits of each sequence alone in one pass."""
    ids, length = tokens(2, 35), 35
    cache = make_cache(kind, model, length + 4)
    if situation == "plain":
        assert_near(by_chunks(model, ids, chunks, cache), model(ids, use_cache=False).logits, f"{kind}, {chunks}")
    elif situation == "padded":
        mask = torch.ones_like(ids)
        mask[0, :6] = 0
        alone = [model(ids[:1, 6:], use_cache=False).logits[0], model(ids[1:], use_cache=False).logits[0]]
        found = by_chunks(model, ids, chunks, cache, attention_mask=mask)
        assert_near(found[mask.bool()], torch.cat(alone), f"{kind}, padded, {chunks}")
    else:
        slots = torch.arange(length)
        positions = torch.where(slots < BORDER, slots, slots - BORDER)[None].expand(2, -1)
        parts = ids.split([BORDER, length - BORDER], 1)
        alone = torch.cat([model(part, use_cache=False).logits for part in parts], 1)
        found = by_chunks(model, ids, chunks, cache, position_ids=positions)
        assert_near(found, alone, f"{kind}, packed, {chunks}")


@pytest.mark.parametrize(("case", "kind", "situation", "chunks"), [*pairwise_cover(SCHEDULES)])
def test_a_schedule_decodes_as_it_reads(case, kind, situation, chunks):
    assert_decodes_as_it_reads(loud_model(case), kind, situation, chunks)


def composed(name: str) -> LengthwiseForCausalLM:
    return loud_model("none", encoding=name, n_layer=1, n_positions=40)


@pytest.mark.parametrize(("name", "kind", "situation", "chunks"), [*pairwise_cover(CHAIN)][::3])
def test_a_composition_decodes_as_it_reads(name, kind, situation, chunks):
    assert_decodes_as_it_reads(composed(name), kind, situation, chunks)


@pytest.mark.prove
@pytest.mark.parametrize("case", [*SCHEDULES, *PAIRS])
def test_every_schedule_and_composition_decodes_as_it_reads(case):
    """In float64, where no rounding can hide or feign a fault."""
    model = (loud_model(case) if case in SCHEDULES else composed(case)).double()
    for kind, situation, chunks in itertools.product(CACHES, SITUATIONS, CHUNKS):
        assert_decodes_as_it_reads(model, kind, situation, chunks)


@pytest.mark.parametrize("name", CHAIN)
def test_a_composition_is_its_parts_together(name):
    subject = Subject(name, train_length=64)
    layer, x, layout = subject.layer(), subject.tokens(), subject.layout()
    parts = list(layer.encoding.parts.values())
    q, k, _ = layer.qkv(x)
    state = [part.state(x, **part.own_qk("state", q, k)) for part in parts]
    biases = [part.bias(x, layout, own, **part.own_qk("bias", q, k)) for part, own in zip(parts, state, strict=True)]
    dense = [bias.dense() for bias in biases if bias is not None]
    together, rescore = layer.described(x, layout)
    assert (together is None) == (not dense)
    if together is not None:
        assert torch.equal(together.dense(), sum(dense[1:], dense[0]))
        assert isinstance(together, SumBias) == (len(dense) > 1)
    assert (rescore is not None) == any(part.overrides("rescore") for part in parts)
    turned = q, k
    for part, own in zip(parts, state, strict=True):
        turned = part.rotate(*turned, layout, own)
    both = layer.encoding.rotate(q, k, layout, layer.encoding.state(x, **layer.encoding.own_qk("state", q, k)))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(both, turned, strict=True))


def test_factors_of_a_composition_are_multiplied_and_sinks_joined():
    torch.manual_seed(0)
    x, layout = torch.randn(2, 9, 24), lw.layout(9)
    shape = {"heads": 3, "width": 24, "train_length": 8}
    both = lw.make("ssmax+logn+sink", **shape)
    parts = both.parts
    assert torch.equal(
        both.logit_scale(x, layout), parts["ssmax"].logit_scale(x, layout) * parts["logn"].logit_scale(x, layout)
    )
    assert torch.equal(both.sink(x), parts["sink"].sink(x))

    class RowSink(lw.Encoding):
        paper = "unpublished"

        def sink(self, x):
            return x[..., :3].transpose(1, 2)

    lw.register("row-sink", RowSink)
    try:
        joined = lw.make("sink+row-sink", **shape)
        a, b = (part.sink(x) for part in joined.parts.values())
        torch.testing.assert_close(joined.sink(x), torch.log(a.exp()[None, :, None] + b.exp()))
    finally:
        del lw.ENCODINGS["row-sink"]
    again = pickle.loads(pickle.dumps(both))
    assert torch.equal(again.sink(x), both.sink(x))
    assert torch.equal(copy.deepcopy(both).sink(x), both.sink(x))


@torch.no_grad()
def test_caches_keep_what_is_seen_and_nothing_leaks_through_a_window():
    model, ids = loud_model("two windows"), tokens()
    for cache, slots in ((make_cache("dynamic", model), [6, 1]), (make_cache("static", model), [7, 2])):
        by_chunks(model, ids, [20] + [1] * 9, cache)
        assert [layer.keys.shape[2] for layer in cache.layers] == slots
    every = DynamicCache()
    found = by_chunks(model, ids, [20] + [1] * 9, every)
    assert [layer.keys.shape[2] for layer in every.layers] == [LENGTH, LENGTH]
    whole = model(ids).logits
    assert_near(found, whole, "a cache that keeps everything")
    changed = ids.clone()
    changed[:, 0] = (ids[:, 0] + 1) % 50
    after = model(changed).logits
    assert torch.equal(after[:, 7:], whole[:, 7:])
    assert not torch.equal(after[:, 6], whole[:, 6])


@pytest.mark.parametrize("case", ["grouped", "chunks", "normed after"])
@torch.no_grad()
def test_stock_attention_computes_a_schedule_too(case):
    model, ids = loud_model(case), tokens()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    wanted = model(ids, attention_mask=mask).logits
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        assert_near(model(ids, attention_mask=mask).logits[mask.bool()], wanted[mask.bool()], f"{case}, {name}")


@pytest.mark.parametrize("case", ["normed", "rescored"])
@torch.no_grad()
def test_stock_attention_that_cannot_compute_a_schedule_is_refused(case):
    model, ids = loud_model(case), tokens()
    wanted = model(ids).logits
    with pytest.raises(ValueError, match=r"sdpa.*a softcap|sdpa.*a rescore"):
        model.set_attn_implementation("sdpa")
    model.set_attn_implementation("eager")
    assert_near(model(ids).logits, wanted, case)


@torch.no_grad()
def test_grouped_heads_are_heads_that_share_their_keys():
    grouped = loud_model("grouped", qk_norm="layer")
    whole = LengthwiseForCausalLM(make_config("grouped", n_kv_head=None, qk_norm="layer")).eval()
    weights = grouped.state_dict()
    for name in [name for name in weights if "c_attn" in name]:
        q, k, v = weights[name].split([32, 16, 16], -1)
        spread = [x.unflatten(-1, (2, 8)).repeat_interleave(2, -2).flatten(-2) for x in (k, v)]
        weights[name] = torch.cat([q, *spread], -1)
    whole.load_state_dict(weights)
    assert_near(grouped(tokens()).logits, whole(tokens()).logits, "grouped")


@pytest.mark.parametrize("case", ["two windows", "grouped", "bands"])
@torch.no_grad()
def test_a_schedule_generates_the_same_with_every_cache(case):
    model, ids = loud_model(case), tokens(2, 11)
    settings = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    greedy = ids
    for _ in range(9):
        greedy = torch.cat([greedy, model(greedy, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    for cache in (None, "static", "dynamic"):
        assert torch.equal(model.generate(ids, cache_implementation=cache, **settings), greedy), cache
    beams = model.generate(ids, num_beams=3, **settings)
    assert torch.equal(beams, model.generate(ids, num_beams=3, use_cache=False, **settings))


def test_assisted_decoding_takes_tokens_back_from_windows_of_two_lengths():
    model, ids = loud_model("rope", encoding=None, layers="rope:4,cable:8"), tokens(1, 12)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    greedy = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **options), greedy)


@pytest.mark.parametrize("case", ["window and none", "chunks"])
@torch.no_grad()
def test_a_static_cache_with_windows_decodes_in_compiled_graphs_that_do_not_grow(case):
    model, ids = loud_model(case), tokens()
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    step = torch.compile(model.forward, backend=count, fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 3)
    model(ids[:, :3], past_key_values=cache)
    whole = model(ids, use_cache=False).logits
    for place in range(3, LENGTH):
        found = step(ids[:, place : place + 1], past_key_values=cache).logits
        assert_near(found, whole[:, place : place + 1], f"{case}, token {place}")
    assert len(graphs) <= 4, "one before the window is full, one after, each once more where numbers become symbols"


@pytest.mark.parametrize("case", SCHEDULES)
def test_a_schedule_is_saved_loaded_and_trained(case, tmp_path):
    model, ids = loud_model(case), tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    same = {"dtype": None, "_name_or_path": ""}
    assert loaded.config.to_dict() | same == model.config.to_dict() | same
    expected = model(ids, labels=ids)
    assert torch.equal(loaded(ids).logits, expected.logits)
    expected.loss.backward()
    loaded.train().gradient_checkpointing_enable()
    loaded(ids, labels=ids).loss.backward()
    scale = max(float(p.grad.abs().max()) for p in model.parameters())
    for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= 1e-5 * scale, name
    with pytest.raises(ValueError, match="layers="):
        LengthwiseForCausalLM.from_pretrained(tmp_path, layers=[{"encoding": "none"}])


def test_a_checkpoint_of_dape_over_another_encoding_still_loads(tmp_path):
    model = loud_model("none", encoding="cable+dapev2", encoding_options={"dapev2": {"hidden": 8}})
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("format", "layers", "embed", "n_kv_head", "head_dim", "qk_norm", "qk_norm_place"):
        del config[name]
    config |= {"encoding": "dapev2", "encoding_options": {"over": "cable", "hidden": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "model.safetensors")
    old = {name.replace("parts.cable", "over").replace("parts.dapev2.", ""): w for name, w in weights.items()}
    save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = LengthwiseForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    loaded.save_pretrained(tmp_path / "again")
    again = LengthwiseForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


@torch.no_grad()
def test_a_checkpoint_gets_a_schedule_and_keeps_its_other_weights():
    source = loud_model("learned")
    model = convert_gpt2(source, layers="rope:7,none")
    assert [spec.label for spec in model.config.schedule] == ["rope:7", "none"]
    assert torch.equal(model.transformer.h[1].attn.c_attn.weight, source.transformer.h[1].attn.c_attn.weight)
    same = convert_gpt2(source, embed="learned", layers="none")
    assert torch.equal(same(tokens()).logits, source(tokens()).logits)
    grouped = loud_model("grouped")
    assert convert_gpt2(grouped, encoding="none").config.n_kv_head == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": "rope,none,none"}, "multiple of the 3 that are listed, got 2"),
        ({"layers": []}, "layers must be a list of layers"),
        ({"layers": "rope:many"}, "'512' or 'chunk512', got 'many'"),
        ({"layers": [{"encoding": "rope", "window": 0}]}, "window must be a positive int, got 0"),
        ({"layers": [{"encoding": "rope", "window": {"far": 3}}]}, "a band must be a dictionary of 'nearest'"),
        ({"layers": [{"window": 3}]}, "must have an `encoding`"),
        ({"layers": [{"encoding": "rope", "windows": 3}]}, "did you mean 'window'"),
        ({"layers": [{"encoding": "rope"}, {"encoding": "alibi", "causal": False}]}, "must be causal, or none of them"),
        ({"layers": "path:8,none"}, "'path' cannot have such a window, got the layer 'path:8'"),
        ({"layers": "ssmax:chunk8,none"}, "'ssmax' cannot have such a window, got the layer 'ssmax:chunk8'"),
        ({"layers": "alibo,none"}, "did you mean 'alibi'"),
        ({"layers": "cope+dapev2,none"}, "at most one part of a composition can replace the scores"),
        ({"layers": [{"encoding": "rope+fox", "encoding_options": {"alibi": {}}}]}, "go by part, 'rope' or 'fox'"),
        ({"layers": "learned,none"}, "must stand in `embed` or alike in every layer"),
        ({"layers": "learned,learned+rope", "embed": "learned"}, "must stand in `embed` or alike in every layer"),
        ({"layers": "none", "embed": "rope"}, "embed must be an encoding that acts as tokens enter"),
        ({"layers": "none", "embed": "learned:8"}, "must have no window, got 'learned:8'"),
        ({"layers": "none", "embed": {"encoding": 3}}, "encoding must be a name, got 3"),
        ({"layers": "rope:chunk0"}, "chunk must be a positive int, got 0"),
        ({"layers": "path+fox,none", "softcap": 30.0}, "can have neither scale nor softcap, got"),
        ({"layers": "none", "encoding": "rope"}, "short for layers that are all alike"),
        ({"layers": "t5,kerple", "share_encoding": True}, "share_encoding needs layers with one encoding"),
        ({"layers": "stick-breaking+ssmax"}, "no other part can scale or take any, got 'ssmax'"),
        ({"layers": "pope+rope,none"}, "'pope' must be the last part that turns queries and keys"),
        ({"layers": "carope+xpos,none"}, "'carope' must be the last part that turns queries and keys"),
        ({"layers": "carope+cope,none"}, "'cope' reads queries and keys themselves, and after 'carope' only"),
        ({"layers": "pope,none", "qk_norm": "l2", "qk_norm_place": "after"}, "qk_norm must be before 'pope'"),
        ({"layers": "none", "n_kv_head": 2}, "n_kv_head must divide n_head"),
        ({"layers": "none", "qk_norm": "l3"}, "qk_norm must be 'rms' or 'layer' or 'l2'"),
        ({"layers": "none", "softcap": 0.0}, "softcap must be a number above 0"),
    ],
)
def test_a_schedule_that_cannot_work_is_refused_before_a_weight_is_allocated(changes, words, monkeypatch):
    monkeypatch.setattr(torch.nn, "Embedding", lambda *_, **__: pytest.fail("a weight was allocated"))
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        LengthwiseForCausalLM(make_config("chunks", **changes))


def test_a_cache_that_keeps_too_little_is_refused():
    model = loud_model("window and none")
    with pytest.raises(ValueError, match="layer 1 must keep all tokens, got a cache that keeps 5"):
        model(tokens(), past_key_values=Cache(layers=[DynamicSlidingWindowLayer(7), DynamicSlidingWindowLayer(5)]))
    with pytest.raises(ValueError, match="layer 0 must keep 7 tokens, got a cache that keeps 5"):
        model(tokens(), past_key_values=Cache(layers=[DynamicSlidingWindowLayer(5)]))


@torch.no_grad()
def test_padding_between_two_turns_is_refused_where_a_cache_has_lost_what_a_chunk_counts():
    model, ids = loud_model("chunks"), tokens()
    mask = torch.ones_like(ids)
    mask[0, 15:18] = 0
    with pytest.raises(NotImplementedError, match="which keeps all"):
        by_chunks(model, ids, [20, 9], make_cache("dynamic", model), attention_mask=mask)
    found = by_chunks(model, ids, [20, 9], DynamicCache(), attention_mask=mask)
    assert_near(found[mask.bool()], model(ids, attention_mask=mask).logits[mask.bool()], "a cache that keeps all")


def test_the_command_takes_a_schedule_in_short_as_json_and_from_a_file(tmp_path, capsys):
    listed = '[{"encoding": "rope", "window": 16}, {"encoding": "none"}]'
    (tmp_path / "run.yaml").write_text("layers: [rope:16, none]\nsizes: {n_kv_head: 4}\n")
    ways = (["--layers", "rope:16,none"], ["--layers", listed], ["--config", str(tmp_path / "run.yaml")])
    for way in ways:
        main(["train", "--dry-run", "--out", str(tmp_path / "run"), *way])
        assert "nano with rope:16,none" in capsys.readouterr().out
    main(["train", "--dry-run", "--out", str(tmp_path / "run"), "--encoding", "rope+fox"])
    assert "nano with rope+fox" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["train", "--dry-run", "--out", str(tmp_path / "run"), "--layers", "rope,none,none"])
    assert "lengthwise train: layers must cover the depth" in capsys.readouterr().err


def test_a_sliding_window_can_be_set_as_in_transformers():
    config = LengthwiseConfig(encoding="alibi", encoding_options={"slopes": "interleaved"}, n_layer=2)
    config.sliding_window = 3
    assert [(spec.encoding, spec.window) for spec in config.schedule] == [("alibi", 3)] * 2
    assert config.schedule[0].options == {"slopes": "interleaved"}
    assert (config.sliding_window, config.layer_types) == (3, ["sliding_attention"] * 2)
    config.sliding_window = None
    assert config.layer_types is None
