"""Several outputs of each row, which the server makes in one pass: `outputs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from typing_extensions import Unpack

from varlen_client.errors import InvalidRequest
from varlen_client.tasks.answers import RowAnswers, RowOutput
from varlen_client.tasks.row_task import Asked, Options, Outputs, RowTask, method
from varlen_client.tasks.vectors import EmbedOptions, sparse_outputs, sparse_vectors
from varlen_client.wire import Inputs

OutputTask: TypeAlias = Literal[
    "embed", "sparse_embed", "token_embed", "hidden", "classify", "rerank"
]

# Outputs that are arrays, by their tasks; the answer to a row is a row of each.
_ARRAYS: dict[str, RowOutput] = {
    "embed": RowOutput("sentence_embedding"),
    "token_embed": RowOutput("token_embeddings", 2),
    "hidden": RowOutput("last_hidden_state", 2),
    "classify": RowOutput("logits"),
    "rerank": RowOutput("logits"),
}
_SPARSE = "sparse_embed"


class OutputsOptions(EmbedOptions, total=False):
    """Options of several outputs.

    max_active_dims: keep only the terms of the largest weights; by default the checkpoint decides.
    """

    max_active_dims: int | None


class _Asked(OutputsOptions, total=False):
    """Options of a call with its tasks."""

    tasks: Sequence[str]


def _several_outputs(options: Options) -> Outputs:
    tasks = options["tasks"]
    unknown = [task for task in tasks if task != _SPARSE and task not in _ARRAYS]
    if unknown or not tasks:
        raise InvalidRequest(
            f"tasks is {list(tasks)}; allowed: one or more of {', '.join((_SPARSE, *_ARRAYS))}"
        )
    if options.get("output_dtype") not in (None, "float32"):
        raise InvalidRequest(
            f"output_dtype is {options['output_dtype']}; allowed with several outputs: float32"
        )
    found: list[RowOutput] = []
    for task in dict.fromkeys(tasks):
        if task == _SPARSE:
            found += sparse_outputs({})
        elif task == "embed":
            found.append(replace(_ARRAYS[task], width=options.get("dimensions")))
        else:
            found.append(_ARRAYS[task])
    return tuple(found)


def _read_several(answers: RowAnswers) -> list[dict[str, Any]]:
    """Return the outputs of each row by task."""
    tasks = list(dict.fromkeys(answers.options["tasks"]))
    columns = [
        sparse_vectors(answers)
        if task == _SPARSE
        else [row.copy() for (array,) in answers.each(_ARRAYS[task].name) for row in array]
        for task in tasks
    ]
    return [dict(zip(tasks, row, strict=True)) for row in zip(*columns, strict=True)]


SEVERAL: RowTask[list[dict[str, Any]]] = RowTask(
    "outputs", _Asked, _several_outputs, _read_several, not_sent=["tasks"]
)
# An answer with tokens is padded to the longest row of its request.
SEVERAL_OF_TOKENS = replace(SEVERAL, row_by_row=True)


def several(tasks: Sequence[str]) -> RowTask[list[dict[str, Any]]]:
    """Return the task of a call for the outputs of these tasks."""
    of_tokens = any(task in _ARRAYS and _ARRAYS[task].rank > 1 for task in tasks)
    return SEVERAL_OF_TOKENS if of_tokens else SEVERAL


class SeveralMethods:
    """Methods for models with several outputs."""

    @method
    def outputs(
        self, inputs: Inputs, tasks: Sequence[OutputTask], **options: Unpack[OutputsOptions]
    ) -> Asked[list[dict[str, Any]]]:
        """Return the outputs of each row by task, made in one pass.

        Args:
            inputs: texts, or lists of token ids.
            tasks: the model's own task, and tasks of its setting `outputs`.

        Returns:
            Per row: embed [features]; sparse_embed a `SparseVector`; token_embed [vectors, features]; hidden [tokens,
            features]; classify and rerank [labels], logits. Errors are the same as in `embed`.
        """
        return several(tasks).of(inputs, {**options, "tasks": tasks})
