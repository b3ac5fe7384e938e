"""Pairs of texts to the text of a prompt, with the checkpoint's chat template.

As in sentence-transformers, a pair is two messages with the roles query and document, behind one of the role system if
there is a prompt. A text that is cut keeps the end of the template, which the score is read from.
"""

from collections.abc import Callable

import numpy as np

from varlen.decoding.text.chat import ChatTemplate
from varlen.errors import CheckpointError, RequestError
from varlen.models.checkpoint.logit_score import LogitScore
from varlen.request.request import Int32Array

# Stand for texts; no tokenizer gives their last tokens the same ids.
_FILLERS = ("0", "1 2 3 4")


class PairTemplate:
    """Makes the prompts of pairs. Thread-safe.

    Attributes:
        ending: `[tokens]` int32, the last tokens of every prompt.
    """

    def __init__(
        self, template: ChatTemplate, score: LogitScore, tokenize: Callable[[str], Int32Array]
    ) -> None:
        """Check the template.

        Args:
            score: format of the messages for a pair.
            tokenize: returns the tokens of a text, without special ones.

        Raises:
            CheckpointError: the template leaves out the query or the document.
        """
        self._template, self._score = template, score
        try:
            first, second = (tokenize(self.render(filler, filler)) for filler in _FILLERS)
            text = self.render("a-query", "a-document")
        except RequestError as error:
            raise CheckpointError(str(error)) from None
        if "a-query" not in text or "a-document" not in text:
            raise CheckpointError(
                "the chat template leaves out messages of the role query or document; the task rerank of a model that"
                " answers in words needs both"
            )
        self.ending = _common_ending(first, second)

    def render(self, query: str, document: str) -> str:
        """Return the text of a prompt."""
        messages = [("query", query), ("document", document)]
        if self._score.system:
            messages.insert(0, ("system", self._score.system))
        return self._template.render(
            [{"role": role, "content": self._content(text)} for role, text in messages],
            add_generation_prompt=False,
        )

    def _content(self, text: str) -> object:
        return [{"type": "text", "text": text}] if self._score.has_parts else text


def _common_ending(first: Int32Array, second: Int32Array) -> Int32Array:
    """Return the last tokens that both have."""
    size = min(len(first), len(second))
    same = first[len(first) - size :] == second[len(second) - size :]
    count = size - (int(np.flatnonzero(~same)[-1]) + 1 if not same.all() else 0)
    return first[len(first) - count :]
