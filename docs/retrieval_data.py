"""MS MARCO's triplets and MLDR-en from the hub, as `lengthwise` reads them: python docs/retrieval_data.py [FOLDER]

    msmarco.jsonl      {"query", "positive", "negatives"} a line: --objective contrastive --data msmarco.jsonl
    mldr-en/           corpus.jsonl, queries.jsonl, qrels/test.tsv: evaluate --retrieval --retrieval-set mldr-en

The data of configs/retrieval/msmarco-base-512.yaml and configs/studies/mldr-en.yaml. Needs the network and
`pip install ".[data]"` in a clone; tests have a stand-in. Both data sets have licences of their own.
"""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path

TRIPLETS = 500_000
"""Pairs of MS MARCO that are written."""


def write_msmarco(path: Path) -> None:
    """The first triplets, with a negative by BM25 each; which negatives the CABLE paper has is not known."""
    from datasets import load_dataset

    rows = load_dataset("sentence-transformers/msmarco-bm25", "triplet", split="train", streaming=True)
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            if number == TRIPLETS:
                break
            pair = {"query": row["query"], "positive": row["positive"], "negatives": [row["negative"]]}
            file.write(json.dumps(pair) + "\n")


def write_mldr(folder: Path) -> None:
    """The English part: its corpus, and the questions of the test split."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as corpus:
        for row in hub_rows("corpus"):
            corpus.write(json.dumps({"_id": row["docid"], "text": row["text"]}) + "\n")
    with (
        (folder / "queries.jsonl").open("w", encoding="utf-8") as queries,
        (folder / "qrels/test.tsv").open("w") as qrels,
    ):
        qrels.write("query-id\tcorpus-id\tscore\n")
        for row in hub_rows("test"):
            queries.write(json.dumps({"_id": row["query_id"], "text": row["query"]}) + "\n")
            qrels.writelines(f"{row['query_id']}\t{answer['docid']}\t1\n" for answer in row["positive_passages"])


def hub_rows(name: str) -> Iterator[dict]:
    """The lines of one of MLDR's files."""
    from huggingface_hub import hf_hub_download

    path = hf_hub_download("Shitao/MLDR", f"mldr-v1.0-en/{name}.jsonl.gz", repo_type="dataset")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def main(target: Path) -> None:
    """Both into one folder."""
    target.mkdir(parents=True, exist_ok=True)
    write_msmarco(target / "msmarco.jsonl")
    write_mldr(target / "mldr-en")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
