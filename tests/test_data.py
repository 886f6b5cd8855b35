"""Sources, tokenizers, token files and their order: everything a training run reads."""

import json
import logging
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from lengthwise.data import Batches, documents, load_tokenizer, prepare, sources
from lengthwise.data import tokens as preparing
from lengthwise.data.sources import PIECE, held_out_row, joined_articles, read_text, resolve
from lengthwise.data.tokens import Shard, Tokens
from lengthwise.files import file_hash

BYTES = load_tokenizer("bytes")
# The package has the function of that name.


def text_folder(folder, count=41, words=17):
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:03d}.txt").write_text(f"file {i} " + "word " * words)
    return folder


def test_train_and_held_out_are_the_whole_and_do_not_meet(tmp_path):
    folder = text_folder(tmp_path / "texts")
    train, held_out = (set(documents(folder, split)) for split in ("train", "held-out"))
    assert not train & held_out
    assert train | held_out == set(documents(folder, "all"))
    assert len(held_out) == 2


def test_the_standard_library_has_text_and_the_same_split_every_time():
    held_out = list(documents("stdlib", "held-out"))
    assert held_out == list(documents("stdlib", "held-out"))
    size = sum(map(len, documents("stdlib", "train")))
    assert size > 5_000_000
    assert size / 40 < sum(map(len, held_out)) < size / 10


def test_the_documents_of_jsonl_and_parquet_are_their_text_fields(tmp_path):
    from pyarrow import Table, parquet

    texts = [f"row {i}\nünïcode" for i in range(61)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts))
    parquet.write_table(Table.from_pydict({"text": texts}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        assert list(documents(tmp_path / name, "all")) == texts
        train, held_out = (list(documents(tmp_path / name, split)) for split in ("train", "held-out"))
        assert held_out
        assert sorted(train + held_out) == sorted(texts)


@pytest.mark.parametrize("rows", [1, 2, 46, 47, 100])
def test_however_few_the_rows_are_some_text_is_held_out_and_some_left_for_validation(tmp_path, rows):
    texts = [f"row {i:3d} " + "of many words " * 30 for i in range(rows)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train, held_out, fitting, validation = (
        list(documents(path, split)) for split in ("train", "held-out", "fitting", "validation")
    )
    assert all((train, held_out, fitting, validation))
    assert sorted(fitting + validation) == sorted(train) or "".join(fitting + validation) == "".join(train)
    assert sorted(train + held_out) == sorted(texts) or "".join(train + held_out) == "".join(texts)
    if rows == 100:
        assert held_out == [text for row, text in enumerate(texts) if held_out_row(row)]


def test_of_one_text_file_the_last_twentieth_is_held_out(tmp_path):
    text = "".join(f"line {i} é\n" for i in range(1013))
    (tmp_path / "a.txt").write_text(text)
    train, held_out = ("".join(documents(tmp_path / "a.txt", split)) for split in ("train", "held-out"))
    assert train + held_out == text
    assert 0.03 < len(held_out) / len(text) < 0.07


def test_one_line_of_50_mb_is_read_in_pieces(tmp_path):
    (tmp_path / "a.txt").write_bytes("é".encode() * 25_000_001)
    pieces = list(read_text(tmp_path / "a.txt"))
    assert max(map(len, pieces)) == PIECE
    assert sum(map(len, pieces)) == 25_000_001
    held_out = "".join(documents(tmp_path / "a.txt", "held-out"))
    assert set(held_out) == {"é"}


def test_a_character_across_two_pieces_is_one_and_nul_is_text(tmp_path):
    text = "a" * (PIECE - 1) + "é\0" + "b" * 7
    (tmp_path / "a.txt").write_text(text)
    assert "".join(read_text(tmp_path / "a.txt")) == text


@pytest.mark.parametrize("before", [3, PIECE + 11])
def test_bytes_that_are_not_utf8_are_named_by_file_and_offset(tmp_path, before):
    (tmp_path / "a.txt").write_bytes(b"a" * before + b"\xff more")
    with pytest.raises(ValueError, match=rf"must be UTF-8, got byte 0xff at offset {before} of .*a\.txt .*iconv"):
        list(documents(tmp_path / "a.txt", "all"))
    line = b'{"text": "fine"}\n'
    (tmp_path / "b.jsonl").write_bytes(line + b'{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=rf"byte 0xff at offset {len(line) + 10} of .*b\.jsonl"):
        list(documents(tmp_path / "b.jsonl", "all"))


def test_a_line_that_is_not_json_or_has_no_text_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nnonsense\n')
    with pytest.raises(ValueError, match=r"a\.jsonl must have one JSON object a line, got line 2"):
        list(documents(tmp_path / "a.jsonl", "all"))
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n')
    with pytest.raises(ValueError, match=r'the field "text", got the fields body in .*line 1'):
        list(documents(tmp_path / "a.jsonl", "all"))


@pytest.mark.parametrize("name", ["no-such-place", "stdlb", "../up/there/x", "data/nots.txt"])
def test_data_that_is_not_there_is_answered_with_what_could_be(name):
    with pytest.raises(ValueError, match=r"data must be 'stdlib', a file .*'wikitext-103'.*, got "):
        documents(name)


def test_a_folder_without_text_and_an_empty_corpus_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a folder with such files, got .* a folder without any"):
        documents(tmp_path)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=r"the train split of .* must have at least one document, got none"):
        prepare(tmp_path / "a.txt", BYTES, cache=tmp_path / "cache")
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"a\.csv, which is another kind of file"):
        documents(tmp_path / "a.csv")


def test_an_empty_split_of_a_corpus_with_text_is_refused(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"text": "x"}\n')
    assert len(list(documents(tmp_path / "one.jsonl", "all"))) == 1
    splits = [split for split in ("train", "held-out") if not list(documents(tmp_path / "one.jsonl", split))]
    assert len(splits) == 1
    with pytest.raises(ValueError, match=f"the {splits[0]} split of .* must have at least one document, got none"):
        prepare(tmp_path / "one.jsonl", BYTES, split=splits[0], cache=tmp_path / "cache")


def test_latin_1_text_is_refused_with_the_way_to_convert_it(tmp_path):
    (tmp_path / "old.txt").write_bytes("Größe und Maß\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"must be UTF-8, got byte 0xf6 at offset 2 of .*old\.txt.*iconv -f LATIN1"):
        prepare(tmp_path / "old.txt", BYTES, split="all", cache=tmp_path / "cache")


def test_lines_of_wikitext_become_articles():
    lines = ["", " = One = \n", " text \n", " = = Part = = \n", " more \n", " = Two = \n", " end \n"]
    assert list(joined_articles(lines[1:])) == ["".join(lines[1:5]), "".join(lines[5:])]


def test_a_data_set_of_the_hub_is_streamed_and_split_by_rows(monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return iter([{"text": f"row {i}"} for i in range(57)])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    train, held_out = (list(documents("fineweb-edu", split)) for split in ("train", "held-out"))
    assert asked[0] == (("HuggingFaceFW/fineweb-edu", "sample-10BT"), {"split": "train", "streaming": True})
    assert held_out
    assert len(train) + len(held_out) == 57
    monkeypatch.setattr(sources, "STREAM_ROWS", 31)
    assert set(documents("fineweb-edu", "held-out")) == {text for text in held_out if int(text[4:]) < 31}
    assert len(list(documents("fineweb-edu", "all"))) == 57
    list(documents("wikitext-103", "held-out"))
    assert asked[-1][1]["split"] == "validation"
    list(documents("owner/name:some", "train"))
    assert asked[-1][0] == ("owner/name", "some")


def test_the_hub_out_of_reach_is_said_with_what_to_do(monkeypatch):
    def fail(*arguments, **options):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(OSError, match=r"no route to host; check the name and the network"):
        list(documents("owner/name"))


def test_a_bpe_is_learned_once_and_the_same_text_gives_the_same_one(tmp_path):
    folder = text_folder(tmp_path / "texts")
    first, kept, again = (load_tokenizer("bpe:280", source=folder, cache=tmp_path / cache) for cache in ("a", "a", "b"))
    assert len(list((tmp_path / "a/tokenizers").iterdir())) == 1
    assert first.backend_tokenizer.to_str() == kept.backend_tokenizer.to_str() == again.backend_tokenizer.to_str()
    assert len(first) <= 280
    text = "word Größe \0 <|endoftext|>"
    assert first.decode(first(text)["input_ids"]) == text


def test_gpt2_comes_from_its_two_files(tmp_path):
    letters = {chr(i): i - 97 for i in range(97, 123)} | {"Ġ": 26, "he": 27, "<|endoftext|>": 28}
    (tmp_path / "encoder.json").write_text(json.dumps(letters))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\nh e\n")
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer("he he")["input_ids"] == [27, 26, 27]
    assert tokenizer.eos_token_id == 28


@pytest.mark.parametrize("name", ["bpe", "bpe:", "byte", "nowhere/at/all"])
def test_an_unknown_tokenizer_is_answered_with_the_known(name):
    with pytest.raises(ValueError, match=r"'bytes', 'bpe:' and a size .*'gpt2', or a folder.*, got"):
        load_tokenizer(name)


def test_a_bpe_smaller_than_its_bytes_is_refused():
    with pytest.raises(ValueError, match="at least 257 tokens, got 'bpe:100'"):
        load_tokenizer("bpe:100")


def prepared(folder, cache, **options):
    return prepare(folder, BYTES, cache=cache, **options)


def test_tokens_are_the_documents_each_with_its_end(tmp_path):
    folder = text_folder(tmp_path / "texts")
    (folder / "x.txt").write_text("says <|endoftext|> itself")
    tokens = prepared(folder, tmp_path, split="all", shard=301)
    row = tokens.read(0, len(tokens))
    assert len(tokens.shards) > 5
    texts = list(documents(folder, "all"))
    assert (row == 256).sum() == len(texts)
    assert BYTES.decode(row) == "".join(text + "<|endoftext|>" for text in texts)
    assert (tokens.read(290, 67) == row[290:357]).all()
    assert tokens.sha256 == prepared(folder, tmp_path, split="all", shard=301).sha256


def test_a_tokenizer_that_was_saved_with_truncation_and_padding_cuts_and_fills_no_text(tmp_path):
    folder = text_folder(tmp_path / "texts", count=3)
    saved = load_tokenizer("bytes")
    saved.pad_token = saved.eos_token
    saved("a long text", truncation=True, max_length=4, padding="max_length")
    saved.save_pretrained(tmp_path / "tokenizer")
    assert "max_length" in (tmp_path / "tokenizer/tokenizer.json").read_text()
    loaded = load_tokenizer(str(tmp_path / "tokenizer"))
    assert prepare(folder, loaded, split="all", cache=tmp_path).sha256 == prepared(folder, tmp_path, split="all").sha256


def test_another_end_of_text_is_prepared_anew(tmp_path):
    folder = text_folder(tmp_path / "texts", count=3)
    tokenizer = load_tokenizer("bytes")
    prepare(folder, tokenizer, split="all", cache=tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    prepare(folder, tokenizer, split="all", cache=tmp_path)
    tokenizer.eos_token = "<stop>"
    tokens = prepare(folder, tokenizer, split="all", cache=tmp_path)
    assert (tokens.read(0, len(tokens)) == tokens.end).sum() == 3


def test_tokens_are_fetched_from_a_store_once_whole_and_checked(tmp_path, monkeypatch):
    folder = text_folder(tmp_path / "texts")
    made = prepared(folder, tmp_path / "here", split="all", shard=301)
    store, address = fsspec.filesystem("memory"), "memory://token-store"
    for path in made.paths[0].parent.iterdir():
        store.pipe_file(f"/token-store/{path.parent.name}/{path.name}", path.read_bytes())
    monkeypatch.setattr("lengthwise.data.tokens.documents", None)  # nothing is tokenized again
    options = {"split": "all", "shard": 301, "store": address}
    copied = Path(shutil.copytree(folder, tmp_path / "elsewhere" / "texts"))  # with its times
    fetched = prepared(copied, tmp_path / "there", **options)
    assert fetched.sha256 == made.sha256
    assert (fetched.read(0, len(fetched)) == made.read(0, len(made))).all()
    assert all(path.is_relative_to(tmp_path / "there") for path in fetched.paths)
    key = made.paths[1].parent.name
    store.pipe_file(f"/token-store/{key}/{made.paths[1].name}", bytes(made.paths[1].stat().st_size))
    with pytest.raises(OSError, match=rf"{address}/{key}/shard-00001.bin is damaged: its checksum differs"):
        prepared(folder, tmp_path / "elsewhere", **options)
    store.rm("/token-store", recursive=True)
    assert prepared(folder, tmp_path / "there", **options).sha256 == made.sha256, "what was fetched is here"
    with pytest.raises(FileNotFoundError, match=f"the token store must have these tokens, got no {address}/{key}"):
        prepared(folder, tmp_path / "elsewhere", **options)
    with pytest.raises(ValueError, match="--token-store must be an address that fsspec knows, got 'moon://x'"):
        prepared(folder, tmp_path / "elsewhere", **(options | {"store": "moon://x"}))


@pytest.mark.parametrize("damage", ["flip", "truncate", "sidecar", "missing"])
def test_a_damaged_token_file_is_named_and_made_again(tmp_path, caplog, damage):
    folder = text_folder(tmp_path / "texts")
    tokens = prepared(folder, tmp_path, shard=301)
    row = tokens.read(0, len(tokens))
    path = tokens.paths[1]
    times = [p.stat().st_mtime_ns for p in tokens.paths]
    content = path.read_bytes()
    if damage == "flip":
        path.write_bytes(content[:100] + bytes([content[100] ^ 4]) + content[101:])
    elif damage == "truncate":
        path.write_bytes(content[:-2])
    elif damage == "sidecar":
        path.with_suffix(".json").write_text("{")
    else:
        path.unlink()
    with caplog.at_level(logging.WARNING):
        again = prepared(folder, tmp_path, shard=301)
    assert "shard-00001.bin is damaged" in caplog.text
    assert (again.read(0, len(again)) == row).all()
    assert again.paths[0].stat().st_mtime_ns == times[0], "only the damaged one is made again"


def test_preparing_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    folder = text_folder(tmp_path / "texts")
    whole = prepared(folder, tmp_path / "whole", shard=301)
    write, made = preparing._write, []

    def write_three(path, *rest):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(path.name)
        return write(path, *rest)

    monkeypatch.setattr(preparing, "_write", write_three)
    with pytest.raises(KeyboardInterrupt):
        prepared(folder, tmp_path, shard=301)
    made.clear()
    monkeypatch.setattr(preparing, "_write", lambda path, *rest: (made.append(path.name), write(path, *rest))[1])
    resumed = prepared(folder, tmp_path, shard=301)
    assert made[0] == "shard-00003.bin"
    assert resumed.sha256 == whole.sha256


def test_a_changed_corpus_is_prepared_anew(tmp_path):
    folder = text_folder(tmp_path / "texts")
    before = prepared(folder, tmp_path, split="all")
    (folder / "new.txt").write_text("more")
    assert len(prepared(folder, tmp_path, split="all")) == len(before) + 5
    assert resolve(folder).fingerprint() != resolve("stdlib").fingerprint()


def test_a_vocabulary_beyond_two_bytes_takes_four(tmp_path):
    folder = text_folder(tmp_path / "texts", count=3)
    big = load_tokenizer("bytes")
    big.add_tokens([f"[{i}]" for i in range(2**16)])
    assert prepare(folder, big, cache=tmp_path).shards[0].dtype == "<u4"


def counted(tmp_path, count):
    path = tmp_path / "shard.bin"
    np.arange(count, dtype="<u2").tofile(path)
    return Tokens([path], [Shard(count, 1, "<u2", file_hash(path))], end=0)


def test_every_token_but_the_first_is_predicted_once_an_epoch(tmp_path):
    batches = Batches(counted(tmp_path, 1 + 13 * 6), length=7, seed=3)
    epoch = batches.read(0, 13)
    assert sorted(epoch[:, 1:].flatten().tolist()) == list(range(1, 79))
    second = batches.read(13, 13)
    assert not torch.equal(epoch, second)
    assert sorted(second[:, 1:].flatten().tolist()) == list(range(1, 79))


def test_the_order_depends_on_the_seed_and_the_place_alone(tmp_path):
    tokens = counted(tmp_path, 997)
    whole = Batches(tokens, length=7, seed=3).read(0, 300)
    parts = Batches(tokens, length=7, seed=3)
    assert torch.equal(torch.cat([parts.read(150, 150), parts.read(0, 150)]), torch.cat([whole[150:], whole[:150]]))
    assert not torch.equal(Batches(tokens, length=7, seed=4).read(0, 300), whole)


def test_a_corpus_shorter_than_a_sequence_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one sequence of 100 tokens, got 99 tokens"):
        Batches(counted(tmp_path, 99), length=100, seed=0)
