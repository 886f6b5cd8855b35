"""Loss against length: the protocols score what they say, chunks change nothing, and tables tell the truth."""

import contextlib
import csv
import dataclasses
import io
import json
import math
import re

import numpy as np
import pytest
import torch
from encoder_kit import loud_encoder
from matplotlib.legend import Legend
from model_kit import CASES, loud_model
from rounding import EPS
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import lengthwise as lw
from lengthwise.data import documents, load_tokenizer, prepare
from lengthwise.evaluate import Evaluation, Interval, LengthTable, Score, read_corpus, score_lengths
from lengthwise.evaluate import memory as memory_module
from lengthwise.evaluate import table as table_module
from lengthwise.evaluate.corpus import PROTOCOLS, plan_text_windows
from lengthwise.evaluate.losses import plan_lengths, token_losses
from lengthwise.evaluate.memory import bytes_needed, fitting_chunk
from lengthwise.evaluate.statistics import t_interval
from lengthwise.evaluate.table import control_figure, length_figure, rise_figure
from lengthwise.evaluate.tasks import score_task, sized_examples
from lengthwise.model import LengthwiseForCausalLM
from lengthwise.model.families import max_length
from lengthwise.model.stretch import stretching
from lengthwise.model.stretch.spec import parse_stretch
from lengthwise.views.line_plot import Line, lines_figure
from lengthwise.views.style import png

STORY = ["Zoë saw 3 ships — and a crow.\n" * 5, "", "the second text is longer: " * 21, "日本語 ends it\n" * 7]
DYNAMIC = [case for case in CASES if case == "rope-dynamic"]


@pytest.fixture(scope="module")
def bytes_tokenizer():
    return load_tokenizer("bytes")


@pytest.fixture(scope="module")
def text(bytes_tokenizer):
    return read_corpus(STORY, bytes_tokenizer)


def small(case: str = "alibi", **changes: object) -> LengthwiseForCausalLM:
    return loud_model(case, vocab_size=257, **changes)


def llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(**(sizes | {"num_attention_heads": 3, "max_position_embeddings": 23} | changes))
    ).eval()


def by_hand(model, tokens, place: int, context: int) -> float:
    """-log p of one token from so many before it, the plain way."""
    window = torch.from_numpy(tokens[place - context : place])[None]
    with torch.no_grad():
        return -model(window).logits[0, -1].float().log_softmax(-1)[tokens[place]].item()


def test_a_text_knows_the_bytes_and_the_document_of_every_token(text):
    kept = [document for document in STORY if document]
    assert [text.size[text.document == n].sum() for n in (0, 2, 3)] == [len(d.encode()) for d in kept]
    assert set(text.size[1:][text.tokens[1:] == 256]) == {0}
    assert (text.tokens == 256).sum() == 4


def test_bytes_of_a_merging_tokenizer_add_up_too(tmp_path):
    (tmp_path / "a.txt").write_text("".join(STORY))
    tokenizer = load_tokenizer("bpe:300", source=tmp_path / "a.txt", cache=tmp_path / "cache")
    text = read_corpus(STORY, tokenizer)
    assert len(text) < sum(len(document.encode()) for document in STORY)
    assert text.size.sum() == sum(len(document.encode()) for document in STORY)


def test_a_text_that_spells_out_a_special_token_has_the_tokens_of_training(tmp_path, bytes_tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("before <|endoftext|> behind\n" * 9)
    trained_on = prepare(path, bytes_tokenizer, split="all", cache=tmp_path / "cache")
    corpus = read_corpus(documents(path, "all"), bytes_tokenizer)
    assert corpus.tokens[1:].tolist() == trained_on.read(0, len(trained_on)).tolist()
    assert (corpus.tokens == 256).sum() == 2, "one before the document and one behind it"
    assert corpus.size.sum() == len(path.read_bytes())


def test_fair_scores_the_same_tokens_at_every_length_and_only_the_context_grows():
    plans = [plan_text_windows("fair", 1009, n, shortest=12, longest=97, windows=31) for n in (12, 50, 97)]
    targets = [[i for w in p.windows for i in range(w.targets.start, w.targets.stop)] for p in plans]
    assert targets[0] == targets[1] == targets[2]
    assert targets[0][-1] == 1008
    assert len(targets[0]) == 31 * 12
    assert plans[2].windows[0].begin == 0
    assert [{w.scored for w in p.windows} for p in plans] == [{3}, {12}, {12}]
    for plan, length in zip(plans, (12, 50, 97), strict=True):
        assert all(w.begin >= 0 and w.length == length and w.scored <= length / 4 for w in plan.windows)


@pytest.mark.parametrize(
    ("total", "lengths"), [(98, (97,)), (99, (97,)), (120, (97,)), (98, (12, 97)), (500, (96, 97))]
)
def test_fair_fits_into_a_text_that_is_barely_longer_than_the_longest_length(total, lengths):
    plans = [plan_text_windows("fair", total, n, shortest=lengths[0], longest=97, windows=9).windows for n in lengths]
    assert len({sum(w.scored for w in windows) for windows in plans}) == 1
    assert all(w.begin >= 0 and w.targets.stop <= total and w.scored for windows in plans for w in windows)


def test_the_rise_is_drawn_with_its_whole_interval():
    same = {"documents": [0, 1, 2, 3], "tokens": [9, 9, 9, 9], "bytes": [9, 9, 9, 9], "targets": "t"}
    nats = {12: [20.0, 22.0, 18.0, 21.0], 24: [26.0, 20.0, 23.0, 19.0]}
    table = LengthTable([Score("m", n, "fair", "x", "y", nats=values, **same) for n, values in nats.items()])
    axes = table_module.rise_figure(table, train_length=12).axes[0]
    low, high = table.change("m", 24, 12)[1]
    bottom, top = axes.get_ylim()
    assert bottom < math.exp(low) < math.exp(high) < top


def test_paper_reads_consecutive_windows_from_the_start_and_no_part_of_one():
    windows = plan_text_windows("paper", 101, 33, shortest=33, longest=33, windows=1000).windows
    assert [(w.begin, w.targets.start, w.targets.stop) for w in windows] == [(0, 1, 34), (33, 34, 67), (66, 67, 100)]
    assert len(plan_text_windows("paper", 101, 33, shortest=33, longest=33, windows=2).windows) == 2


@pytest.mark.parametrize("stride", [1, 7, 13, 40])
def test_sliding_scores_every_token_once_with_the_context_it_promises(stride):
    windows = plan_text_windows("sliding", 101, 13, shortest=13, longest=13, windows=1000, stride=stride).windows
    scored = [place for w in windows for place in range(w.targets.start, w.targets.stop)]
    assert scored == list(range(1, 101))
    assert all(w.length == 13 and w.begin >= 0 for w in windows)
    assert all(w.length - w.scored >= 13 - min(stride, 13) for w in windows[1:])


@pytest.mark.parametrize("make", [small, llama], ids=["ours", "llama"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_score_is_the_mean_of_losses_computed_by_hand(text, make, protocol):
    model = make()
    (score, longer) = score_lengths(model, text, [12, 29], name="m", protocol=protocol, windows=9)
    windows = plan_text_windows(protocol, len(text), 29, shortest=12, longest=29, windows=9).windows
    hand = [
        by_hand(model, text.tokens, place, place - w.begin)
        for w in windows
        for place in range(w.targets.start, w.targets.stop)
    ]
    assert longer.scored == len(hand)
    assert longer.loss == pytest.approx(np.mean(hand), rel=2e-5)
    assert score.length == 12
    assert longer.perplexity == pytest.approx(math.exp(longer.loss))
    places = [place for w in windows for place in range(w.targets.start, w.targets.stop)]
    assert longer.bits_per_byte == pytest.approx(sum(hand) / math.log(2) / text.size[places].sum(), rel=2e-5)


def test_losses_by_place_average_to_the_loss(text):
    (score,) = score_lengths(small(), text, [29], name="m", protocol="paper", windows=5)
    assert [place for place, _ in score.positions] == list(range(29))
    assert np.mean([loss for _, loss in score.positions]) == pytest.approx(score.loss)


@pytest.mark.parametrize("case", [case for case in CASES if case not in DYNAMIC])
def test_chunks_through_the_cache_give_the_losses_of_one_pass(case, text):
    model = small(case, **({"n_positions": 97} if case == "learned" else {}))
    tokens = torch.from_numpy(np.stack([text.tokens[:64], text.tokens[50:114]]))
    whole = token_losses(model, tokens, scored=31)
    for chunk in (1, 20, 32, 62):
        torch.testing.assert_close(token_losses(model, tokens, scored=31, chunk=chunk), whole, rtol=1e-5, atol=1e-5)


def test_chunks_of_a_foreign_model_give_the_losses_of_one_pass(text):
    tokens = torch.from_numpy(text.tokens[None, :64].copy())
    whole = token_losses(llama(), tokens, scored=31)
    torch.testing.assert_close(token_losses(llama(), tokens, scored=31, chunk=19), whole, rtol=1e-5, atol=1e-5)


def test_chunks_are_refused_where_angles_depend_on_the_length(text):
    tokens = torch.from_numpy(text.tokens[None, :64].copy())
    for model in (small("rope-dynamic"), lw.stretch(llama(), "dynamic:4")):
        with pytest.raises(ValueError, match="depend on the length"):
            token_losses(model, tokens, scored=3, chunk=19)
        short, long = score_lengths(model, text, [16, 64], name="x", windows=2, chunk=19)
        assert short.refused is None, "it fits into a chunk"
        assert "depend on the length" in long.refused


@pytest.mark.parametrize("make", [lambda: small("rope"), llama], ids=["ours", "llama"])
def test_chunks_of_a_stretched_model_give_the_losses_of_one_pass(make, text):
    tokens = torch.from_numpy(text.tokens[None, :64].copy())
    for spec in ("self-extend:4:7", "dca:6:9"):
        model = lw.stretch(make(), spec)
        whole = token_losses(model, tokens, scored=31)
        torch.testing.assert_close(token_losses(model, tokens, scored=31, chunk=19), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [small, llama], ids=["ours", "llama"])
def test_every_place_of_the_longest_windows_has_a_loss_and_the_scores_stay_the_same(make, text):
    model, options = make(), {"name": "m", "windows": 5}
    plain = score_lengths(model, text, [12, 50], **options)
    short, long = score_lengths(model, text, [12, 50], by_position=True, **options)
    assert short == dataclasses.replace(plain[0], seconds=short.seconds)
    assert long.loss == pytest.approx(plain[1].loss, rel=2e-5)
    assert [place for place, _ in long.positions] == list(range(50))
    windows = plan_text_windows("fair", len(text), 50, shortest=12, longest=50, windows=5).windows
    first = [by_hand(model, text.tokens, w.begin + 3, 3) for w in windows]
    assert long.positions[2][1] == pytest.approx(np.mean(first), rel=2e-5)


def test_windows_begin_as_the_tokenizer_begins_a_text(text):
    tokenizer = load_tokenizer("bytes")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    begun, model = read_corpus(STORY, tokenizer), llama()
    assert (begun.start, text.start) == (256, None)
    assert (begun.tokens == text.tokens).all()
    (score,) = score_lengths(model, begun, [29], name="m", windows=3, stride=5)
    hand = []
    for w in plan_text_windows("fair", len(text), 29, shortest=29, longest=29, windows=3, stride=5).windows:
        tokens = begun.tokens.copy()
        tokens[w.begin] = 256
        hand += [by_hand(model, tokens, place, place - w.begin) for place in range(w.targets.start, w.targets.stop)]
    assert score.loss == pytest.approx(np.mean(hand), rel=2e-5)


def test_a_model_holds_up_to_the_last_length_that_is_no_worse_than_the_best_before_it():
    same = {"documents": [0, 1, 2, 3], "tokens": [9, 9, 9, 9], "bytes": [9, 9, 9, 9], "targets": "t"}
    nats = {8: [20.0] * 4, 16: [18.0] * 4, 32: [18.3] * 4, 64: [19.0] * 4, 128: [18.0] * 4}
    table = LengthTable([Score("m", n, "fair", "x", "y", nats=values, **same) for n, values in nats.items()])
    assert table.holds("m") == (32, 32, 32), "what comes back later does not count"
    mixed = nats | {32: [18.0, 18.0, 18.0, 19.4]}
    noisy = LengthTable([Score("m", n, "fair", "x", "y", nats=values, **same) for n, values in mixed.items()])
    held = noisy.holds("m")
    assert (held.low, held.high) == (16, 32), "one document of four decides"
    assert LengthTable([Score("m", 8, "fair", "x", "y", nats=nats[8], **same)]).holds("m") is None


def test_memory_chooses_the_chunk_and_refuses_with_the_bytes(text, monkeypatch):
    model = small()
    whole = bytes_needed(model, length=50_000, scored=9)
    assert fitting_chunk(model, length=50_000, scored=9) is None
    monkeypatch.setattr(memory_module, "total_bytes", lambda: whole)
    chunk = fitting_chunk(model, length=50_000, scored=9)
    assert chunk is not None
    assert bytes_needed(model, length=50_000, scored=9, chunk=chunk) <= whole // 2
    assert bytes_needed(model, length=50_000, scored=9, chunk=2 * chunk) > whole // 2
    monkeypatch.setattr(memory_module, "total_bytes", lambda: 1000)
    scores = score_lengths(model, text, [12], name="m")
    assert "bytes, but needs" in scores[0].refused


def test_no_more_windows_go_together_than_memory_has_room_for(text, monkeypatch):
    model, passed = small(), []
    model.register_forward_pre_hook(lambda _, args: passed.append(len(args[0])))
    model.transformer.register_forward_pre_hook(lambda _, args: passed.append(len(args[0])))
    tokenizer = load_tokenizer("bytes")
    (plan,) = plan_lengths(model, len(text), [16], windows=11)
    assert plan.batch == 8192 // 16

    def measured():
        passed.clear()
        (score,) = score_lengths(model, text, [16], name="m", windows=11)
        (task,) = score_task(model, tokenizer, "copy", [16], name="m", count=11)
        return score.nats, task.tokens, max(passed)

    nats, right, most = measured()
    assert most == len(plan.plan.windows) == 44
    need = bytes_needed(model, length=17, scored=plan.plan.windows[0].scored, batch=3)
    monkeypatch.setattr(memory_module, "total_bytes", lambda: 2 * need)
    (plan,) = plan_lengths(model, len(text), [16], windows=11)
    assert plan.batch == 3
    assert plan.bytes <= need
    fewer, right_of_fewer, most = measured()
    assert most == 3
    assert right_of_fewer == right
    # A sum of some losses, each of logits that are sums of 24 numbers.
    assert fewer == pytest.approx(nats, rel=64 * EPS)


@pytest.mark.parametrize("of_model", [small, lambda: loud_encoder("alibi", vocab_size=257)])
def test_memory_is_for_the_logits_of_a_part_of_a_batch_where_losses_are_taken_in_parts(of_model):
    model, many = of_model(), 512
    few = bytes_needed(model, length=16, scored=16, batch=many)
    whole = bytes_needed(model, length=16, scored=16, batch=many, whole_logits=True)
    assert whole - few == 2 * (16 * many - 512) * 257 * 4
    theirs = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=3, n_embd=24, vocab_size=257))
    assert bytes_needed(theirs, length=16, scored=16, batch=many) >= 2 * 16 * many * 257 * 4


def test_an_example_of_a_task_fits_only_with_all_of_its_logits(monkeypatch):
    model, tokenizer = small(), load_tokenizer("bytes")
    (row,) = sized_examples(tokenizer, "copy", length=2048, count=1, seed=0, depth=None)
    need = bytes_needed(model, length=len(row.tokens) + 1, scored=row.scored)
    monkeypatch.setattr(memory_module, "total_bytes", lambda: 2 * need)
    (score,) = score_task(model, tokenizer, "copy", [2048], name="m", count=1)
    assert "must fit in memory whole; leave out that length" in score.refused


def test_what_several_processes_do_not_share_is_said(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(memory_module, "sharing_processes", lambda: 4)
    monkeypatch.setattr(memory_module, "least_memory", memory_module.memory_of)
    theirs = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=64))
    for model, length in ((small(), 4000), (small(), 7), (theirs, 4000)):
        fitting_chunk(model, length=length, scored=2, processes=memory_module.sharing(model, length))
    need = bytes_needed(small(), length=50_000, scored=9, processes=4)
    monkeypatch.setattr(memory_module, "total_bytes", lambda: 2 * need - 1)
    fitting_chunk(small(), length=50_000, scored=9, processes=4)
    assert [record.message for record in caplog.records if "processes" in record.message] == [
        "each of 4 processes measures all of a window of 7: it has too few tokens for all",
        "each of 4 processes measures all of a window of 4,000: the model is not one of Lengthwise",
        "each of 4 processes measures all of a window of 50,000: only its chunks fit in memory, which are not shared",
    ]


def test_a_length_beyond_a_learned_table_is_a_cell_that_says_so_and_the_table_goes_on(text):
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=23, n_embd=24, n_layer=1, n_head=3))
    ours = small("learned", n_positions=23)
    scores = [s for name, m in (("g", gpt2), ("o", ours)) for s in score_lengths(m, text, [12, 23, 24], name=name)]
    table = LengthTable(scores)
    assert [str(table.cell(name, 24)) for name in "go"] == ["-", "-"]
    assert all(table.cell(name, n).value > 1 for name in "go" for n in (12, 23))
    assert re.search("g at 24: .*ends at 23", table.text())


def test_limits_of_foreign_tables_are_found():
    opt = OPTConfig(
        vocab_size=257,
        hidden_size=24,
        num_hidden_layers=1,
        ffn_dim=40,
        num_attention_heads=3,
        max_position_embeddings=37,
        word_embed_proj_dim=24,
    )
    assert max_length(OPTForCausalLM(opt)) == 37
    assert max_length(llama()) is None
    assert max_length(small("learned-long")) == 97


@pytest.mark.parametrize("scaling", ["linear:4", "yarn:4", "dynamic:4"])
def test_a_scaling_at_evaluation_time_is_the_model_built_with_it(scaling, text):
    kind, factor = scaling.split(":")
    ids = torch.from_numpy(text.tokens[None, :61].copy())
    ours = lw.stretch(small("rope"), scaling)
    built = small("rope", encoding_options={"scaling": {"type": kind, "factor": float(factor)}})
    torch.testing.assert_close(ours(ids).logits, built(ids).logits)
    rope = {"rope_type": kind, "factor": float(factor), "rope_theta": 10000.0, "original_max_position_embeddings": 23}
    torch.testing.assert_close(lw.stretch(llama(), scaling)(ids).logits, llama(rope_parameters=rope)(ids).logits)
    assert not torch.equal(ours(ids).logits, small("rope")(ids).logits)


def test_an_evaluation_leaves_the_model_as_it_was(text):
    ids = torch.from_numpy(text.tokens[None, :61].copy())
    model = llama()
    before = model(ids).logits
    with contextlib.suppress(RuntimeError), stretching(model, parse_stretch("linear:8")):
        assert not torch.equal(model(ids).logits, before)
        raise RuntimeError
    assert torch.equal(model(ids).logits, before)


@pytest.fixture(scope="module")
def table(text):
    scores = [s for name in ("alibi", "none") for s in score_lengths(small(name), text, [12, 29], name=name)]
    return LengthTable(scores)


def test_a_table_is_read_back_from_its_json_and_says_the_same(table):
    scores = [Score.from_json(found) for found in json.loads(table.json())["scores"]]
    assert LengthTable(scores).text() == table.text()


def test_the_forms_of_a_table_have_the_same_figures(table):
    cell = str(table.cell("none", 29))
    rows = list(csv.DictReader(io.StringIO(table.csv())))
    (row,) = [row for row in rows if row["model"] == "none" and row["length"] == "29"]
    assert f"{float(row['value']):.2f}" == cell.replace(",", "") or float(row["value"]) >= 1000
    assert float(row["low"]) <= float(row["value"]) <= float(row["high"])
    for form in (table.text(), table.markdown(), table.latex()):
        assert cell in form
    assert table.latex().count(r"\textbf") == 2


def test_each_interval_of_a_table_is_computed_once(table, monkeypatch):
    calls = []
    monkeypatch.setattr(table_module, "bootstrap", lambda sums: calls.append(sums) or Interval(0.0, 1.0))
    fresh = LengthTable(table.scores)
    for form in (fresh.text, fresh.markdown, fresh.latex, fresh.csv):
        form()
    assert len(calls) == 4


def test_every_result_says_protocol_text_and_tokens_scored(table):
    assert "fair: the same" in table.text()
    assert "text: text; " in table.text()
    assert f"{table.scores[0].scored:,} tokens scored" in table.text()


def test_one_document_has_no_interval_and_the_table_says_so(tmp_path):
    scores = [Score("a", n, "fair", "text", "t", "x", [0], [20.0 + n], [10], [40]) for n in (8, 16)]
    result = Evaluation(LengthTable(scores), [], None)
    assert result.rows()[1][:2] == ["a", "16.44 (-)"]
    assert "no 95 % intervals: the scored tokens are of one document" in result.notes()
    assert png(rise_figure(result.table, train_length=8))
    assert png(length_figure(result.table))


def test_the_figure_of_several_rows_draws_intervals_over_seeds_and_none_over_documents():
    scores = [
        Score(f"{name}-{seed}", n, "fair", "text", "t", "x", [0, 1], [20.0 + n + seed, 30.0], [10, 10], [40, 40])
        for name in "ab"
        for seed in (1, 2)
        for n in (8, 16)
    ]
    seeds = LengthTable(scores, rows={f"{name}-{seed}": (name, seed) for name in "ab" for seed in (1, 2)})
    for table, bars in ((seeds, 2), (LengthTable(scores), 0), (LengthTable(scores[:2]), 1)):
        figure = length_figure(table)
        assert len(figure.axes[0].collections) == bars
        assert ("95 % intervals" in figure.texts[0].get_text()) == bool(bars)


def test_in_a_notebook_a_table_shows_itself(table):
    assert table._repr_markdown_() == table.markdown()


def test_models_with_different_tokenizers_are_compared_in_bits_per_byte_and_the_table_says_why(text):
    scores = [score_lengths(small(), text, [12], name=n, tokenizer=t)[0] for n, t in (("a", "x"), ("b", "y"))]
    table = LengthTable(scores)
    assert table.cell("a", 12).value == pytest.approx(scores[0].bits_per_byte)
    assert "bits per byte only: the models have different tokenizers" in table.text()
    (control,) = score_lengths(small("rope"), text, [12], name="control", tokenizer="x")
    (axes,) = control_figure(LengthTable([*scores, control]), {"a": "control"}).axes
    (drawn,) = axes.get_lines()[0].get_ydata()
    assert drawn == pytest.approx(scores[0].bits_per_byte / control.bits_per_byte)


def test_a_paired_difference_of_a_model_and_itself_is_nothing_and_needs_the_same_tokens(table, text):
    twin = [Score(**(vars(score) | {"name": "twin"})) for score in table.scores if score.name == "none"]
    both = LengthTable([*table.scores, *twin])
    assert both.difference("none", "twin", 29) == (0.0, (0.0, 0.0))
    value, interval = both.difference("alibi", "none", 29)
    assert interval.low <= value <= interval.high
    other = score_lengths(small(), text, [29], name="other", windows=7)
    with pytest.raises(ValueError, match="on the same tokens"):
        LengthTable([*table.scores, *other]).difference("none", "other", 29)


def test_a_paired_change_is_the_ratio_of_two_lengths_and_needs_the_same_tokens(table, text):
    value, interval = table.change("none", 29, 12)
    assert math.exp(value) == pytest.approx(table.cell("none", 29).value / table.cell("none", 12).value)
    assert interval.low <= value <= interval.high
    assert table.change("none", 29, 29) == (0.0, (0.0, 0.0))
    other = LengthTable(score_lengths(small(), text, [12, 29], name="other", protocol="paper"))
    with pytest.raises(ValueError, match="use the protocol fair"):
        other.change("other", 29, 12)


def test_seeds_share_a_row_and_its_figure_is_their_mean_loss(text):
    scores = [score_lengths(small(name), text, [12], name=name)[0] for name in ("alibi", "kerple", "none")]
    table = LengthTable(scores, rows={score.name: ("all", seed) for seed, score in enumerate(scores)})
    assert table.names == ["all"]
    assert math.log(table.cell("all", 12).value) == pytest.approx(np.mean([score.loss for score in scores]))
    assert "95 % intervals by Student's t over 3 seeds" in table.notes()
    low, high = t_interval([score.loss for score in scores])
    assert table.cell("all", 12).interval == pytest.approx((math.exp(low), math.exp(high)))
    with pytest.raises(ValueError, match="names and seeds must differ in one table, got 'kerple' twice"):
        LengthTable(scores, rows={score.name: ("all", 1) for score in scores})
    assert not any("seeds" in line for line in LengthTable(scores).notes()), "one seed has an interval over documents"


def seeded(losses):
    """A table of scores by row, seed and length, each of four documents of ten tokens with this loss on average."""
    scores, rows = [], {}
    for (row, seed), by_length in losses.items():
        name = f"{row}-{seed}"
        rows[name] = (row, seed)
        for length, loss in by_length.items():
            nats = [10 * loss + shift for shift in (-1.0, 0.0, 0.5, 0.5)]
            scores.append(Score(name, length, "fair", "x", "y", "same", [0, 1, 2, 3], nats, [10] * 4, [40] * 4))
    return LengthTable(scores, rows=rows)


def test_seeds_are_paired_by_their_number_and_two_or_more_have_an_interval_by_student_s_t():
    first = {("a", 1): {8: 2.0, 16: 2.1}, ("a", 2): {8: 2.2, 16: 2.5}, ("a", 3): {8: 1.9, 16: 2.0}}
    table = seeded(first | {("b", 2): {8: 2.0, 16: 2.0}, ("b", 3): {8: 1.8, 16: 2.0}, ("c", 3): {8: 1.0, 16: 1.0}})
    value, interval = table.change("a", 16, 8)
    assert value == pytest.approx(np.mean([0.1, 0.3, 0.1]))
    assert interval == pytest.approx(t_interval([0.1, 0.3, 0.1]))
    rises = [math.expm1(change) for change in (0.1, 0.3, 0.1)]
    assert table.rises("a", 16, 8) == pytest.approx(dict(zip((1, 2, 3), rises, strict=True)))
    value, interval = table.rise("a", 16, 8)
    assert (value, interval) == (pytest.approx(np.mean(rises)), pytest.approx(t_interval(rises)))
    value, interval = table.difference("a", "b", 8)
    assert (value, interval) == (pytest.approx(0.15), pytest.approx(t_interval([0.2, 0.1])))
    assert (table.paired_seeds("a", "b", 8), table.paired_seeds("a", "c", 8)) == (2, 1)
    value, interval = table.difference("a", "c", 8)
    assert value == pytest.approx(0.9), "of seed 3 alone"
    assert interval == pytest.approx((0.9, 0.9)), "over documents, all of which differ alike"
    assert "95 % intervals by Student's t over 2 to 3 seeds, of one score over documents" in table.notes()
    other = [
        dataclasses.replace(score, targets=str(score.length)) for score in table.scores if score.name.startswith("a")
    ]
    assert LengthTable(other, rows={f"a-{seed}": ("a", seed) for seed in (1, 2, 3)}).rises("a", 16, 8) == {}
    assert table.holds("a").length == 8
    assert seeded({("a", 1): {8: 2.0, 16: 2.07}, ("a", 2): {8: 2.0, 16: 2.0}}).holds("a").length == 16, "the mean does"
    apart = seeded({("a", 1): {8: 2.0}, ("b", 2): {8: 2.0}})
    with pytest.raises(ValueError, match="with the same seed"):
        apart.difference("a", "b", 8)
    assert png(rise_figure(table, train_length=8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths": []}, "there must be a length"),
        ({"lengths": [0]}, "a positive int"),
        ({"lengths": [5000]}, "one token more than the longest length, 5,001, got"),
        ({"lengths": [12], "windows": 0}, "windows must be a positive int"),
        ({"lengths": [12], "protocol": "best"}, "'fair' or 'paper' or 'sliding', got 'best'"),
        ({"lengths": [12], "stride": -1}, "stride must be a positive int"),
    ],
)
def test_bad_input_is_refused(text, change, words):
    with pytest.raises(ValueError, match=words):
        score_lengths(small(), text, name="m", **change)


def test_an_empty_table_a_name_that_comes_twice_and_an_empty_text_are_refused(table, bytes_tokenizer):
    with pytest.raises(ValueError, match="at least one score"):
        LengthTable([])
    with pytest.raises(ValueError, match="got 'alibi' twice at length 12"):
        LengthTable([*table.scores, table.scores[0]])
    with pytest.raises(ValueError, match="at least two tokens"):
        read_corpus(["", ""], bytes_tokenizer)


def test_the_key_of_a_figure_has_room_for_long_names():
    figure = lines_figure([Line("rope-1337+leaky-rerope:1024:8", [1, 2], [1, 2])], title="", across="x", up="y")
    figure.canvas.draw()
    (legend,) = figure.findobj(Legend)
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in legend.get_texts())
