"""Which of the waiting sequences run together next. Policies see lengths and order, never tensors or the wall clock."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from varlen.config import PolicyName
from varlen.request import Waiting


class Policy(Protocol):
    """Chooses the next batch."""

    def take(self, queue: deque[Waiting]) -> list[Waiting]:
        """Remove from the queue, which is in order of arrival, what runs next, and return it; at least one sequence."""


class TokenBudget:
    """First come, first served, up to a number of tokens. Packed batches cost by the token, so this fills them evenly.

    A sequence is never overtaken, so none can starve.
    """

    def __init__(self, max_batch_tokens: int) -> None:
        self._max_batch_tokens = max_batch_tokens

    def take(self, queue: deque[Waiting]) -> list[Waiting]:
        """Remove and return the longest prefix of the queue that fits the budget; at least one sequence."""
        batch = [queue.popleft()]
        room = self._max_batch_tokens - batch[0].num_tokens
        while queue and queue[0].num_tokens <= room:
            room -= queue[0].num_tokens
            batch.append(queue.popleft())
        return batch


_POLICIES: dict[PolicyName, Callable[[int], Policy]] = {"token_budget": TokenBudget}


def make_policy(name: PolicyName, max_batch_tokens: int) -> Policy:
    """Return the policy of that name, for batches of at most so many tokens."""
    return _POLICIES[name](max_batch_tokens)
