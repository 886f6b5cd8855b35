"""From a source and a tokenizer to token files: once, resumable, and never more than a piece of it in memory.

Shards are cut by characters, before anything is tokenized: a shard that is missing or damaged is written again alone,
and an interrupted preparation goes on with the first shard that is not complete. The tokenizer itself runs on all
cores. Processes that need the same tokens wait for the first of them.
"""

import fcntl
import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from lengthwise.data.sources import Split, documents, resolve
from lengthwise.data.tokenizers import tokenizer_hash
from lengthwise.data.tokens import Shard, Tokens
from lengthwise.files import cache_folder, file_hash, replacing, write_atomic

SHARD = 2**28
"""Characters in a shard: about 60 million tokens of GPT-2's."""
BATCH = 2**20
"""Characters tokenized at a time."""
log = logging.getLogger(__name__)


def prepare(
    source: str | Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    split: Split = "train",
    cache: Path | None = None,
    verify: bool = True,
    shard: int = SHARD,
) -> Tokens:
    """The tokens of one split of a source, every document followed by the tokenizer's end-of-text token.

    Without `verify` the files' sizes are checked but not their checksums.
    """
    key = "\n".join((resolve(source).fingerprint(), tokenizer_hash(tokenizer), split, str(shard)))
    folder = (cache or cache_folder()) / "tokens" / hashlib.sha256(key.encode()).hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        index = folder / "whole.json"
        paths = [folder / name for name in json.loads(index.read_text())] if index.exists() else []
        if not paths or not all(_is_complete(path, deep=verify) for path in paths):
            paths = _write_shards(source, tokenizer, split, folder, shard)
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
