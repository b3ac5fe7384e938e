"""A request before tokenization: checked where that is cheap, the rest split into tasks.

Texts of other requests are tokenized between the tasks of a large one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from varlen.request.request import Prompt, Request, RequestOptions

# Rows of short texts that are tokenized in one step have about this many bytes; a longer text is a step of its own.
_STEP_BYTES = 4096


@dataclass(frozen=True, slots=True)
class TokenizationTask:
    """Tokenizes some rows of a request, or prepares an option of it.

    Attributes:
        num_bytes: length of the texts in UTF-8, as a measure of the work.
        run: function that returns the prompts of these rows, perhaps none; raises RequestError.
        wait: function that waits, at most some seconds, for work of a process, and returns whether the task can run.
    """

    num_bytes: int
    run: Callable[[], tuple[Prompt, ...]]
    wait: Callable[[float], bool] = lambda _: True


@dataclass(frozen=True, slots=True)
class Draft:
    """A request whose texts are checked, but not tokenized.

    Attributes:
        steps: tasks in order of the rows.
    """

    steps: tuple[TokenizationTask, ...]
    options: RequestOptions

    @classmethod
    def of_prompts(cls, prompts: tuple[Prompt, ...], options: RequestOptions) -> "Draft":
        """Return the draft of a request that came with token ids."""
        return cls((TokenizationTask(0, lambda: prompts),), options)

    @property
    def num_bytes(self) -> int:
        """Length of the texts in UTF-8; 0 if no work is left."""
        return sum(step.num_bytes for step in self.steps)

    def and_then(self, step: TokenizationTask) -> "Draft":
        return replace(self, steps=(*self.steps, step))

    def complete(self) -> Request:
        """Run every task, and return the request.

        Raises:
            RequestError: the request cannot be served.
        """
        prompts = tuple(prompt for step in self.steps for prompt in step.run())
        return Request(prompts, self.options)


def steps_of(
    sizes: Sequence[int], run: Callable[[range], tuple[Prompt, ...]]
) -> tuple[TokenizationTask, ...]:
    """Return the steps of rows: short texts share one.

    Args:
        sizes: length of each row in UTF-8.
        run: does the work of some rows, and returns their prompts; raises RequestError.
    """
    steps = []
    begin = num_bytes = 0
    for end, size in enumerate(sizes, start=1):
        num_bytes += size
        if num_bytes >= _STEP_BYTES or end == len(sizes):
            steps.append(TokenizationTask(num_bytes, partial(run, range(begin, end))))
            begin, num_bytes = end, 0
    return tuple(steps)
