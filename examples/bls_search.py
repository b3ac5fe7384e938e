"""Asks the model `search`, which calls an embedder and a reranker inside the server.

Usage:
    python bls_search.py "how do I reset my password" "Passwords are reset in the settings." "Trains run hourly."
"""

import os
import sys

import numpy as np
import tritonclient.grpc as triton


def main() -> None:
    """Print the documents in the order that the server returns."""
    query, *documents = sys.argv[1:]
    inputs = []
    for name, texts in (("query", [query]), ("documents", documents)):
        data = np.array([text.encode() for text in texts], dtype=object)
        inputs.append(triton.InferInput(name, list(data.shape), "BYTES"))
        inputs[-1].set_data_from_numpy(data)
    url = os.environ.get("VARLEN_URL", "grpc://127.0.0.1:8001").removeprefix("grpc://")
    with triton.InferenceServerClient(url) as client:
        answer = client.infer("search", inputs)
    for place, score in zip(answer.as_numpy("places"), answer.as_numpy("scores"), strict=True):
        print(f"{score:.3f}  {documents[place]}")


if __name__ == "__main__":
    main()
