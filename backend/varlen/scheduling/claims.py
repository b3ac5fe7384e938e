"""Tokens that requests may still run, and the order that they give.

The work of a request is its prompt and `max_tokens`, for each of its samples or beams. It is served as its tokens run;
what `max_tokens` promised and the answer did not need is served at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

from varlen.request.generation import GenerationOptions
from varlen.request.request import Prompt, Request
from varlen.scheduling.fair_share import FairShare
from varlen.scheduling.sequence import GeneratedSequence

# See decision 0044.
_PATIENCE = 2


@dataclass(slots=True, eq=False)
class Claim:
    """Tokens that a part of a request may still run, owed to its tenant.

    The part is what starts as one group.

    Attributes:
        tenant: see `FairShare`.
        unserved: tokens that may still run, if its answers have `max_tokens`.
        groups: groups that it consists of now.
    """

    tenant: str
    unserved: int
    groups: int = 1


class Claims:
    """Open claims of all tenants.

    The waiting work of a tenant in `FairShare` is the sum of what its claims have unserved.
    """

    def __init__(self) -> None:
        self._share = FairShare(_PATIENCE)

    def enter(self, first: GeneratedSequence) -> tuple[int, Claim]:
        """Return the rank and the claim of a group that begins to wait.

        Args:
            first: first sequence of the group.
        """
        options, tokens = first.options, _work(first.prompt, first.generation)
        rank = self._share.enter(options.tenant, tokens, 1 + options.priority)
        return rank, Claim(options.tenant, tokens)

    def part_before(self, request: Request) -> float:
        """Return the part of waiting work that runs before a new request. From any thread."""
        options = request.options
        assert options.generation is not None
        work = max(_work(prompt, options.generation) for prompt in request.prompts)
        return self._share.part_before(options.tenant, work, 1 + options.priority)

    def serve(self, claim: Claim, tokens: int) -> None:
        """Count tokens that have run; tokens beyond the claim were lost and ran again."""
        served = min(tokens, claim.unserved)
        claim.unserved -= served
        self._share.serve(claim.tenant, served)
        self._share.repeat(tokens - served)

    def leave(self, claim: Claim) -> None:
        """Count one group less; the claim ends with its last one."""
        claim.groups -= 1
        if not claim.groups:
            self._share.serve(claim.tenant, claim.unserved)
            self._share.leave(claim.tenant)


def _work(prompt: Prompt, options: GenerationOptions) -> int:
    """Return the most tokens that a prompt and its answers run."""
    return prompt.num_tokens + max(options.n, options.num_beams) * options.max_tokens
