"""The kinds of models on the server: models of one step, and models that generate.

`kind_of` alone asks which one a task has. Their services are imported when they load, since they import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy.typing as npt

from varlen.request.request import Draft, Output, Request
from varlen.tasks import TASKS, Task
from varlen.wire.generate import PROMPTS, GeneratedAnswer, ResponseSpec, read_generate_request
from varlen.wire.outputs import (
    AnswerOptions,
    ArrayAnswer,
    ModelOutputs,
    ScoreAnswer,
    ScoredPairs,
    SeveralAnswers,
)
from varlen.wire.rows import DEFAULT_MAX_ROWS, Tensors, TokenizerAnswer, read_request

if TYPE_CHECKING:
    from varlen.service.generation import GeneratorParts
    from varlen.service.one_shot import EncoderParts
    from varlen.service.service import Kind, Service


class Answer(Protocol):
    """Makes responses out of the outputs of sequences.

    Attributes:
        streams: whether parts of the answer are sent as they come.
        num_bytes: size of the response, if it is known before the request runs, else 0.
    """

    @property
    def streams(self) -> bool: ...

    @property
    def num_bytes(self) -> int: ...

    def tensors(self, outputs: Sequence[tuple[int, Output]]) -> Mapping[str, npt.NDArray[Any]]:
        """Return the outputs of a response by name, given the outputs of sequences by row."""


class ServedKind(Protocol):
    """A kind of model on the server; an object reads the requests of one model.

    Attributes:
        inputs: kinds of input; a request has one of them, and always the first name of that.
        max_rows: largest request, in rows, unless config.pbtxt says otherwise; 0 if it has none.
        streams: whether a request may have several responses.
        environment: variables that torch and the tokenizers read when they are imported.
    """

    inputs: ClassVar[Collection[tuple[str, ...]]]
    max_rows: ClassVar[int]
    streams: ClassVar[bool]
    environment: ClassVar[Mapping[str, str]]

    def __init__(self, service: Service[Any], *, decoupled: bool) -> None:
        """Read requests of this model, which may get several responses if it is decoupled."""

    @staticmethod
    def parts() -> type[Kind]:
        """Return the kind of its service."""

    def read(
        self, tensors: Tensors, parameters: str, requested: Collection[str], timeout: int, /
    ) -> tuple[Draft, Any]:
        """Return the draft of a request, and the form of its answer; see `read_request`."""

    def answer(self, request: Request, form: Any) -> Answer:
        """Return what makes the responses to a request, once its tokens are known."""


class Rows(ServedKind):
    """A model of one step."""

    inputs = (("text", "text_pair"), ("input_ids", "attention_mask", "token_type_ids"))
    max_rows = DEFAULT_MAX_ROWS
    streams = False
    # a text is tokenized in one thread of the pool, not in all cores
    environment: ClassVar = {"TOKENIZERS_PARALLELISM": "false"}

    def __init__(self, service: Service[EncoderParts], *, decoupled: bool) -> None:  # noqa: ARG002
        self._intake = intake = service.intake
        further = service.model.info.outputs
        outputs = ModelOutputs.of(service.task, service.checkpoint, further)
        self._outputs = outputs.with_texts(intake.term_text, intake.token_text)

    @staticmethod
    def parts() -> type[EncoderParts]:
        from varlen.service.one_shot import EncoderParts

        return EncoderParts

    def read(
        self, tensors: Tensors, parameters: str, requested: Collection[str], timeout: int
    ) -> tuple[Draft, AnswerOptions | ScoredPairs | TokenizerAnswer]:
        return read_request(
            tensors,
            parameters,
            self._intake,
            self._outputs,
            requested=requested,
            timeout_microseconds=timeout,
        )

    def answer(
        self, request: Request, form: AnswerOptions | ScoredPairs | TokenizerAnswer
    ) -> Answer:
        if isinstance(form, TokenizerAnswer):
            return form
        if isinstance(form, ScoredPairs):
            return ScoreAnswer.to(request, form)
        kind = SeveralAnswers if request.options.outputs else ArrayAnswer
        return kind.to(request, self._outputs, form)


class Prompts(ServedKind):
    """A model that generates."""

    inputs = tuple((name,) for name in PROMPTS)
    max_rows = 0
    streams = True
    # threads of torch would spin on cores that the server and clients need
    environment: ClassVar = {**Rows.environment, "OMP_WAIT_POLICY": "passive"}

    def __init__(self, service: Service[GeneratorParts], *, decoupled: bool) -> None:
        self._intake, self._model = service.intake, service.model
        self._decoupled = decoupled

    @staticmethod
    def parts() -> type[GeneratorParts]:
        from varlen.service.generation import GeneratorParts

        return GeneratorParts

    def read(
        self, tensors: Tensors, parameters: str, _: Collection[str], timeout: int, /
    ) -> tuple[Draft, ResponseSpec | TokenizerAnswer]:
        draft, form = read_generate_request(
            tensors,
            parameters,
            self._intake,
            decoupled=self._decoupled,
            read_options=self._model.options,
            timeout_microseconds=timeout,
        )
        return self._model.with_bad_words(draft), form

    def answer(self, request: Request, form: ResponseSpec | TokenizerAnswer) -> Answer:
        if isinstance(form, TokenizerAnswer):
            return form
        return GeneratedAnswer.to(request, form, self._intake.token_text, self._model.token_bytes)


def kind_of(task: Task) -> type[ServedKind]:
    """Return the kind of model that serves a task."""
    return Prompts if TASKS[task].is_iterative else Rows
