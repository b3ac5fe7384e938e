"""Queries that are looked up: their sparse vectors are stored weights of their tokens.

No model runs, so they pass the queue, the batches and the response cache. Source:
sparse_encoder/modules/sparse_static_embedding.py of sentence-transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from varlen.models.checkpoint.router import TABLE
from varlen.models.checkpoint.weights import CheckpointWeights
from varlen.request.request import Float32Array, Prompt, Reply, Request, Terms
from varlen.request.sparse_vectors import terms_in_order

if TYPE_CHECKING:
    from varlen.models.checkpoint_folder import Checkpoint
    from varlen.tasks import Task


@dataclass(frozen=True, slots=True)
class TermLookup:
    """The table of a model.

    Attributes:
        weights: `[terms]` fp32, the weight of each token.
    """

    weights: Float32Array

    @classmethod
    def of(cls, checkpoint: Checkpoint, task: Task) -> TermLookup | None:
        """Return the table of a checkpoint for a task, None without one."""
        router = checkpoint.router
        if router is None or task != "sparse_embed":
            return None
        with CheckpointWeights(checkpoint.folder / router.queries) as weights:
            # a view would keep the file mapped
            return cls(weights.read(TABLE, checkpoint.vocab_size).float().clone().numpy())

    @staticmethod
    def answers(request: Request) -> bool:
        """Return whether the rows of a request are looked up; they have one role."""
        return type(request.prompts[0].payload) is Terms

    def answer(self, request: Request, reply: Reply) -> None:
        """Answer a request."""
        for row, prompt in enumerate(request.prompts):
            reply.send(row, self.terms(prompt))
        reply.finish()

    def terms(self, prompt: Prompt) -> Float32Array:
        """Return the terms of a text, the largest weight first, `[terms, 2]` fp32.

        Terms of weight 0 are left out.
        """
        terms = np.unique(prompt.token_ids)
        weights = self.weights[terms]
        is_kept = weights != 0
        return terms_in_order(terms[is_kept], weights[is_kept])
