"""Finds lines by their vectors, then orders the nearest ones with a reranker.

Usage:
    python rerank_pipeline.py faq.txt "how do I reset my password" --reranker reranker
"""

import argparse
import os
from pathlib import Path

import numpy as np

from varlen_client import Client


def main() -> None:
    """Print the best lines of a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="a document per line")
    parser.add_argument("query")
    parser.add_argument("--embedder", default="minilm")
    parser.add_argument("--reranker", default="reranker")
    parser.add_argument("--retrieve", type=int, default=20, help="lines that the reranker reads")
    parser.add_argument("--top", type=int, default=3)
    given = parser.parse_args()
    url = os.environ.get("VARLEN_URL", "grpc://127.0.0.1:8001")
    lines = [line for line in given.file.read_text().splitlines() if line.strip()]

    with Client(url, given.embedder) as embedder:
        # one call: the server packs query and lines into its batches
        query, *vectors = embedder.embed([given.query, *lines], normalize=True, truncate=True)
    similarity = np.array(vectors) @ query
    near = [lines[place] for place in np.argsort(-similarity)[: given.retrieve]]

    with Client(url, given.reranker) as reranker:
        # logits: scores of different logits may be equal
        logits = reranker.rerank(given.query, near, truncate=True)
    for place in np.argsort(-logits)[: given.top]:
        print(f"{logits[place]:.3f}  was {place + 1} of {len(near)}: {near[place]}")


if __name__ == "__main__":
    main()
