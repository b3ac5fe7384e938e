"""A request before tokenization: checked where that is cheap, the rest split into steps.

Steps let texts of other requests be tokenized between the rows of a large one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from varlen.request.request import Prompt, Request, RequestOptions


@dataclass(frozen=True, slots=True)
class Step:
    """A part of the work between a draft and its request.

    Attributes:
        num_bytes: length of the texts in UTF-8, as a measure of the work.
        run: does it and returns the prompts of some rows; raises RequestError.
    """

    num_bytes: int
    run: Callable[[], tuple[Prompt, ...]]


@dataclass(frozen=True, slots=True)
class Draft:
    """A request whose texts are checked, but not tokenized.

    Attributes:
        steps: steps in order of the rows.
        options: options of the request.
    """

    steps: tuple[Step, ...]
    options: RequestOptions

    @classmethod
    def of_prompts(cls, prompts: tuple[Prompt, ...], options: RequestOptions) -> "Draft":
        """Return the draft of a request that came with token ids."""
        return cls((Step(0, lambda: prompts),), options)

    @property
    def num_bytes(self) -> int:
        """Length of the texts in UTF-8; 0 if no work is left."""
        return sum(step.num_bytes for step in self.steps)

    def and_then(self, step: Step) -> "Draft":
        """Return the draft with one more step."""
        return replace(self, steps=(*self.steps, step))

    def complete(self) -> Request:
        """Run every step, and return the request.

        Raises:
            RequestError: the request cannot be served.
        """
        prompts = tuple(prompt for step in self.steps for prompt in step.run())
        return Request(prompts, self.options)
