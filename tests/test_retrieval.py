"""Retrieval by length: the set that every Python has, the metrics, BM25, pseudo-perplexity, and what is refused."""

import gzip
import json
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from encoder_kit import loud_encoder, mask_tokenizer
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from tokenizers.processors import TemplateProcessing
from train_kit import share_kernel

from lengthwise.cli import main
from lengthwise.data import documents
from lengthwise.data.retrieval import (
    Document,
    EncodedSet,
    RetrievalError,
    RetrievalSet,
    TextEncoder,
    retrieval_set,
    training_pairs,
)
from lengthwise.data.tokenizers import load_tokenizer, with_start_token
from lengthwise.evaluate import masked, memory
from lengthwise.evaluate.corpus import Corpus
from lengthwise.evaluate.masked import EVERY, masked_places, score_masked_lengths
from lengthwise.evaluate.ranking import bm25, rank_metrics
from lengthwise.evaluate.retrieval import pooling_of, score_bm25, score_retrieval, text_vectors
from lengthwise.evaluate.retrieval_table import RetrievalScore, RetrievalTable
from lengthwise.evaluate.statistics import bootstrap, t_interval
from lengthwise.loading import LoadedModel, LoadError
from lengthwise.testing import assert_near


@pytest.fixture(scope="module")
def stdlib() -> RetrievalSet:
    return retrieval_set("stdlib")


def test_docstrings_are_cut_out_of_their_documents(stdlib):
    texts = [" ".join(document.text.split()) for document in stdlib.documents]
    assert len(stdlib.queries) > 30
    assert len(stdlib.documents) > len(stdlib.queries)
    for query in stdlib.queries:
        assert not any(query in text for text in texts), query
    assert len(set(stdlib.queries)) == len(stdlib.queries)
    assert all(len(answers) == 1 for answers in stdlib.relevant)
    for text in documents("stdlib", "train"):
        words = " ".join(text.split())
        assert not any(query in words for query in stdlib.queries), "a model has been trained on this query"
    assert retrieval_set("stdlib") == stdlib, "the same every time"


def decoded(ids) -> str:
    return bytes(ids.tolist()).decode()


def test_a_document_has_every_length_around_its_place_grown_with_filler_where_it_is_short():
    encoder = TextEncoder(load_tokenizer("bytes"))
    document = Document("a", "0123456789", place=6)
    windows = {n: decoded(encoder.document(document, n)) for n in (2, 4, 10)}
    assert windows == {2: "56", 4: "4567", 10: "0123456789"}
    grown = decoded(encoder.document(document, 200))
    assert len(grown) == 200
    assert "0123456789" in grown
    assert grown.replace("0123456789", "").count("says nothing") >= 2
    assert decoded(encoder.document(Document("b", "0123456789"), 4)) == "0123"


def test_rank_metrics_are_those_of_a_hand():
    scores = np.array([[0.9, 0.8, 0.7], [0.1, 0.2, 0.3]])
    values = rank_metrics(scores, [{1: 1}, {0: 1, 2: 1}])
    assert values["ndcg"] == pytest.approx([1 / math.log2(3), (1 + 1 / math.log2(4)) / (1 + 1 / math.log2(3))])
    assert values["recall"] == [1, 1]
    assert values["mrr"] == [0.5, 1]
    far = rank_metrics(-np.arange(20.0)[None], [{15: 1}])
    assert far == {"ndcg": [0.0], "recall": [0.0], "mrr": [0.0]}


def test_grades_count_in_ndcg():
    values = rank_metrics(np.array([[0.9, 0.8, 0.7]]), [{1: 1, 2: 3}])
    assert values["ndcg"] == pytest.approx([(1 / math.log2(3) + 3 / 2) / (3 + 1 / math.log2(3))])
    assert (values["recall"], values["mrr"]) == ([1], [0.5])


def test_of_equal_scores_the_relevant_document_comes_last():
    equal = rank_metrics(np.zeros((2, 3)), [{0: 1}, {2: 1}])
    assert equal["mrr"] == pytest.approx([1 / 3, 1 / 3])
    far = rank_metrics(np.zeros((1, 20)), [{0: 1}])
    assert far == {"ndcg": [0.0], "recall": [0.0], "mrr": [0.0]}


def test_a_model_whose_vectors_are_not_numbers_has_no_score():
    broken = loaded("alibi")
    with torch.no_grad():
        broken.model.base_model.get_input_embeddings().weight[5:9] = math.nan
    scores = score_retrieval(broken, EncodedSet(small_set(), mask_tokenizer()), [16, 64])
    assert [score.refused for score in scores] == [f"vectors are not finite at {n} tokens" for n in (16, 64)]
    assert RetrievalTable(scores).rows()[1] == ["alibi", "-", "-"]


def test_bm25_is_its_formula():
    found = bm25(["red fox"], ["the red fox runs", "a red car", "nothing here"])
    sizes, rarity = np.array([4, 3, 2]), {1: math.log(1 + 2.5 / 1.5), 2: math.log(1 + 1.5 / 2.5)}
    once = 2.2 / (1 + 1.2 * (0.25 + 0.75 * sizes / 3))
    assert found[0] == pytest.approx([once[0] * (rarity[2] + rarity[1]), once[1] * rarity[2], 0])


def small_set() -> RetrievalSet:
    documents = [Document(str(i), " ".join(f"w{3 + (11 * i + j * j) % 90}" for j in range(40)), 60) for i in range(6)]
    queries = [" ".join(document.text.split()[12:20]) for document in documents[:4]]
    return RetrievalSet("small", queries, documents, [{i: 1} for i in range(4)], ["a", "a", "b", "c"])


def loaded(encoding: str, **changes: object) -> LoadedModel:
    return LoadedModel(encoding, loud_encoder(encoding, **changes), mask_tokenizer(), trained=True)


def test_queries_are_scored_at_every_length_and_an_encoding_that_ends_is_refused_by_name(tmp_path):
    texts, lengths = EncodedSet(small_set(), mask_tokenizer()), [16, 64, 128]
    scores = [score for name in ("alibi", "learned") for score in score_retrieval(loaded(name), texts, lengths)]
    scores += score_bm25(texts, lengths)
    table = RetrievalTable(scores)
    assert table.names == ["alibi", "learned", "BM25"]
    assert "64" in str(table.scores[5].refused)
    assert [score.refused is None for score in table.scores] == [True] * 5 + [False] + [True] * 3
    assert table.rows()[2][-1] == "-"
    assert table.value("BM25", 16) > 0.9
    head, *rows = table.difference_rows()
    assert head == ["nDCG@10 above alibi", "16", "64", "128"]
    assert [row[0] for row in rows] == ["learned", "BM25"]
    assert rows[0][3] == "-"
    assert float(rows[1][1].split()[0]) == pytest.approx(table.value("BM25", 16) - table.value("alibi", 16), abs=5e-4)
    value, interval = table.change("alibi", 128, 16)
    assert interval.low <= value <= interval.high
    assert value == pytest.approx(table.value("alibi", 128) - table.value("alibi", 16))
    for text in (table.text(), table.markdown(), table.csv()):
        assert "alibi" in text
    assert {path.name for path in table.write(tmp_path)} == {
        *("retrieval.json", "retrieval.csv", "retrieval.md", "retrieval.png")
    }
    again = [RetrievalScore(**score) for score in json.loads((tmp_path / "retrieval.json").read_text())]
    assert again == scores


def seed_score(name: str, length: int, *ndcg: float) -> RetrievalScore:
    groups = [str(i) for i in range(len(ndcg))]
    return RetrievalScore(name, length, "set", 9, groups, list(ndcg), list(ndcg), list(ndcg))


def test_a_name_that_comes_twice_in_a_table_is_refused():
    with pytest.raises(ValueError, match="names and seeds must differ in one table, got 'rope' twice at length 16"):
        RetrievalTable([seed_score("rope", 16, 0.5), seed_score("rope", 16, 0.6)])
    rows = {"rope-1": ("rope", 1), "rope-2": ("rope", 1)}
    with pytest.raises(ValueError, match="got 'rope-2' twice"):
        RetrievalTable([seed_score("rope-1", 16, 0.5), seed_score("rope-2", 16, 0.6)], rows=rows)


def test_intervals_of_several_seeds_are_by_student_s_t_over_them():
    values = {"rope": [(0.5, 0.2), (0.6, 0.5), (0.7, 0.5)], "alibi": [(0.4, 0.4), (0.5, 0.4), (0.9, 0.6)]}
    scores = [
        seed_score(f"{name}-{seed}", length, value + 0.1, value - 0.1)
        for name, seeds in values.items()
        for seed, by_length in enumerate(seeds)
        for length, value in zip((16, 128), by_length, strict=True)
    ]
    words = seed_score("BM25", 16, 0.5, 0.3)
    table = RetrievalTable([*scores, words], rows={f"{n}-{s}": (n, s) for n in values for s in range(3)})
    assert table.interval("rope", 16) == pytest.approx(t_interval([0.5, 0.6, 0.7]))
    assert table.change("rope", 128, 16)[1] == pytest.approx(t_interval([-0.3, -0.1, -0.2]))
    value, interval = table.difference("rope", "alibi", 16)
    assert value == pytest.approx(0)
    assert interval == pytest.approx(t_interval([0.1, 0.1, -0.2])), "seed by seed"
    assert table.difference("rope", "BM25", 16)[1] == pytest.approx(t_interval([0.1, 0.2, 0.3]))
    assert table.interval("BM25", 16) == bootstrap(words.sums()), "one score has an interval over queries"
    assert "by Student's t over seeds" in table.notes()[0]
    assert "over groups of queries" in RetrievalTable([words]).notes()[0]
    apart = RetrievalTable([scores[0], scores[-2]], rows={"rope-0": ("rope", 0), "alibi-2": ("alibi", 2)})
    with pytest.raises(ValueError, match="a seed that both have, got none"):
        apart.difference("rope", "alibi", 16)


def test_queries_are_cut_alike_for_models_and_bm25_and_the_table_says_how_many():
    late = " ".join(["w7"] * 70 + ["w91"])
    documents = [Document("0", " ".join(["w91"] * 9)), Document("1", " ".join(["w8"] * 9))]
    corpus = RetrievalSet("set", [late, "w8 w8"], documents, [{0: 1}, {1: 1}], ["a", "b"])
    texts = EncodedSet(corpus, mask_tokenizer())
    assert [len(query) for query in texts.queries()] == [64, 2]
    words, short = score_bm25(texts, [16]), score_retrieval(loaded("learned", n_positions=16), texts, [16])
    assert words[0].mrr == [0.5, 1.0], "w91 stands behind the cut"
    assert short[0].refused is None, "a query ends where the model's positions do"
    table = RetrievalTable([*words, *short, *score_retrieval(loaded("alibi"), texts, [16])])
    assert table.notes()[1:] == [
        "BM25, alibi: 1 of 2 queries cut to 64 tokens",
        "learned: 1 of 2 queries cut to 16 tokens",
    ]
    assert RetrievalTable(words).notes()[1] == "1 of 2 queries cut to 64 tokens"


def test_one_group_of_queries_has_no_interval_and_the_table_says_so(tmp_path):
    scores = [
        RetrievalScore("alibi", n, "set", 9, ["a", "a"], [value] * 2, [value] * 2, [value] * 2)
        for n, value in ((16, 0.5), (64, 0.25))
    ]
    table = RetrievalTable(scores)
    assert table.rows()[1] == ["alibi", "0.500 (-)", "0.250 (-)"]
    assert table.change_rows(16)[1] == ["alibi", "-0.250 (-)"]
    assert "no 95 % intervals: the queries are of one group" in table.notes()[0]
    assert (tmp_path / "retrieval.png") in table.write(tmp_path)


def test_vectors_do_not_depend_on_the_texts_beside_them():
    one = loaded("cable")
    texts = [[5, 9, 14], [7] * 30, [8, 3, 9, 27, 44, 6, 13]]
    for pooling in ("mean", "first"):
        together = text_vectors(one.model, texts, pooling=pooling)
        alone = torch.cat([text_vectors(one.model, [text], pooling=pooling) for text in texts])
        assert_near(together, alone, pooling)
        assert torch.allclose(together.norm(dim=1), torch.ones(3))


def test_pooling_is_read_from_sentence_transformers_files(tmp_path):
    model = loud_encoder("alibi", pooling="first")
    model.save_pretrained(tmp_path)
    assert pooling_of(tmp_path, model) == "first"
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True, "x": False}))
    assert pooling_of(tmp_path, model) == "mean"
    for stored in (
        {"pooling_mode": "max"},
        {"pooling_mode": ["mean", "max"]},
        {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
        {"pooling_mode_cls_token": True, "pooling_mode_lasttoken": True},
        {"pooling_mode_mean_tokens": False},
    ):
        (tmp_path / "1_Pooling/config.json").write_text(json.dumps(stored))
        with pytest.raises(ValueError, match="pooled by the mean or from the first token"):
            pooling_of(tmp_path, model)
    for stored in ({"pooling_mode": ["cls"]}, {"pooling_mode_cls_token": True, "include_prompt": True}):
        (tmp_path / "1_Pooling/config.json").write_text(json.dumps(stored))
        assert pooling_of(tmp_path, model) == "first"
    dense = [{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(dense))
    with pytest.raises(ValueError, match=r"pooled and normed tokens, got .* with sentence_transformers\.models\.Dense"):
        pooling_of(tmp_path, model)


def test_without_a_connection_the_pooling_of_a_model_on_the_hub_is_not_guessed(tmp_path, monkeypatch):
    def download(checkpoint, name):
        raise fault("nothing there")

    monkeypatch.setattr("lengthwise.evaluate.retrieval.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model, fault = loud_encoder("alibi"), EntryNotFoundError
    assert pooling_of("someone/model", model) == "mean", "the hub does not have the file"
    fault = LocalEntryNotFoundError
    with pytest.raises(LoadError, match="got no connection to ask someone/model for it"):
        pooling_of("someone/model", model)


def test_sets_that_nothing_can_be_retrieved_from_are_named(tmp_path):
    documents = [Document("a", "text")]
    with pytest.raises(RetrievalError, match="every query must have a relevant document, got 'what' without one"):
        RetrievalSet("set", ["what"], documents, [{}], ["g"])
    with pytest.raises(RetrievalError, match="0 queries and 1 documents"):
        RetrievalSet("set", [], documents, [], [])
    empty = RetrievalSet("set", ["what"], [Document("a", "")], [{0: 1}], ["g"])
    with pytest.raises(RetrievalError, match="a document at every length, got set with none at 16"):
        EncodedSet(empty, mask_tokenizer()).documents(16)
    with pytest.raises(RetrievalError, match=r"must be 'stdlib' or a folder with corpus.jsonl"):
        retrieval_set(str(tmp_path))


def test_a_folder_as_beir_has_it_is_a_set(tmp_path):
    rows = [{"_id": "d1", "title": "Crows", "text": "They fly."}, {"_id": "d2", "text": "Ships sail."}]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    queries = [{"_id": "q1", "text": "who sails"}, {"_id": "q2", "text": "not judged"}]
    (tmp_path / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td2\t1\nq1\td1\t0\n")
    found = retrieval_set(str(tmp_path))
    assert found.queries == ["who sails"]
    assert found.relevant == [{1: 1}]
    assert found.documents[0].text == "Crows\nThey fly."
    (tmp_path / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td9\t1\n")
    with pytest.raises(RetrievalError, match="got 'd9'"):
        retrieval_set(str(tmp_path))
    (tmp_path / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1 d2 1\n")
    with pytest.raises(RetrievalError, match=r"query, document and score a line .*, got 'q1 d2 1' in line 2"):
        retrieval_set(str(tmp_path))
    (tmp_path / "corpus.jsonl").write_text('{"_id": "d1"}\n')
    with pytest.raises(RetrievalError, match="one JSON object with _id and text a line, got another in line 1"):
        retrieval_set(str(tmp_path))


def test_grades_are_kept_and_queries_without_an_answer_are_left_out_and_counted(tmp_path):
    rows = [{"_id": "q1", "text": "w8 w8"}, {"_id": "d2", "text": "w8 w9"}, {"_id": "d3", "text": "w5"}]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    queries = [{"_id": "q1", "text": "w8"}, {"_id": "q2", "text": "w5"}]
    (tmp_path / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels/test.tsv").write_text("q\td\ts\nq1\td2\t2\nq1\td3\t1\nq2\td3\t0\n")
    corpus = retrieval_set(str(tmp_path))
    assert (corpus.queries, corpus.relevant) == (["w8"], [{1: 2, 2: 1}])
    texts = EncodedSet(corpus, mask_tokenizer())
    table = RetrievalTable([*score_bm25(texts, [16]), *score_retrieval(loaded("alibi"), texts, [16])])
    assert table.notes()[1:] == ["1 judged queries left out: no document answers them"]
    assert table.value("BM25", 16) == 1, "the document that is the query itself is not ranked"
    (tmp_path / "qrels/test.tsv").write_text("q\td\ts\nq1\tq1\t1\n")
    assert retrieval_set(str(tmp_path)).own == {}, "one that answers it is"


def made_corpus(length: int = 400) -> Corpus:
    generator = np.random.default_rng(0)
    tokens = generator.integers(3, 90, length)
    return Corpus("made", tokens, np.arange(length) // 50, np.ones(length, dtype=np.int64))


def test_pseudo_perplexity_is_of_the_same_masked_tokens_at_every_length():
    corpus, lengths = made_corpus(), [16, 32, 128]
    scores = [
        score_masked_lengths(loud_encoder(name), corpus, lengths, mask=2, name=name, windows=6)
        for name in ("alibi", "learned")
    ]
    assert len({score.targets for score in scores[0]}) == 1
    assert scores[0][0].scored == scores[0][2].scored == 6 * len(range(0, 8, EVERY))
    assert "64" in str(scores[1][2].refused)
    model, (centres, span) = loud_encoder("alibi"), masked_places(400, lengths, 6)
    places = centres[:, None] + np.arange(-(span // 2), span - span // 2, EVERY)
    total = 0.0
    for centre, own in zip(centres, places, strict=True):
        begin = centre - 16
        ids = torch.from_numpy(corpus.tokens[begin : begin + 32]).clone()[None]
        wanted = ids[0, own - begin]
        ids[0, own - begin] = 2
        with torch.no_grad():
            logp = model(ids).logits[0, own - begin].log_softmax(-1)
        total -= float(logp.gather(1, wanted[:, None]).sum())
    assert scores[0][1].loss == pytest.approx(total / places.size, rel=1e-5)
    with pytest.raises(ValueError, match="one token more than the longest length, 501, got 400"):
        score_masked_lengths(model, corpus, [500], mask=2, name="x")


def test_no_more_windows_of_an_encoder_go_together_than_memory_has_room_for(monkeypatch):
    model, passed = loud_encoder("alibi"), []
    model.base_model.register_forward_pre_hook(lambda _, args: passed.append(len(args[0])))
    (whole,) = score_masked_lengths(model, made_corpus(), [16], mask=2, name="x", windows=7)
    assert passed == [7]
    need = memory.bytes_needed(model, length=16, scored=16, batch=3)
    monkeypatch.setattr(memory, "total_bytes", lambda: 2 * need)
    (parts,) = score_masked_lengths(model, made_corpus(), [16], mask=2, name="x", windows=7)
    assert passed[1:] == [3, 3, 1]
    assert parts.nats == pytest.approx(whole.nats, rel=1e-5)


def test_windows_of_an_encoder_begin_and_end_as_its_texts_do_and_special_tokens_are_not_predicted():
    corpus, (centres, span) = made_corpus(), masked_places(400, [16, 32], 6)
    places = centres[:, None] + np.arange(-(span // 2), span - span // 2, EVERY)
    corpus.tokens[places[0, 0]] = 3
    corpus.tokens[places[1:]] = np.maximum(corpus.tokens[places[1:]], 4)
    corpus.tokens[places[0, 1:]] = np.maximum(corpus.tokens[places[0, 1:]], 4)
    model, total = loud_encoder("alibi"), 0.0
    options = {"mask": 2, "name": "x", "windows": 6, "around": ([3], [5, 6]), "special": [2, 3]}
    scores = score_masked_lengths(model, corpus, [16, 32], **options)
    for number, (centre, own) in enumerate(zip(centres, places, strict=True)):
        own, begin = own[1:] if number == 0 else own, centre - 16
        ids = torch.from_numpy(corpus.tokens[begin : begin + 32]).clone()[None]
        wanted = ids[0, own - begin]
        ids[0, 0], ids[0, -2], ids[0, -1] = 3, 5, 6
        ids[0, own - begin] = 2
        with torch.no_grad():
            logp = model(ids).logits[0, own - begin].log_softmax(-1)
        total -= float(logp.gather(1, wanted[:, None]).sum())
    assert scores[1].scored == scores[0].scored == places.size - 1
    assert scores[1].loss == pytest.approx(total / (places.size - 1), rel=1e-5)
    with pytest.raises(ValueError, match="tokens to predict, got special tokens alone"):
        score_masked_lengths(model, corpus, [16], **options | {"special": list(range(100))})


def test_the_command_reads_an_encoder_s_own_tokens_around_every_window(tmp_path, monkeypatch):
    share_kernel(tmp_path / "cache")
    folder = saved_encoder(tmp_path / "encoder")
    tokenizer = mask_tokenizer()
    tokenizer.add_special_tokens({"cls_token": "w3", "sep_token": "w4"})
    ends = {"special_tokens": [("w3", 3), ("w4", 4)]}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="w3 $A w4", pair="w3 $A w4 $B w4", **ends)
    tokenizer.save_pretrained(folder)
    windows = []
    inner = masked.masked_token_losses
    monkeypatch.setattr(
        masked, "masked_token_losses", lambda model, read, *rest: windows.append(read) or inner(model, read, *rest)
    )
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{5 + n * n % 85}" for n in range(6000)))
    main(["evaluate", folder, "--text", str(text), "--lengths", "16", "--windows", "4"])
    assert (windows[0][:, 0] == 3).all()
    assert (windows[0][:, -1] == 4).all()


def saved_encoder(folder) -> str:
    tokenizer = mask_tokenizer()
    loud_encoder("alibi").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_command_measures_retrieval_and_pseudo_perplexity(tmp_path, capsys, monkeypatch):
    share_kernel(tmp_path / "cache")
    folder = saved_encoder(tmp_path / "encoder")
    monkeypatch.setattr("lengthwise.evaluate.retrieval.retrieval_set", lambda name: small_set())
    main(["evaluate", folder, "--retrieval", "--lengths", "16", "32", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "nDCG@10" in printed
    assert "BM25" in printed
    assert (tmp_path / "out/retrieval.csv").is_file()
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{3 + n * n % 90}" for n in range(6000)))
    words = ["evaluate", folder, "--text", str(text), "--lengths", "16", "32", "--windows", "4"]
    main([*words, "--out", str(tmp_path / "masked")])
    assert "fair, masked: the same" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "masked").glob("*.png")} == {"lengths.png"}, "an encoder has no places"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "copy"], "--tasks: for models that predict the next token"),
        (["--protocol", "sliding", "--stride", "8"], "--protocol, --stride: for models that predict the next token"),
        (["--chunk", "8"], "--chunk: for models"),
        (["--by-position"], "--by-position: for models"),
        (["--stretch", "yarn:2"], "--stretch, --tasks: for models"),
        (["--retrieval"], "--retrieval takes --lengths and --retrieval-set, got --text, --windows too"),
    ],
)
def test_options_that_would_change_nothing_of_an_encoder_are_refused(tmp_path, capsys, words, message):
    folder, text = saved_encoder(tmp_path / "encoder"), tmp_path / "text.txt"
    text.write_text(" ".join(f"w{3 + n * n % 90}" for n in range(600)))
    with pytest.raises(SystemExit):
        main(["evaluate", folder, "--text", str(text), "--lengths", "16", "--windows", "4", *words])
    assert message in capsys.readouterr().err


def test_a_masked_model_without_a_mask_token_is_refused(tmp_path, capsys):
    folder = saved_encoder(tmp_path / "encoder")
    tokenizer = mask_tokenizer()
    tokenizer.mask_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(SystemExit):
        main(["evaluate", folder, "--lengths", "16"])
    assert "masked tokens need a mask token" in capsys.readouterr().err


def test_a_query_has_the_tokenizer_s_own_tokens_around_it():
    tokenizer = load_tokenizer("bytes")
    assert TextEncoder(tokenizer).query("ab" * 100) == [97, 98] * 32
    encoder = TextEncoder(with_start_token(tokenizer))
    assert encoder.query("ab" * 100) == [256, *[97, 98] * 31, 97]
    document = Document("a", "0123456789", place=6)
    assert encoder.document(document, 5).tolist() == [256, *b"4567"]


def hub_stand_in(folder, monkeypatch) -> None:
    """A few rows of MS MARCO and of MLDR as the hub has them, behind the functions that download them."""
    answer = {"docid": "doc-en-1", "text": "Ships sail."}
    files = {
        "corpus": [{"docid": "doc-en-0", "text": "Crows fly."}, answer],
        "test": [
            {"query_id": "q-en-7", "query": "who sails?", "positive_passages": [answer], "negative_passages": []},
        ],
    }
    for name, rows in files.items():
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    triplets = [{"query": f"q{i}", "positive": f"p{i}", "negative": f"n{i}"} for i in range(50)]

    def load_dataset(name, subset, *, split, streaming):
        assert (name, subset, split, streaming) == ("sentence-transformers/msmarco-bm25", "triplet", "train", True)
        return iter(triplets)

    def download(repository, path, *, repo_type):
        assert (repository, repo_type) == ("Shitao/MLDR", "dataset")
        assert path.startswith("mldr-v1.0-en/")
        return str(folder / path.removeprefix("mldr-v1.0-en/"))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)


def test_the_recipe_for_the_hub_s_data_writes_what_training_and_retrieval_read(tmp_path, monkeypatch):
    hub_stand_in(tmp_path, monkeypatch)
    script = runpy.run_path(str(Path(__file__).parents[1] / "docs/retrieval_data.py"))
    script["main"](tmp_path / "data")
    pairs = training_pairs(str(tmp_path / "data/msmarco.jsonl"), "all")
    assert [(p.query, p.positive.text, *(n.text for n in p.negatives)) for p in pairs[:1]] == [("q0", "p0", "n0")]
    assert len(pairs) == 50
    corpus = retrieval_set(str(tmp_path / "data/mldr-en"))
    assert (corpus.name, corpus.queries, corpus.relevant) == ("mldr-en", ["who sails?"], [{1: 1}])
    assert [document.text for document in corpus.documents] == ["Crows fly.", "Ships sail."]
