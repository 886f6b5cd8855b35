"""Token sequences to look at: a text that was given, and others sampled beside it, so that context can be told."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from lengthwise.data import documents
from lengthwise.errors import check_int
from lengthwise.inspect.subject import Subject


@dataclass(frozen=True, eq=False)
class Sequences:
    """The first is what is shown; `told` says where they come from."""

    ids: Int[Tensor, "batch position"]
    tokens: tuple[str, ...]
    told: str


def sample(subject: Subject, *, length: int | None, text: str | None, seed: int, count: int) -> Sequences:
    """`count` sequences of one length, the first of them the text if there is one, which has a length of its own."""
    if length is not None or text is None:
        check_int("length", length, "It counts tokens.")
    generator = torch.Generator().manual_seed(seed)
    tokenizer = subject.tokenizer
    if tokenizer is None:
        if text is not None:
            raise ValueError(
                f"a text needs a tokenizer; {subject.name} has none beside it. Leave out --text for random tokens."
            )
        assert length is not None, "only a text has a length of its own"
        size = subject.model.config.get_text_config().vocab_size
        ids = torch.randint(size, (count, length), generator=generator)
        return Sequences(ids, tuple(map(str, ids[0].tolist())), f"random tokens (no tokenizer is there), seed {seed}")
    told, rows = f"held-out text of {subject.source}, seed {seed}", []
    if text is not None:
        rows = [tokenizer(text)["input_ids"][:length]]
        told = "the given text"
        if not rows[0]:
            raise ValueError(f"a text must have a token at least; {text!r} has none. Give a longer one.")
    texts = list(documents(subject.source, subject.split))
    while len(rows) < count:
        rows.append(_row(texts, tokenizer, len(rows[0]) if rows else int(length or 1), generator))
    return Sequences(torch.tensor(rows), tuple(tokenizer.convert_ids_to_tokens(rows[0])), told)


def _row(texts: list[str], tokenizer: object, length: int, generator: torch.Generator) -> list[int]:
    """A random place in a random document, running on into others until it is long enough."""
    row: list[int] = []
    while len(row) < length:
        text = texts[int(torch.randint(len(texts), (), generator=generator))]
        # A token is one character at least, so from here on there is enough text wherever the document has it.
        start = int(torch.randint(max(1, len(text) - 8 * length), (), generator=generator))
        row += tokenizer(text[start : start + 32 * length])["input_ids"]  # type: ignore[operator]
    return row[:length]
