"""Contrastive training: the vector of a query comes near that of the document that answers it, and away from others.

    loss of query i = -log softmax over documents j of cos(query i, document j) / temperature, at its own document

The documents are those of all pairs of the step, so that each pair has the others as its negatives, and hard negatives:
documents that nearly answer a query. All of them meet, so that each process has its part of a step as one batch, and
the vectors of the documents of all processes. A document that is word for word the query's own is not its negative, so
that a hard negative of one pair may be the positive of another.

The final folder has the files by which sentence-transformers loads it too.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lengthwise.bias import at_least_float32, without_autocast
from lengthwise.data.retrieval import QUERY_TOKENS, Pair, TextEncoder, padded, pairs_hash, training_pairs
from lengthwise.data.tokenizers import with_start_token
from lengthwise.encodings import Encoding
from lengthwise.loading import LoadError, load_tokenizer_of, resolve_checkpoint
from lengthwise.model import LengthwiseEncoder, LengthwiseEncoderConfig
from lengthwise.model.encoder import pool_tokens
from lengthwise.train.config import ResolvedTrainConfig
from lengthwise.train.distributed import World
from lengthwise.train.objectives import HeldOut, Inputs, Objective
from lengthwise.train.validation import mean_over_processes

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
        self.encoder = TextEncoder(self.tokenizer)
        self.query_length = QUERY_TOKENS
        self.pairs, self.held_out_pairs = (training_pairs(config.data, split) for split in ("train", "held-out"))
        self.data_hashes = {"data": pairs_hash(self.pairs), "held_out": pairs_hash(self.held_out_pairs)}
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
        self.query_length = min(QUERY_TOKENS, limit or QUERY_TOKENS)
        return model

    def inputs(self, first: int, count: int) -> Inputs:
        """Queries and documents as token ids and masks, and the documents' marks.

        The first documents are those of the queries, in order.
        """
        chosen = []
        for number in range(first, first + count):
            epoch, place = divmod(number, len(self.pairs))
            chosen.append(self.pairs[int(self._order(epoch)[place])])
        return self.batch(chosen)

    def batch(self, pairs: Sequence[Pair]) -> Inputs:
        """The inputs of some pairs."""
        documents = [pair.positive for pair in pairs]
        documents += [negative for pair in pairs for negative in pair.negatives[: self.config.hard_negatives]]
        texts = [self.encoder.query(pair.query, self.query_length) for pair in pairs]
        bodies = [self.encoder.document(document, self.config.length) for document in documents]
        marks = torch.tensor([_mark(body) for body in bodies])
        return *padded(texts, self.encoder.padding), *padded(bodies, self.encoder.padding), marks

    def loss(self, model: Any, *inputs: Any, world: World) -> Float[Tensor, ""]:
        """The sum over the queries of this process, among the documents of all; held-out batches are whole in each."""
        query_ids, query_mask, document_ids, document_mask, marks = inputs
        vectors = []
        for ids, mask in ((query_ids, query_mask), (document_ids, document_mask)):
            x = at_least_float32(model(ids, attention_mask=mask).last_hidden_state)
            vectors.append(F.normalize(pool_tokens(x, mask, self.config.pooling), dim=-1))
        queries, documents = vectors
        # As floats, which hold them exactly, because rows that are gathered are floats.
        own_marks, all_marks, first = marks[: len(queries)].float(), marks.float(), 0
        if model.training:
            documents, first = world.gather_rows(documents)
            all_marks, _ = world.gather_rows(all_marks)
        with without_autocast(queries):  # a cosine in bfloat16 has two digits, and is divided by the temperature
            scores = queries @ documents.T / self.config.temperature
        own = torch.arange(first, first + len(scores), device=scores.device)
        same = (own_marks[:, None] == all_marks).all(-1)
        same[torch.arange(len(scores), device=scores.device), own] = False
        return F.cross_entropy(scores.masked_fill(same, -torch.inf), own, reduction="sum")

    def held_out(self, model: PreTrainedModel) -> HeldOut:
        """The loss of held-out pairs."""
        return HeldOutPairs(self)

    def check(self, world: World) -> None:
        """An error unless each process has its part of a step as one batch."""
        self.config.check_one_batch(world.readers)

    def save(self, folder: Path) -> None:
        """The tokenizer, and what sentence-transformers reads."""
        super().save(folder)
        encoder = LengthwiseEncoderConfig.from_pretrained(folder)
        write_sentence_transformers(folder, encoder, self.config.pooling)

    def _shuffled(self, epoch: int) -> Int[Tensor, " pair"]:
        return torch.from_numpy(np.random.default_rng([self.config.seed, epoch]).permutation(len(self.pairs)))


def _mark(body: NDArray[np.int32]) -> tuple[int, int]:
    """Two numbers of 24 bits that differ between documents."""
    digest = hashlib.sha256(body.tobytes()).digest()
    return int.from_bytes(digest[:3], "big"), int.from_bytes(digest[3:6], "big")


class HeldOutPairs:
    """Batches of held-out pairs, the same every time and as large as those of training, if there are so many pairs.

    The loss depends on the size of a batch, so that a last one that is smaller is left out.
    """

    def __init__(self, objective: ContrastiveObjective) -> None:
        self.objective, config = objective, objective.config
        pairs, size = objective.held_out_pairs, config.sequences
        most = max(size, config.evaluate_tokens // config.length)
        batches = [pairs[i : i + size] for i in range(0, min(len(pairs), most), size)]
        self.batches = [batch for batch in batches if len(batch) == size] or batches

    @torch.no_grad()
    def losses(self, loss: torch.nn.Module, world: World, dtype: torch.dtype) -> dict[str, float]:
        """The mean loss of a query, by the length of documents."""
        loss.eval()
        with world.autocast(dtype):
            mean = mean_over_processes(self.batches, lambda pairs: self._sum(loss, pairs, world), world)
        loss.train()
        return {str(self.objective.config.length): mean}

    def _sum(self, loss: torch.nn.Module, pairs: Sequence[Pair], world: World) -> tuple[Tensor, int]:
        return loss(*map(world.put, self.objective.batch(pairs))), len(pairs)

    def sample(self) -> Int[Tensor, "batch token"]:
        """Two documents, for the snapshots of the position maps."""
        encoder, length = self.objective.encoder, self.objective.config.length
        ids = [encoder.document(pair.positive, length) for pair in self.objective.held_out_pairs[:2]]
        return torch.from_numpy(np.stack([row[: min(map(len, ids))] for row in ids])).long()


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
