"""Searches a folder of text files by meaning, with numpy as the index.

Usage:
    python semantic_search.py index notes notes.npz
    python semantic_search.py query notes.npz "when does my passport expire"
"""

import argparse
import os
from pathlib import Path

import numpy as np

from varlen_client import Client

SUFFIXES = {".md", ".txt", ".rst"}


def passages(folder: Path) -> list[tuple[str, str]]:
    """Return place and text of each paragraph of a folder's text files."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
    return [
        (f"{path.relative_to(folder)}, paragraph {number}", text.strip())
        for path in files
        for number, text in enumerate(path.read_text(errors="replace").split("\n\n"), 1)
        if text.strip()
    ]


def main() -> None:
    """Index a folder, or answer a query."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="minilm")
    parser.add_argument("action", choices=["index", "query"])
    parser.add_argument("first", help="folder to index; index to query")
    parser.add_argument("second", help="index to write; text of the query")
    given = parser.parse_args()
    with Client(os.environ.get("VARLEN_URL", "grpc://127.0.0.1:8001"), given.model) as client:
        if given.action == "index":
            places, texts = zip(*passages(Path(given.first)), strict=True)
            vectors = client.embed(texts, normalize=True, truncate=True)
            np.savez(given.second, vectors=vectors, places=places, texts=texts)
            print(f"{len(texts)} paragraphs in {given.second}")
            return
        index = np.load(given.first)
        scores = index["vectors"] @ client.embed([given.second], normalize=True)[0]
    for place in np.argsort(-scores)[:5]:
        print(f"{scores[place]:.3f}  {index['places'][place]}: {index['texts'][place][:80]!r}")


if __name__ == "__main__":
    main()
