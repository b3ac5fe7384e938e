"""Requests to a model of embeddings that are refused, each with its whole message.

Unit tests read them, and tests of a server send them: the same mistake has the same message everywhere.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.errors import shorten
from varlen.request.row_parameters import ROW_PARAMETERS

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Model:
    """Limits of a model that knows the word `a` and has two token types."""

    tokens: int
    text_bytes: int
    vocabulary: int
    features: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that is the client's mistake.

    Attributes:
        description: problem of the request, for the test's id.
        message: the whole message.
        inputs: tensors by name.
        parameters: parameters of the request.
        timeout: the field of the server's protocol, in microseconds.
    """

    description: str
    message: str
    inputs: Arrays
    parameters: Mapping[str, Any] = field(default_factory=dict)
    timeout: int = 0

    @property
    def fits_a_protocol(self) -> bool:
        """Whether a frontend passes these parameters on: flags, texts and whole numbers of 64 bits."""
        return all(
            isinstance(value, (bool, str)) or (isinstance(value, int) and abs(value) < 2**63)
            for value in self.parameters.values()
        )


def texts(*rows: str | bytes) -> npt.NDArray[np.object_]:
    """Return a row for each text, `[rows, 1]`."""
    return np.array([[row.encode() if isinstance(row, str) else row] for row in rows], object)


def row(*elements: str | bytes) -> npt.NDArray[np.object_]:
    """Return texts without a dimension of rows, `[texts]`."""
    return texts(*elements)[:, 0]


def ids(*rows: list[int]) -> npt.NDArray[np.int64]:
    """Return rows of equal length, `[rows, tokens]`."""
    return np.array(rows, np.int64)


def refusals(model: Model) -> list[Refusal]:
    """Return what the backend refuses, whatever comes before it."""
    return [*_texts(model), *_ids(model), *_combinations(), *_parameters(model), *_names()]


def malformed() -> list[Refusal]:
    """Return what a server refuses itself, by the shapes in config.pbtxt."""
    good, word = ids([5, 5, 5], [5, 5, 5]), texts("a")
    tensors = ("input_ids", "attention_mask", "token_type_ids")
    return [
        Refusal("nothing", "the request has no inputs; send text, or input_ids", {}),
        Refusal(
            "no rows of text",
            "text has no rows; send at least one row",
            {"text": np.empty((0, 1), object)},
        ),
        Refusal(
            "no rows of ids",
            "input_ids has no rows; send at least one row",
            {"input_ids": np.empty((0, 3), np.int64)},
        ),
        Refusal(
            "a pair without its text",
            "the request has text_pair without text; send both",
            {"input_ids": good, "text_pair": texts("a", "a")},
        ),
        Refusal(
            "fewer pairs than texts",
            "text_pair has 1 rows; text has 2",
            {"text": texts("a", "a"), "text_pair": word},
        ),
        *(
            Refusal(
                f"{name} of rank 3",
                f"{name} has shape [1, 2, 3]; send [rows, tokens]",
                {"input_ids": good, name: good[None]},
            )
            for name in tensors
        ),
        *(
            Refusal(
                f"{name} of shape {shape}",
                f"{name} has shape {list(shape)}; send [rows, 1]",
                {"text": word, name: np.full(shape, b"a", object)},
            )
            for name in ("text", "text_pair")
            for shape in ((1,), (1, 2), (1, 1, 1), (2, 0))
        ),
        *(
            Refusal(
                f"{name} of other rows",
                f"{name} has shape [1, 3]; input_ids has [2, 3]",
                {"input_ids": good, name: good[:1]},
            )
            for name in tensors[1:]
        ),
    ]


def _texts(model: Model) -> list[Refusal]:
    tokens, size = model.tokens + 20, model.text_bytes + 2
    not_utf_8 = [
        (b"\xff", 0),
        (b"caf\xe9", 3),
        (b"cat\xc3", 3),
        (b"\xed\xa0\x80", 0),
        (b"a\xc0\x80", 1),
    ]
    rows = [
        (
            "a text with too many tokens",
            f"row 1: text has {tokens} tokens; this model takes at most {model.tokens} (truncate=true cuts it)",
            "a " * (tokens - 2),
        ),
        (
            "a text with too many bytes",
            f"row 1: text has {size} bytes; this model takes at most {model.text_bytes} (truncate=true cuts it)",
            "é" * (size // 2),
        ),
        *(
            (f"not UTF-8: {text!r}", f"row 1: text is not UTF-8 at byte {at}; send UTF-8", text)
            for text, at in not_utf_8
        ),
    ]
    return [Refusal(name, message, {"text": texts("a", text)}) for name, message, text in rows]


def _ids(model: Model) -> list[Refusal]:
    most, longest = model.vocabulary - 1, model.tokens
    wrong_ids = (-1, most + 1, 2**31, 2**32 + 5, -(2**63), 2**63 - 1)
    holes = ([1, 0, 1], [0, 1, 1], [2, 1, 0], [1, -1, 0], [1, 1, 2], [0, 0, 1])
    rows = ids([5, 5, 5], [5, 5, 5])
    no_tokens = "row {}: input_ids has no tokens; send at least one"
    return [
        *(
            Refusal(
                f"the token id {wrong}",
                f"row 1: input_ids holds {wrong}; this model takes 0 to {most}",
                {"input_ids": ids([0, most], [5, wrong])},
            )
            for wrong in wrong_ids
        ),
        *(
            Refusal(
                f"the token type {wrong}",
                f"row 0: token_type_ids holds {wrong}; this model takes 0 to 1",
                {"input_ids": ids([5, 5]), "token_type_ids": ids([0, wrong])},
            )
            for wrong in (-1, 2, 2**32)
        ),
        *(
            Refusal(
                f"the mask {mask}",
                "row 1: attention_mask is not ones followed by zeros; pad on the right, without holes",
                {"input_ids": rows, "attention_mask": ids([1, 1, 1], mask)},
            )
            for mask in holes
        ),
        Refusal(
            "too many token ids",
            f"row 0: input_ids has {longest + 1} tokens; this model takes at most {longest}",
            {"input_ids": ids([5] * (longest + 1))},
            {"truncate": True},
        ),
        Refusal("no token ids", no_tokens.format(0), {"input_ids": np.empty((2, 0), np.int64)}),
        Refusal(
            "a mask of zeros",
            no_tokens.format(1),
            {"input_ids": rows, "attention_mask": ids([1, 1, 1], [0, 0, 0])},
        ),
        Refusal(
            "a mask of another length",
            "attention_mask has shape [2, 2]; input_ids has [2, 3]",
            {"input_ids": rows, "attention_mask": rows[:, :2]},
        ),
    ]


def _combinations() -> list[Refusal]:
    word, row = texts("a"), ids([5, 5])
    return [
        *(
            Refusal(
                f"text and {name}",
                f"the request has both text and {name}; send one or the other",
                {"text": word, name: row},
            )
            for name in ("input_ids", "attention_mask", "token_type_ids")
        ),
        *(
            Refusal(
                f"{name} without ids",
                f"the request has {name}; send text, or input_ids",
                {name: row},
            )
            for name in ("attention_mask", "token_type_ids")
        ),
        *(
            Refusal(
                f"{name} for token ids",
                f"the request has {name} and input_ids; a prompt is put before texts: send text",
                {"input_ids": row},
                {name: "query"},
            )
            for name in ("prompt_name", "input_type")
        ),
        Refusal(
            "a prompt by name and by meaning",
            "the request has both prompt_name and input_type; send one or the other",
            {"text": word},
            {"prompt_name": "query", "input_type": "query"},
        ),
        *(
            Refusal(
                f"a timeout of {timeout} microseconds",
                f"timeout is {timeout} microseconds; send at least 1000 microseconds, or no timeout (the model's"
                " setting ignore_request_timeout ignores it)",
                {"text": word},
                timeout=timeout,
            )
            for timeout in (1, 30, 999)
        ),
    ]


def _parameters(model: Model) -> list[Refusal]:
    """Return values that are not allowed; each is named with what is allowed."""
    flags = (1, 0, "true", "", None, [True], 1.0, "x" * 20_000)
    priorities = (-1, 10, 1.0, 0.5, True, None, "3", [3], 10**400, ["y"] * 5000)
    deadlines = (0, -1, -0.5, True, False, None, "100", [100], float("nan"), float("inf"), 10**400)
    dimensions = (0, -1, model.features + 1, 10**400, True, 2.0, "8", None, [8])
    dtypes = "float32, float16, int8, binary, ubinary"
    input_types = (
        "query, passage, search_query, search_document, document, classification, clustering"
    )
    wrong = (
        ("truncate", flags, "true, false"),
        ("normalize", flags, "true, false"),
        (
            "truncate_prompt_tokens",
            (0, -1, 1.5, "a", None, True),
            "whole numbers from 1 to 2147483647",
        ),
        ("truncation_side", ("Left", "", 1, None, ["left"], {"a": 1}), "right, left"),
        ("prompt_name", (3, None), "a string"),
        ("input_type", ("queries", "Query", 3, None), input_types),
        ("output_dtype", ("fp16",), dtypes),
        ("dimensions", dimensions, f"whole numbers from 1 to {model.features}"),
        ("request_priority", priorities, "whole numbers from 0 to 9"),
        ("deadline_ms", deadlines, "numbers above 0"),
        ("tenant", ("a" * 129, 3, None, ["a"]), "a string of at most 128 characters"),
        ("cache_salt", ("a" * 257, 3, None, ["a"]), "a string of at most 256 characters"),
    )
    return [
        *(
            Refusal(
                f"{name} is {json.dumps(value)[:20]}",
                f"{name} is {shorten(json.dumps(value))}; allowed: {allowed}",
                {"text": texts("a")},
                {name: value},
            )
            for name, values, allowed in wrong
            for value in values
        ),
        *(
            Refusal(
                f"{dtype} of 12 features",
                f"output_dtype {dtype} packs 8 features in a byte, and the vector has 12; send dimensions that are a"
                " multiple of 8",
                {"text": texts("a")},
                {"output_dtype": dtype, "dimensions": 12},
            )
            for dtype in ("binary", "ubinary")
        ),
        Refusal(
            "a prompt that the model does not have",
            "prompt_name is 'query'; this model has the prompts: none",
            {"text": texts("a")},
            {"prompt_name": "query"},
        ),
    ]


def _names() -> list[Refusal]:
    """Return names that no parameter of embeddings has."""
    names = ", ".join(name for name, each in ROW_PARAMETERS.items() if "embed" in each.tasks)
    misspelt = {
        "truncate": ("trunc", "Truncate", "truncated"),
        "truncation_side": ("truncation",),
        "dimensions": ("dimension",),
        "output_dtype": ("output_type",),
        "normalize": ("normalise", "normalized"),
        "deadline_ms": ("deadline", "deadlineMs", "deadline-ms"),
        "request_priority": ("request_prio", "RequestPriority"),
    }
    of_other_tasks = {
        "activation": "classify or rerank or token_classify",
        "max_active_dims": "sparse_embed",
        "top_k": "fill_mask or question_answer",
    }
    return [
        *(
            Refusal(
                f"the misspelt name {name}",
                f'unknown parameter "{name}". Did you mean "{meant}"? Allowed: {names}',
                {"text": texts("a")},
                {name: True},
            )
            for meant, wrong in misspelt.items()
            for name in wrong
        ),
        *(
            Refusal(
                f"{name} for another task",
                f"the parameter {name} is for the task {tasks}; this model has the task embed",
                {"text": texts("a")},
                {name: 3},
            )
            for name, tasks in of_other_tasks.items()
        ),
    ]
