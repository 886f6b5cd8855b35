"""Sets to retrieve from, and pairs to learn it from: queries, documents, and which document answers which query.

    stdlib          find the place in the standard library that a docstring was cut out of
    a folder        corpus.jsonl, queries.jsonl and qrels/test.tsv, as BEIR and MTEB have them
    a .jsonl file   pairs to train on: {"query": ..., "positive": ..., "negatives": [...]} a line

Modules of the standard library are cut into parts of about 3,000 characters, each a document. A docstring of a part,
its first paragraph, is a query; the whole docstring is cut out of the part, or it would be string matching. Queries
whose words stand anywhere else in the set, or in the text to train on, are left out. The split is that of the text: a
model that was trained on "stdlib" has seen nothing of the held-out parts.

At a length every document of "stdlib" has exactly that many tokens: those around the place of its docstring, and where
the part is shorter, filler that says nothing, before and after it by a share that the document's name decides. Other
sets are cut to their first tokens, as usual.
"""

import ast
import hashlib
import inspect
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lengthwise.data.sources import HELD_OUT, TOPICS, Split, StdlibSource, read_text
from lengthwise.data.tokenizers import encode, encode_with_offsets, surrounding_tokens
from lengthwise.errors import UserError

PART = 3_000
"""Characters of a part of a module, about 1,000 tokens of a small vocabulary."""
WORDS = range(6, 81)
"""How many words a query may have."""
QUERY_TOKENS = 64
"""Tokens of a query at most."""
SET_FILES = ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv")
FILLER = "# This line says nothing about the text around it.\n"


class RetrievalError(UserError, ValueError):
    """A set that nothing can be retrieved from, or pairs that nothing can be learned from."""


@dataclass(frozen=True)
class Document:
    """A text; `place` is the character that a window of it is taken around, None for windows from its start."""

    name: str
    text: str
    place: int | None = None


@dataclass(frozen=True)
class EncodedDocument:
    """The tokens of a whole text; `place` is the token that a window of it is taken around."""

    name: str
    ids: NDArray[np.int32]
    place: int | None


class TextEncoder:
    """Queries and documents as token ids, with those that the tokenizer puts around every text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.padding = int(tokenizer.pad_token_id or 0)
        self._before, self._after = surrounding_tokens(tokenizer)
        self.around = len(self._before) + len(self._after)
        self._filler = np.array(encode(tokenizer, FILLER, add_special_tokens=False), dtype=np.int32)

    def query(self, query: str, length: int = QUERY_TOKENS) -> list[int]:
        """At most `length` tokens."""
        return self.cut_query(encode(self.tokenizer, query, add_special_tokens=False), length)

    def cut_query(self, body: list[int], length: int) -> list[int]:
        """At most `length` tokens of a query's own and those around them."""
        return [*self._before, *body[: max(0, length - self.around)], *self._after]

    def document(self, document: Document, length: int) -> NDArray[np.int32]:
        """At most `length` tokens; exactly as many where the document has a place."""
        return self.cut(self.encode(document), length)

    def encode(self, document: Document) -> EncodedDocument:
        """All of its tokens, which can then be cut to several lengths."""
        if document.place is None:
            ids = encode(self.tokenizer, document.text, add_special_tokens=False)
            return EncodedDocument(document.name, np.array(ids, dtype=np.int32), None)
        ids, offsets = encode_with_offsets(self.tokenizer, document.text)
        place = next((i for i, (begin, _) in enumerate(offsets) if begin >= document.place), len(ids))
        return EncodedDocument(document.name, np.array(ids, dtype=np.int32), place)

    def cut(self, document: EncodedDocument, length: int) -> NDArray[np.int32]:
        """A window of a document: from its start, or around its place and grown with filler to the length."""
        ids, length = document.ids, max(0, length - self.around)
        if document.place is None:
            return self._surrounded(ids[:length])
        first = max(0, min(document.place - length // 2, len(ids) - length))
        window = ids[first : first + length]
        missing = length - len(window)
        if missing:
            filler = np.resize(self._filler, missing)
            share = _number(document.name) % (missing + 1)
            window = np.concatenate([filler[:share], window, filler[share:]])
        return self._surrounded(window)

    def _surrounded(self, body: NDArray[np.int32]) -> NDArray[np.int32]:
        if not self.around:
            return body  # a view: most sets are cut without a copy
        before, after = (np.array(ids, dtype=np.int32) for ids in (self._before, self._after))
        return np.concatenate([before, body, after])


def padded(
    texts: Sequence[Sequence[int] | NDArray[np.int32]], padding: int
) -> tuple[Int[Tensor, "text token"], Bool[Tensor, "text token"]]:
    """Token ids of one length, and a mask that is True for tokens."""
    ids = np.full((len(texts), max(1, max(map(len, texts)))), padding, dtype=np.int64)
    mask = np.zeros(ids.shape, dtype=bool)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
        mask[row, : len(text)] = True
    return torch.from_numpy(ids), torch.from_numpy(mask)


@dataclass(frozen=True)
class RetrievalSet:
    """Queries and documents; `relevant` has the grade of every document, by its number, that answers a query."""

    name: str
    queries: list[str]
    documents: list[Document]
    relevant: list[dict[int, int]]
    groups: list[str]
    """What each query belongs to: queries of one group are alike, and are resampled together."""
    own: dict[int, int] = field(default_factory=dict)
    """The document that is a query itself, which is not ranked for it: both by number."""
    left_out: int = 0
    """Judged queries that no document answers."""

    def __post_init__(self) -> None:
        if not self.documents or not self.queries:
            raise RetrievalError(
                f"a set to retrieve from must have queries and documents, got {len(self.queries)} queries and "
                f"{len(self.documents)} documents in {self.name}"
            )
        for query, answers in zip(self.queries, self.relevant, strict=True):
            if not answers or min(answers.values()) < 1:
                raise RetrievalError(f"every query must have a relevant document, got {query[:60]!r} without one")

    @property
    def sha256(self) -> str:
        """The same for the same queries, documents and judgements."""
        content = [self.queries, [asdict(document) for document in self.documents], self.groups]
        judged = [sorted(numbers.items()) for numbers in (*self.relevant, self.own)]
        return hashlib.sha256(json.dumps([*content, judged]).encode()).hexdigest()


class EncodedSet:
    """A set as token ids: every text is tokenised once, for all lengths and all models with that tokenizer."""

    def __init__(self, corpus: RetrievalSet, tokenizer: PreTrainedTokenizerBase) -> None:
        self.corpus, self.encoder = corpus, TextEncoder(tokenizer)
        self._queries = [encode(tokenizer, query, add_special_tokens=False) for query in corpus.queries]
        self._documents = [self.encoder.encode(document) for document in corpus.documents]

    def queries(self, length: int = QUERY_TOKENS) -> list[list[int]]:
        """The tokens of every query, at most `length`."""
        return [self.encoder.cut_query(query, length) for query in self._queries]

    def notes(self, length: int = QUERY_TOKENS) -> list[str]:
        """What a reader of a score must know of the queries."""
        cut = sum(len(query) + self.encoder.around > length for query in self._queries)
        notes = [f"{cut:,} of {len(self._queries):,} queries cut to {length} tokens"] if cut else []
        left_out = self.corpus.left_out
        return notes + ([f"{left_out:,} judged queries left out: no document answers them"] if left_out else [])

    def documents(self, length: int) -> list[NDArray[np.int32]]:
        """The tokens of every document at a length; an error if none is left."""
        documents = [self.encoder.cut(document, length) for document in self._documents]
        if not any(map(len, documents)):
            name = self.corpus.name
            raise RetrievalError(f"a set must have a document at every length, got {name} with none at {length:,}")
        return documents


@dataclass(frozen=True)
class Pair:
    """A query, the document that answers it, and documents that nearly do."""

    query: str
    positive: Document
    negatives: tuple[Document, ...] = ()


@dataclass(frozen=True)
class _Part:
    """A part of a module, and the query that was cut out of it, if any."""

    module: str
    document: Document
    query: str | None


def retrieval_set(name: str, split: Split = "held-out") -> RetrievalSet:
    """The set of that name; the split is for "stdlib"."""
    check_set(name)
    return _stdlib_set(split) if name == "stdlib" else _folder_set(Path(name))


def check_set(name: str) -> None:
    """An error unless there is a set of that name."""
    missing = [] if name == "stdlib" else [file for file in SET_FILES if not (Path(name) / file).is_file()]
    if missing:
        raise RetrievalError(
            f"a set to retrieve from must be 'stdlib' or a folder with {', '.join(SET_FILES)}, got {name!r} without "
            f"{missing[0]}"
        )


def training_pairs(name: str, split: Split = "train") -> list[Pair]:
    """The pairs of one split of a source, in the same order every time."""
    if name == "stdlib":
        pairs = _stdlib_pairs(split)
    elif name.endswith(".jsonl") and Path(name).is_file():
        # By the text of the query: one with several rows is in one split.
        pairs = [
            pair
            for pair in _file_pairs(Path(name))
            if split == "all" or (_number(pair.query) % HELD_OUT == 0) == (split == "held-out")
        ]
    else:
        raise RetrievalError(
            f"pairs to train on must be 'stdlib' or a .jsonl file with query, positive and negatives, got {name!r}"
        )
    if not pairs:
        raise RetrievalError(f"the {split} split of {name!r} must have a pair to train on, got none")
    return pairs


def pairs_hash(pairs: Sequence[Pair]) -> str:
    """The same for the same pairs."""
    digest = hashlib.sha256()
    for pair in pairs:
        for text in (pair.query, pair.positive.text, *(negative.text for negative in pair.negatives)):
            digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _stdlib_set(split: Split) -> RetrievalSet:
    parts = _unique(list(_stdlib_parts(split)))
    if split == "held-out":
        parts = _unseen(parts)
    asking = [(number, part) for number, part in enumerate(parts) if part.query is not None]
    return RetrievalSet(
        "stdlib",
        [part.query or "" for _, part in asking],
        [part.document for part in parts],
        [{number: 1} for number, _ in asking],
        [part.module for _, part in asking],
    )


def _stdlib_pairs(split: Split) -> list[Pair]:
    """Each query with its part; another part of the same module, if there is one, nearly answers it.

    A query whose words stand in what is left of its part is left out: that would be string matching.
    """
    modules: dict[str, list[_Part]] = {}
    for part in _stdlib_parts(split):
        modules.setdefault(part.module, []).append(part)
    pairs = []
    for parts in modules.values():
        for number, part in enumerate(parts):
            if part.query is not None and part.query not in " ".join(part.document.text.split()):
                others = parts[:number] + parts[number + 1 :]
                near = (others[_number(part.document.name) % len(others)].document,) if others else ()
                pairs.append(Pair(part.query, part.document, near))
    return pairs


def _stdlib_parts(split: Split) -> Iterator[_Part]:
    source = StdlibSource()
    for name in source.names:
        if name.startswith(f"{TOPICS}/") or (split != "all" and (name in source.held_out) != (split == "held-out")):
            continue
        text = "".join(read_text(source.folder / name))
        try:
            yield from _module_parts(name, text)
        except SyntaxError:  # a module for another version of the language
            continue


def _module_parts(module: str, text: str) -> Iterator[_Part]:
    """The parts of a module, cut at line ends, each without the docstring that is its query."""
    docstrings = _docstrings(text)
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + PART) + 1 or len(text)
        name = f"{module}:{begin}"
        inside = [d for d in docstrings if begin <= d[0] and d[1] <= end]
        chosen = min(inside, key=lambda d: _number(f"{module}:{d[0]}"), default=None)
        if chosen is None:
            yield _Part(module, Document(name, text[begin:end], (end - begin) // 2), None)
        else:
            first, last, query = chosen
            yield _Part(module, Document(name, text[begin:first] + text[last:end], first - begin), query)
        begin = end


def _docstrings(text: str) -> list[tuple[int, int, str]]:
    """Where each docstring that can be a query begins and ends, and the query."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in other people's strings
        tree = ast.parse(text)

    def place(line: int, column: int) -> int:
        """The character, of a column in bytes."""
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    places = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        content = ast.get_docstring(node, clean=False)
        query = "" if content is None else " ".join(inspect.cleandoc(content).split("\n\n")[0].split())
        if len(query.split()) in WORDS:
            own: Any = node.body[0]
            places.append((place(own.lineno, own.col_offset), place(own.end_lineno, own.end_col_offset), query))
    return sorted(places)


def _unique(parts: list[_Part]) -> list[_Part]:
    """The parts, without the queries whose words stand in any document of the set, or in another query."""
    documents = [" ".join(part.document.text.split()) for part in parts]
    queries = [part.query for part in parts]
    return [
        part
        if part.query is not None and queries.count(part.query) == 1 and not any(part.query in d for d in documents)
        else _Part(part.module, part.document, None)
        for part in parts
    ]


def _unseen(parts: list[_Part]) -> list[_Part]:
    """The parts, without the queries whose words stand in the text to train on."""
    seen: set[str] = set()
    queries = [part.query for part in parts if part.query is not None]
    for text in StdlibSource().documents("train"):
        words = " ".join(text.split())
        seen.update(query for query in queries if query in words)
    return [_Part(part.module, part.document, None) if part.query in seen else part for part in parts]


def _folder_set(folder: Path) -> RetrievalSet:
    documents: list[Document] = []
    numbers: dict[str, int] = {}
    for row in _rows(folder / "corpus.jsonl", "_id", "text"):
        numbers[str(row["_id"])] = len(documents)
        text = f"{row['title']}\n{row['text']}" if row.get("title") else str(row["text"])
        documents.append(Document(str(row["_id"]), text))
    answers: dict[str, dict[int, int]] = {}
    judged = set()
    lines = (folder / "qrels/test.tsv").read_text(encoding="utf-8").rstrip().splitlines()
    for number, line in enumerate(lines[1:], 2):
        query, document, score, *_ = (*line.split("\t"), "", "", "")
        if not score.lstrip("-").isdigit():
            raise RetrievalError(
                f"qrels/test.tsv must have query, document and score a line after its first, got {line!r} in line "
                f"{number}"
            )
        judged.add(query)
        if int(score) > 0:
            if document not in numbers:
                raise RetrievalError(f"qrels must name documents of corpus.jsonl, got {document!r} in {folder}")
            answers.setdefault(query, {})[numbers[document]] = int(score)
    queries = {
        str(row["_id"]): str(row["text"])
        for row in _rows(folder / "queries.jsonl", "_id", "text")
        if str(row["_id"]) in judged
    }
    names = [name for name in queries if name in answers]
    return RetrievalSet(
        folder.name,
        [queries[name] for name in names],
        documents,
        [answers[name] for name in names],
        names,
        own={
            i: numbers[name] for i, name in enumerate(names) if name in numbers and numbers[name] not in answers[name]
        },
        left_out=len(queries) - len(names),
    )


def _file_pairs(path: Path) -> Iterator[Pair]:
    for number, row in enumerate(_rows(path), 1):
        query, positive, negatives = row.get("query"), row.get("positive"), row.get("negatives", [])
        texts = [query, positive, *(negatives if isinstance(negatives, list) else [None])]
        if not all(isinstance(text, str) and text for text in texts):
            raise RetrievalError(
                f"a pair must have the texts query and positive, and a list of negatives if any, got other fields in "
                f"{path}, line {number}"
            )
        documents = [Document(f"{number}.{i}", text) for i, text in enumerate(texts[1:])]
        yield Pair(str(query), documents[0], tuple(documents[1:]))


def _rows(path: Path, *fields: str) -> Iterator[dict[str, Any]]:
    """The objects of a file, a line each; an error for a line that is none, or that has not these fields."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise RetrievalError(
                        f"{path} must have one JSON object a line, got line {number}: {error}"
                    ) from None
                if not isinstance(row, dict) or any(field not in row for field in fields):
                    names = " with " + " and ".join(fields) if fields else ""
                    wanted = f"one JSON object{names} a line"
                    raise RetrievalError(f"{path} must have {wanted}, got another in line {number}")
                yield row


def _number(name: str) -> int:
    """A number that a name decides, the same everywhere."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big")
