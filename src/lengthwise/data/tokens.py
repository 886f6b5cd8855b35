"""Token files: how they are prepared from a source, and the order in which a training run reads them.

A corpus is shards of integers in memory maps, each with a sidecar that has its checksum:

    shard-00000.bin     uint16 or uint32, little-endian
    shard-00000.json    {"tokens": ..., "documents": ..., "dtype": ..., "sha256": ...}

Preparing is done once, can be resumed, and never has more than a piece of the text in memory. Shards are cut by
characters, before anything is tokenized: a shard that is missing or damaged is written again alone, and an interrupted
preparation goes on with the first shard that is not complete. The tokenizer itself runs on all cores. Processes that
need the same tokens wait for the first of them.

Machines without a common disk can read prepared tokens from a token store, such as s3://bucket/tokens: the folder
`tokens` of a cache, copied there by any tool. It is only read. What is needed is copied into this machine's cache once,
checked by its checksums, and mapped into memory there, which no remote file can be.

The order is a function of seed and step alone, however many processes there are. The row of tokens is cut into
sequences of `length`, each starting with the last token of the one before, so that a token is predicted once an epoch,
but for the first and for those at the end that fill no sequence. Each epoch has its own shuffle. A position in the data
is a number of sequences; there is no other state.
"""

import fcntl
import hashlib
import json
import logging
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from lengthwise.data.sources import Split, documents, resolve
from lengthwise.data.storage import open_storage
from lengthwise.data.tokenizers import tokenizer_hash
from lengthwise.errors import check_int
from lengthwise.files import cache_folder, file_hash, replacing, write_atomic

SHARD = 2**28
"""Characters in a shard: about 60 million tokens of GPT-2's."""
BATCH = 2**20
"""Characters tokenized at a time."""
INDEX = "whole.json"
"""The names of all shards of a split: it is written last."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shard:
    """The sidecar of a shard."""

    tokens: int
    documents: int
    dtype: str
    sha256: str

    @staticmethod
    def read(path: Path) -> "Shard":
        """Read the sidecar beside a shard."""
        return Shard(**json.loads(path.with_suffix(".json").read_text()))

    def write(self, path: Path) -> None:
        """Write the sidecar beside the shard: only then is the shard complete."""
        write_atomic(path.with_suffix(".json"), json.dumps(asdict(self)) + "\n")

    def fault(self, path: Path, *, deep: bool) -> str | None:
        """What is wrong with the shard's file, or None; `deep` reads all of it."""
        expected = self.tokens * np.dtype(self.dtype).itemsize
        size = path.stat().st_size if path.exists() else 0
        if size != expected:
            return f"expected {expected} bytes by its sidecar, got {size}"
        if deep and file_hash(path) != self.sha256:
            return "its checksum differs from that in its sidecar"
        return None


class Tokens:
    """The tokens of one split as one long row, whatever files they are in."""

    def __init__(self, paths: Sequence[Path], shards: Sequence[Shard], *, end: int) -> None:
        self.paths, self.shards, self.end = list(paths), list(shards), end
        self.start: int | None = None
        """The token with which the model's tokenizer begins every text: it takes the place of a window's first."""
        self._maps = [np.memmap(path, dtype=shard.dtype, mode="r") for path, shard in zip(paths, shards, strict=True)]
        self._starts = [0, *accumulate(shard.tokens for shard in shards)]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, first: int, count: int) -> NDArray[np.int64]:
        """`count` tokens from the `first` on; an IndexError beyond the end."""
        if first < 0 or first + count > len(self):
            raise IndexError(f"tokens must be from 0 to {len(self)}, got {first} to {first + count}")
        out = np.empty(count, dtype=np.int64)
        filled, shard = 0, bisect_right(self._starts, first) - 1
        while filled < count:
            offset = first + filled - self._starts[shard]
            piece = self._maps[shard][offset : offset + count - filled]
            out[filled : filled + len(piece)] = piece
            filled, shard = filled + len(piece), shard + 1
        return out

    def windows(self, firsts: Sequence[int], length: int) -> Int[Tensor, "window position"]:
        """`length` tokens from each of these places on."""
        rows = np.empty((len(firsts), length), dtype=np.int64)
        for row, first in zip(rows, firsts, strict=True):
            row[:] = self.read(first, length)
        if self.start is not None:
            rows[:, 0] = self.start
        return torch.from_numpy(rows)

    def document_positions(self, windows: Int[Tensor, "window position"]) -> Int[Tensor, "window position"]:
        """Positions that restart with every document of windows; a start token belongs to the text after it."""
        return document_positions(windows, self.end, begun=self.start is not None)

    @property
    def sha256(self) -> str:
        """The checksum of all shards' checksums, and of a start token: what is read of equal ones is equal."""
        every = [shard.sha256 for shard in self.shards] + [f"start {self.start}"] * (self.start is not None)
        return hashlib.sha256(" ".join(every).encode()).hexdigest()


class Batches:
    """Sequences in their shuffled order, endlessly."""

    def __init__(self, tokens: Tokens, *, length: int, seed: int, split: str = "train") -> None:
        check_int("length", length, least=2)
        self.tokens, self.length, self.seed = tokens, length, seed
        self.sequences = max(0, (len(tokens) - 1) // (length - 1))
        if not self.sequences:
            raise ValueError(
                f"the {split} split must have at least one sequence of {length} tokens, got {len(tokens)} tokens; give "
                "more text, or a smaller length"
            )
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> Int[Tensor, " sequence"]:
        # Mixed by numpy's hash of both numbers: seed + epoch would give seed 1 the second epoch of seed 0.
        mixed_seed = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])
        return torch.randperm(self.sequences, generator=torch.Generator().manual_seed(mixed_seed))

    def read(self, first: int, count: int) -> Int[Tensor, "sequence position"]:
        """`count` sequences, the first of them number `first` since training began."""
        firsts = []
        for number in range(first, first + count):
            epoch, place = divmod(number, self.sequences)
            firsts.append(int(self._order(epoch)[place]) * (self.length - 1))
        return self.tokens.windows(firsts, self.length)


def document_positions(
    tokens: Int[Tensor, "batch position"], end: int, *, begun: bool = False
) -> Int[Tensor, "batch position"]:
    """Positions that restart after every end-of-text token: with them the model keeps documents apart.

    Where sequences are begun by a token of their own, that ends no text, even if it is the end-of-text token too.

    >>> document_positions(torch.tensor([[5, 0, 6, 7, 0, 8]]), end=0)
    tensor([[0, 1, 0, 1, 2, 0]])
    >>> document_positions(torch.tensor([[0, 5, 0, 6]]), end=0, begun=True)
    tensor([[0, 1, 2, 0]])
    """
    slots = torch.arange(tokens.shape[1]).expand_as(tokens)
    starts = torch.zeros_like(tokens)
    starts[:, 1:] = torch.where(tokens[:, :-1] == end, slots[:, 1:], 0)
    if begun:
        starts[:, 1] = 0
    return slots - starts.cummax(1).values


def prepare(
    source: str | Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    split: Split = "train",
    cache: Path | None = None,
    verify: bool = True,
    shard: int = SHARD,
    store: str | None = None,
) -> Tokens:
    """The tokens of one split of a source, every document followed by the tokenizer's end-of-text token.

    Without `verify` the files' sizes are checked but not their checksums. With a `store` tokens that are not in the
    cache are copied from there and not made.
    """
    # A tokenizer.json keeps the truncation and padding of the last call before it was saved.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    made_by = (tokenizer_hash(tokenizer), str(tokenizer.eos_token_id))
    key = "\n".join((resolve(source).fingerprint(), *made_by, split, str(shard)))
    folder = (cache or cache_folder()) / "tokens" / hashlib.sha256(key.encode()).hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        index = folder / INDEX
        paths = [folder / name for name in json.loads(index.read_text())] if index.exists() else []
        if not paths or not all(_is_complete(path, deep=verify) for path in paths):
            if store is None:
                paths = _write_shards(source, tokenizer, split, folder, shard)
            else:
                paths = _fetch_shards(store, folder)
            write_atomic(index, json.dumps([path.name for path in paths]))
    shards = [Shard.read(path) for path in paths]
    if sum(shard.documents for shard in shards) == 0:
        raise ValueError(f"the {split} split of {str(source)!r} must have at least one document, got none")
    return Tokens(paths, shards, end=tokenizer.eos_token_id)


def _write_shards(
    source: str | Path, tokenizer: PreTrainedTokenizerFast, split: Split, folder: Path, size: int
) -> list[Path]:
    """Every shard of the split; those that are complete by their checksums stay."""
    texts = documents(source, split)
    paths: list[Path] = []
    bar = tqdm(desc=f"tokens, {split}", unit="char", unit_scale=True, disable=not sys.stderr.isatty(), leave=False)
    with bar:
        for group in _groups(texts, size):
            path = folder / f"shard-{len(paths):05d}.bin"
            paths.append(path)
            if _is_complete(path, deep=True):
                bar.update(sum(len(text) for text in group))
            else:
                _write(path, group, tokenizer, bar)
                log.info("prepared %s of %s, split %s", path.name, source, split)
    return paths or [_write(folder / "shard-00000.bin", iter(()), tokenizer, bar)]


def _fetch_shards(store: str, folder: Path) -> list[Path]:
    """Every shard of a split, copied from a token store; those that are complete by their checksums stay."""
    system, root = open_storage(store, "--token-store")
    there = f"{root}/{folder.name}"
    if not system.exists(f"{there}/{INDEX}"):
        raise FileNotFoundError(
            f"the token store must have these tokens, got no {store}/{folder.name}; prepare them once without "
            "--token-store, with the same tokenizer, version and data (files of the same names and times of change), "
            "and copy the cache's folder tokens there"
        )
    paths = [folder / Path(name).name for name in json.loads(system.cat_file(f"{there}/{INDEX}"))]
    for path in paths:
        if _is_complete(path, deep=True):
            continue
        shard = Shard(**json.loads(system.cat_file(f"{there}/{path.stem}.json")))
        with replacing(path) as partial:
            system.get_file(f"{there}/{path.name}", str(partial))
            if (fault := shard.fault(partial, deep=True)) is not None:
                raise OSError(f"token file {store}/{folder.name}/{path.name} is damaged: {fault}; copy it there again")
        shard.write(path)
        log.info("fetched %s of %s", path.name, store)
    return paths


def _groups(texts: Iterator[str], size: int) -> Iterator[Iterator[str]]:
    """The documents in groups of at least `size` characters. Each group must be read before the next."""
    for first in texts:
        yield _group(first, texts, size)


def _group(text: str, texts: Iterator[str], size: int) -> Iterator[str]:
    left = size
    while True:
        yield text
        left -= len(text)
        if left <= 0 or (following := next(texts, None)) is None:
            return
        text = following


def _write(path: Path, texts: Iterator[str], tokenizer: PreTrainedTokenizerFast, bar: "tqdm[None]") -> Path:
    """One shard."""
    dtype = "<u2" if len(tokenizer) <= 2**16 else "<u4"
    tokens = count = 0
    with replacing(path) as partial:
        with partial.open("wb") as file:
            for batch in _batches(texts):
                for ids in _encoded(batch, tokenizer):
                    file.write(np.asarray([*ids, tokenizer.eos_token_id], dtype=dtype).tobytes())
                    tokens, count = tokens + len(ids) + 1, count + 1
                bar.update(sum(len(text) for text in batch))
        checksum = file_hash(partial)
    Shard(tokens, count, dtype, checksum).write(path)
    return path


def _encoded(batch: list[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    """Token ids of each text. A text that spells out a special token stays text."""
    backend = tokenizer.backend_tokenizer
    before, backend.encode_special_tokens = backend.encode_special_tokens, True
    try:
        yield from (encoded.ids for encoded in backend.encode_batch_fast(batch, add_special_tokens=False))
    finally:
        backend.encode_special_tokens = before


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _is_complete(path: Path, *, deep: bool) -> bool:
    """Whether a shard can be used; a damaged one is logged and will be written again."""
    if not path.with_suffix(".json").exists():
        return False
    try:
        fault = Shard.read(path).fault(path, deep=deep)
    except (ValueError, TypeError) as error:
        fault = f"its sidecar cannot be read ({error})"
    if fault:
        log.warning("token file %s is damaged: %s; it is written again", path, fault)
    return fault is None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
