"""Tasks that find parts of texts: prompts and answers of their requests.

A task of them is a class in a file of its own, and its line in `FOUND`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy.typing as npt

from varlen.intake.checks import Intake
from varlen.intake.context_windows import ContextWindows
from varlen.intake.tokenization import Text
from varlen.intake.word_prompts import SpanTexts
from varlen.request.request import Float32Array, TokenizationTask
from varlen.request.row_parameters import RowParameters
from varlen.tasks import Task


class Found(Protocol):
    """The rows of one request, and what is found in them.

    Attributes:
        needs: inputs of a request, in words.
    """

    needs: ClassVar[str]

    @classmethod
    def check(cls, given: RowParameters) -> RowParameters:
        """Return the parameters of a request; raises RequestError if they do not fit the task."""

    @classmethod
    def of(cls, texts: Sequence[Text], given: RowParameters, intake: Intake) -> "Found":
        """Return the rows of a request with checked parameters.

        Raises:
            RequestError: a text cannot be served.
        """

    @property
    def steps(self) -> tuple[TokenizationTask, ...]:
        """The steps that make the prompts, each perhaps several for a row."""

    def count(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens of each row, given the tokens of each prompt."""

    def tensors(self, outputs: Sequence[Float32Array]) -> Mapping[str, npt.NDArray[Any]]:
        """Return the answers as tensors by name, given the output of each prompt."""


FOUND: Mapping[Task, type[Found]] = MappingProxyType(
    {"extract": SpanTexts, "question_answer": ContextWindows}
)
