"""Prompts and requests for tests, built from token ids."""

import numpy as np

from varlen.request.request import Prompt, Request, RequestOptions


def prompt_of(ids, types=None):
    """Return a prompt of these token ids, or of a single one."""
    ids = np.array(ids, dtype=np.int32, ndmin=1)
    return Prompt(ids, None if types is None else np.array(types, dtype=np.int32))


def request_of(*rows, types=None, **options):
    """Return a request whose rows hold these token ids."""
    return Request(tuple(prompt_of(row, types) for row in rows), RequestOptions(**options))


def text(*rows):
    """Return texts, or bytes, as the tensor `text` of a request, `[rows, 1]`."""
    return np.array([[row if isinstance(row, bytes) else row.encode()] for row in rows], object)


def random_prompts(lengths, seed=0, types=1):
    """Return prompts of these lengths, with token types below `types`."""
    rng = np.random.default_rng(seed)
    return [prompt_of(rng.integers(0, 50, n), rng.integers(0, types, n)) for n in lengths]
