"""Real sentence encoders, which `make prove-real` fetches: our retrieval has sentence-transformers' vectors.

The folder of checkpoints is named in LENGTHWISE_REAL; one that is not there is skipped by name.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from lengthwise.evaluate.retrieval import load_for_retrieval, pooling_of, text_vectors

pytestmark = pytest.mark.prove
TEXTS = [
    "The cat sits outside.",
    "A man is playing guitar, and the room listens to every string of it until the evening ends.",
    "x",
    "Find the module of the standard library by one of its docstrings. " * 20,
]


@pytest.mark.parametrize("name", ["all-MiniLM-L6-v2", "all-mpnet-base-v2"])
def test_sentence_vectors_are_those_of_sentence_transformers(name):
    folder = Path(os.environ.get("LENGTHWISE_REAL", "real")) / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not in {folder.parent}; run `make prove-real`")
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed: retrieval")
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    loaded, tokenizer = load_for_retrieval(str(folder), name=name, device="cpu"), AutoTokenizer.from_pretrained(folder)
    cut = [tokenizer(text, truncation=True, max_length=theirs.max_seq_length)["input_ids"] for text in TEXTS]
    ours = text_vectors(loaded.model, cut, padding=tokenizer.pad_token_id, pooling=pooling_of(folder, loaded.model))
    assert np.abs(theirs.encode(TEXTS, normalize_embeddings=True) - ours.numpy()).max() < 1e-5
