"""Contrastive training: the vector of a query comes near that of the document that answers it, and away from others.

    loss of query i = -log softmax over documents j of cos(query i, document j) / temperature, at its own document

The documents are those of all pairs of the step, so that each pair has the others as its negatives, and hard negatives:
documents that nearly answer a query. A step is one batch of one process, since all of its texts meet.

The final folder has the files by which sentence-transformers loads it too.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lengthwise.data.retrieval import Pair, pairs_hash, query_tokens, training_pairs
from lengthwise.data.tokenizers import with_start_token
from lengthwise.encodings import Encoding
from lengthwise.loading import LoadError, load_tokenizer_of, resolve_checkpoint
from lengthwise.model import LengthwiseEncoder, LengthwiseEncoderConfig
from lengthwise.model.encoder import pool_tokens
from lengthwise.train.config import ResolvedTrainConfig
from lengthwise.train.distributed import World
from lengthwise.train.objectives import HeldOut, Inputs, Objective

LONGEST = 32_768
"""Tokens after which sentence-transformers cuts a text, where the encoding has no end of its own."""


class ContrastiveObjective(Objective):
    """Queries find the documents that answer them."""

    def __init__(self, config: ResolvedTrainConfig) -> None:
        assert config.start_from is not None
        self.config = config
        self.checkpoint = resolve_checkpoint(config.start_from)
        tokenizer = load_tokenizer_of(self.checkpoint)
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise LoadError(f"--start-from must be an encoder with its tokenizer, got {config.start_from} without")
        self.tokenizer = with_start_token(tokenizer) if config.pooling == "first" else tokenizer
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.pairs, self.held_out_pairs = (training_pairs(config.data, split) for split in ("train", "held-out"))
        self.data_hash = pairs_hash(self.pairs)
        self.targets = config.sequences
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def make_model(self) -> PreTrainedModel:
        """The encoder of --start-from, with its encodings."""
        model: LengthwiseEncoder = LengthwiseEncoder.from_pretrained(self.checkpoint, pooling=self.config.pooling)
        limit = min((e.limit for e in model.modules() if isinstance(e, Encoding) and e.limit), default=None)
        if limit is not None and limit < self.config.length:
            raise ValueError(
                f"documents must have at most the encoder's {limit} tokens, got --length {self.config.length}"
            )
        return model

    def inputs(self, first: int, count: int) -> Inputs:
        """Queries and documents as token ids and masks; the first documents are those of the queries, in order."""
        chosen = []
        for number in range(first, first + count):
            epoch, place = divmod(number, len(self.pairs))
            chosen.append(self.pairs[int(self._order(epoch)[place])])
        return self.batch(chosen)

    def batch(self, pairs: Sequence[Pair]) -> Inputs:
        """The inputs of some pairs."""
        documents = [pair.positive for pair in pairs]
        documents += [negative for pair in pairs for negative in pair.negatives[: self.config.hard_negatives]]
        texts = [query_tokens(self.tokenizer, pair.query) for pair in pairs]
        bodies = [document.tokens(self.tokenizer, self.config.length) for document in documents]
        padding = int(self.tokenizer.pad_token_id or 0)
        return *padded(texts, padding), *padded(bodies, padding)

    def loss(self, model: Any, *inputs: Any, ring: ProcessGroup | None = None) -> Float[Tensor, ""]:
        """The sum over the queries."""
        queries, query_mask, documents, document_mask = inputs
        vectors = [
            F.normalize(
                pool_tokens(model(ids, attention_mask=mask).last_hidden_state, mask, self.config.pooling), dim=-1
            )
            for ids, mask in ((queries, query_mask), (documents, document_mask))
        ]
        scores = (vectors[0] @ vectors[1].T).float() / self.config.temperature
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device), reduction="sum")

    def held_out(self, model: PreTrainedModel) -> HeldOut:
        """The loss of held-out pairs."""
        return HeldOutPairs(self)

    def check(self, world: World) -> None:
        """An error for several processes: the texts of a step meet in one."""
        if world.size > 1:
            raise ValueError(f"contrastive training must have one process, got {world.size}")

    def save(self, folder: Path) -> None:
        """The tokenizer, and what sentence-transformers reads."""
        super().save(folder)
        encoder = LengthwiseEncoderConfig.from_pretrained(folder)
        write_sentence_transformers(folder, encoder, self.config.pooling)

    def _shuffled(self, epoch: int) -> Int[Tensor, " pair"]:
        return torch.from_numpy(np.random.default_rng([self.config.seed, epoch]).permutation(len(self.pairs)))


class HeldOutPairs:
    """Batches of held-out pairs, as large as those of training, the same every time."""

    def __init__(self, objective: ContrastiveObjective) -> None:
        self.objective, config = objective, objective.config
        pairs, size = objective.held_out_pairs, config.sequences
        most = max(size, config.evaluate_tokens // config.length)
        self.batches = [pairs[i : i + size] for i in range(0, min(len(pairs), most), size)]

    @torch.no_grad()
    def losses(self, loss: torch.nn.Module, world: World, dtype: torch.dtype) -> dict[str, float]:
        """The mean loss of a query, by the length of documents."""
        loss.eval()
        total = 0.0
        with world.autocast(dtype):
            for pairs in self.batches:
                total += float(loss(*map(world.put, self.objective.batch(pairs))))
        loss.train()
        return {str(self.objective.config.length): total / sum(map(len, self.batches))}

    def sample(self) -> Int[Tensor, "batch token"]:
        """Two documents, for the snapshots of the position maps."""
        documents = [pair.positive for pair in self.objective.held_out_pairs[:2]]
        ids = [d.tokens(self.objective.tokenizer, self.objective.config.length) for d in documents]
        return torch.tensor([row[: min(map(len, ids))] for row in ids])


def padded(
    rows: Sequence[Sequence[int]], padding: int
) -> tuple[Int[Tensor, "batch token"], Bool[Tensor, "batch token"]]:
    """Token ids of one length, and a mask that is True for tokens."""
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), padding)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row)] = True
    return ids, mask


def write_sentence_transformers(folder: Path, config: Any, pooling: str) -> None:
    """The files by which sentence-transformers knows how to make a vector of a text: tokens, pooled and of length 1."""
    parts = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(parts.items())
    ]
    with torch.device("meta"):
        encoder = LengthwiseEncoder(config)
    limit = min((e.limit for e in encoder.modules() if isinstance(e, Encoding) and e.limit), default=LONGEST)
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    contents: dict[str, Any] = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": limit, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": {
            "word_embedding_dimension": config.n_embd,
            "pooling_mode_cls_token": pooling == "first",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
