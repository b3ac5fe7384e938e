"""The accuracy gate: a system is compared only if its results are right."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
# Mean cosine to the reference of a system that counts as equal in quality.
EQUAL_QUALITY = 0.999


def cosines(vectors: Vectors, reference: Vectors) -> Vectors:
    """Return the cosine of each row with its reference, [rows]; NaN for a zero row.

    Raises:
        ValueError: the shapes differ, or a value is not finite.
    """
    if vectors.shape != reference.shape:
        raise ValueError(f"vectors have shape {vectors.shape}; the reference {reference.shape}")
    if not np.isfinite(vectors).all():
        raise ValueError("vectors hold values that are not finite")
    left, right = vectors.astype(np.float64), reference.astype(np.float64)
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return np.asarray((left * right).sum(axis=1) / norms, dtype=np.float32)
