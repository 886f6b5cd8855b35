"""Text to tokens: sources of documents, tokenizers, memory-mapped token files, and the order in which they are read."""

from lengthwise.data.prepare_tokens import prepare
from lengthwise.data.sources import SPLITS, Split, documents
from lengthwise.data.tokenizers import END_OF_TEXT, load_tokenizer
from lengthwise.data.tokens import Batches, Tokens

__all__ = ["END_OF_TEXT", "SPLITS", "Batches", "Split", "Tokens", "documents", "load_tokenizer", "prepare"]
