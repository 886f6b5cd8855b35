"""Tasks: every example is right, of the length that was asked for, and scored as greedy decoding would be."""

import time
from dataclasses import replace
from itertools import islice

import pytest
import torch
from model_kit import loud_model

from lengthwise.data import documents, load_tokenizer
from lengthwise.evaluate import tasks as evaluate_tasks
from lengthwise.evaluate.tasks import score_task, sized_examples, task_notes, task_rows
from lengthwise.tasks import DIGITS, TASKS, examples


def answer(name: str, prompt: str) -> str:
    """The right answer, found in another way than the task makes it."""
    given = prompt.partition(":")[2][:-1]
    if name == "copy":
        return given
    if name == "reverse":
        return "".join(reversed(given))
    if name == "sort":
        return "".join(letter * given.count(letter) for letter in sorted(set(given)))
    if name == "induction":
        return prompt[1:-1]
    if name == "passkey":
        return "".join(filter(str.isdigit, prompt))
    if name == "recall":
        told, asked = prompt.removeprefix("recall:")[:-1].split("?")
        return dict(pair.split("=") for pair in told.split(" "))[asked]
    if name == "addition":
        first, second = given.split("+")
        carry, digits = 0, ""
        for a, b in zip(first, second, strict=True):
            carry, digit = divmod(int(a) + int(b) + carry, 10)
            digits += str(digit)
        return digits + ("1" if carry else "")
    return "".join(str(given[: i + 1].count("1") % 2) for i in range(len(given)))


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("extra", [0, 1, 7, 90, 961])
def test_every_answer_is_right_and_no_example_is_too_long(name, extra):
    length = TASKS[name].least + extra
    for example in examples(name, length=length, count=20, seed=extra):
        assert example.answer == answer(name, example.prompt)
        assert example.answer
        size = len(example.prompt) + len(example.answer)
        # A sentence of filler, a pair, two digits and a sum's last one: what may be missing at most.
        assert size <= length
        assert length - 22 <= size or name == "recall"


@pytest.mark.parametrize("name", ["addition", "parity", "passkey"])
def test_examples_are_right_at_a_length_of_books_and_take_no_time_that_grows_with_its_square(name):
    began = time.process_time()
    (example,) = examples(name, length=400_000, count=1)
    # Far from a second where the time grows with the length, and some or minutes where it grows with its square.
    assert time.process_time() - began < 2
    assert 399_978 <= len(example.prompt) + len(example.answer) <= 400_000
    if name == "parity":
        assert example.answer[-1] == str(example.prompt.count("1") % 2)
    else:
        assert example.answer == answer(name, example.prompt)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_passkey_stands_at_its_depth(depth):
    (example,) = examples("passkey", length=907, count=1, depth=depth)
    assert len(example.answer) == DIGITS
    found = example.prompt.index("The key is") / (len(example.prompt) - len("What is the key? The key is 12345. "))
    assert abs(found - depth) < 0.05


def test_examples_are_the_same_for_the_same_seed_and_others_for_another():
    assert examples("sort", length=63, count=5) == examples("sort", length=63, count=5)
    assert examples("sort", length=63, count=5) != examples("sort", length=63, count=5, seed=1)


def test_a_task_is_a_source_whose_held_out_examples_are_not_those_of_training():
    train, held_out = (list(documents("task:copy:31", split)) for split in ("train", "held-out"))
    assert max(map(len, train)) <= 31
    assert {len(document) for document in train} >= set(range(8, 31, 2))
    long = {document for document in held_out if len(document) > 20}
    assert long
    assert not long & set(train)


@pytest.mark.parametrize("case", ["alibi", "rope"])
def test_an_answer_counts_as_right_if_greedy_decoding_gives_it(case):
    tokenizer, model = load_tokenizer("bytes"), loud_model(case, vocab_size=257)
    model.generation_config.pad_token_id = 256
    drawn = examples("recall", length=47, count=60, depth=0.5)
    right = 0
    for example in drawn:
        ids = torch.tensor([[256, *tokenizer(example.prompt)["input_ids"]]])
        made = model.generate(ids, max_new_tokens=1, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
        right += tokenizer.decode(made) == example.answer
    score = next(s for s in score_task(model, tokenizer, "recall", [47], name="m", count=60) if s.depth == 0.5)
    assert score.exact == right
    assert score.interval.low <= score.share <= score.interval.high


def test_a_model_that_knows_the_answers_is_right_every_time():
    """One bigram table: after a letter comes the next in the alphabet; its induction strings run through it."""
    tokenizer = load_tokenizer("bytes")

    class Copier(torch.nn.Module):
        config = loud_model("none", vocab_size=257).config

        def __init__(self):
            super().__init__()
            self.anchor = torch.nn.Parameter(torch.zeros(1))
            self.device = torch.device("cpu")

        def get_input_embeddings(self):
            return self.anchor

        def forward(self, input_ids, use_cache=False):
            """Looks half a window back: what a perfect induction head does with a string of one period."""
            logits = torch.zeros(*input_ids.shape, 257)
            half = (input_ids.shape[1] - 1) // 2 + 1
            for place in range(half, input_ids.shape[1]):
                logits[:, place].scatter_(1, input_ids[:, place - half + 1, None], 1.0)
            return type("Out", (), {"logits": logits})

    (score,) = score_task(Copier(), tokenizer, "induction", [31], name="m", count=9)
    assert (score.exact, score.tokens) == (9, 1.0)


@pytest.mark.parametrize("task", ["passkey", "recall", "copy"])
def test_examples_fill_a_length_in_the_tokens_of_the_model_and_never_exceed_it(task, tmp_path):
    (tmp_path / "a.txt").write_text("The key is 12345. What is the key? The grass is green. The sky is blue. " * 50)
    tokenizer = load_tokenizer("bpe:300", source=tmp_path / "a.txt", cache=tmp_path / "cache")
    for length in (200, 700):
        rows = sized_examples(tokenizer, task, length=length, count=3)
        sizes = [len(row.tokens) for row in rows]
        assert 0.8 * length <= min(sizes) <= max(sizes) <= length
        if task == "passkey":
            answers = [tokenizer.decode(row.tokens[len(row.tokens) - row.scored :]) for row in rows]
            assert all(answer.strip().isdigit() for answer in answers)


def test_examples_are_drawn_once_where_a_token_is_a_character(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        evaluate_tasks, "examples", lambda *args, **options: drawn.append(1) or examples(*args, **options)
    )
    rows = sized_examples(load_tokenizer("bytes"), "copy", length=40, count=3, seed=5)
    assert [bytes(row.tokens).decode() for row in rows] == [
        example.prompt + example.answer for example in examples("copy", length=40, count=3, seed=5)
    ]
    assert len(drawn) == 1


def test_recall_has_as_many_names_as_fill_its_length():
    (example,) = examples("recall", length=20_000, count=1)
    assert len(example.prompt) > 19_980
    pairs = dict(pair.split("=") for pair in example.prompt.removeprefix("recall:").split("?")[0].split(" "))
    assert len(pairs) == example.prompt.count("=") - 1
    assert {len(name) for name in pairs} == {3}


def test_lengths_without_an_example_and_beyond_a_table_are_cells_that_say_so():
    tokenizer, model = load_tokenizer("bytes"), loud_model("learned", vocab_size=257, n_positions=40)
    short, right, long = score_task(model, tokenizer, "copy", [5, 30, 60], name="m", count=3)
    assert "no example of 5 tokens" in short.refused
    assert right.refused is None
    assert "ends at 40" in long.refused
    assert task_rows([short, right, long])[1] == ["copy", "", "m", "-", "0%", "-"]
    other = replace(short, name="n")
    assert task_notes([short, right, long, other, other]) == [
        f"copy at 5 of m, n: {short.refused}",
        f"copy at 60 of m: {long.refused}",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "sing", "length": 40, "count": 1}, "unknown task 'sing'; there are 'copy'"),
        ({"name": "copy", "length": 3, "count": 1}, "8 or more, got 3"),
        ({"name": "copy", "length": 40, "count": 0}, "count must be"),
        ({"name": "copy", "length": 40, "count": 1, "depth": 0.5}, "of a task that has one, 'passkey' or 'recall'"),
        ({"name": "passkey", "length": 60, "count": 1, "depth": 1.5}, "depth must be from 0 to 1"),
    ],
)
def test_bad_input_is_refused_in_three_parts(arguments, words):
    with pytest.raises(ValueError, match=words):
        examples(arguments.pop("name"), **arguments)


def test_all_tasks_are_one_source_that_has_each_in_turn():
    some = list(islice(documents("task:all:128", "train"), 3 * len(TASKS)))
    assert max(map(len, some)) <= 128
    starts = [next((name for name in TASKS if text.startswith(f"{name}:")), None) for text in some]
    assert starts == 3 * [name if name not in {"induction", "passkey"} else None for name in TASKS]
    assert all(" The key is " in f" {text}" for text in some[list(TASKS).index("passkey") :: len(TASKS)])


@pytest.mark.parametrize(
    ("source", "words"),
    [("task:sing", "unknown task 'sing'"), ("task:copy:long", "NAME:LONGEST"), ("task:copy:5", "8 or more")],
)
def test_a_bad_task_source_is_refused_in_three_parts(source, words):
    with pytest.raises(ValueError, match=words):
        documents(source)
