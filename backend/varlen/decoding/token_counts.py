"""How often an answer holds each token, which penalties need."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenCounts:
    """The distinct tokens of a sequence, and how often its answer holds each."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        """Start with the tokens of a prompt, which count 0 times."""
        distinct = np.unique(np.array(prompt_ids, dtype=np.int64))
        self._size = len(distinct)
        self._index = {token_id: index for index, token_id in enumerate(distinct.tolist())}
        self._ids = np.zeros(self._size + 64, dtype=np.int64)
        self._ids[: self._size] = distinct
        self._counts = np.zeros(self._size + 64, dtype=np.float32)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens, `[tokens]`."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often the answer holds each of `ids`."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Count a token of the answer."""
        index = self._index.get(token_id)
        if index is None:
            index = self._index[token_id] = self._size
            if index == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[index] = token_id
            self._size += 1
        self._counts[index] += 1
