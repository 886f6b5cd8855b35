"""Text to tokens: sources of documents, tokenizers, memory-mapped token files, and the order in which they are read."""

from lengthwise.data.sources import SPLITS, Split, documents
from lengthwise.data.tokenizers import END_OF_TEXT, load_tokenizer
from lengthwise.data.tokens import Batches, Tokens, prepare

__all__ = ["END_OF_TEXT", "SPLITS", "Batches", "Split", "Tokens", "documents", "load_tokenizer", "prepare"]
