"""The wire format: tensor names and shapes, request parameters, and their conversion to a `Draft`.

Names follow exported Hugging Face models, so that existing clients work. This file uses arrays and
JSON, not the server's classes.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from varlen.config import Task
from varlen.draft import Draft
from varlen.errors import RequestError, shorten
from varlen.intake import Intake
from varlen.request import Float32Array, Output, Prompt, RequestOptions
from varlen.tokenization import Text

Tensors: TypeAlias = Mapping[str, npt.NDArray[Any]]

# Largest request, in rows, unless config.pbtxt says otherwise.
DEFAULT_MAX_ROWS = 64

MAX_PRIORITY = 9

# A shorter `timeout` of the server's protocol is a number in another unit: passing the request to this
# process and its response back takes about half of this.
_MIN_TIMEOUT_MICROSECONDS = 1000

# Parameters of every task.
COMMON_PARAMETERS = ("request_priority", "deadline_ms")
_PARAMETERS = ("truncate", "normalize", *COMMON_PARAMETERS)
# Refuses `trunc` and `deadline`, and ignores `priority` (0.67) and `request_id` (0.69).
_NEAR_MISS = 0.75
# No name of ours is this long, nor a near miss of one.
_LONGEST_NEAR_MISS = 32

_PAIR_TASKS = frozenset({"classify", "rerank", "hidden", "token_classify"})
_OUTPUT_NAMES: dict[Task, str] = {
    "embed": "sentence_embedding",
    "hidden": "last_hidden_state",
    "classify": "logits",
    "rerank": "logits",
    "token_classify": "logits",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of config.pbtxt; `dims` do not include the rows."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    optional: bool = False


def input_specs(task: Task) -> tuple[TensorSpec, ...]:
    """Return the inputs of a task, all optional: text or token ids."""
    texts = ("text", "text_pair") if task in _PAIR_TASKS else ("text",)
    ids = ("input_ids", "attention_mask", "token_type_ids")
    return (
        *(TensorSpec(name, "TYPE_STRING", (1,), optional=True) for name in texts),
        *(TensorSpec(name, "TYPE_INT64", (-1,), optional=True) for name in ids),
    )


def output_specs(task: Task, hidden_size: int, num_labels: int) -> tuple[TensorSpec, ...]:
    """Return the outputs of a task, for a model of these sizes."""
    width = hidden_size if task in ("embed", "hidden") else num_labels
    dims = (-1, width) if task in ("hidden", "token_classify") else (width,)
    return (TensorSpec(_OUTPUT_NAMES[task], "TYPE_FP32", dims),)


def read_request(
    tensors: Tensors,
    parameters: str,
    intake: Intake,
    *,
    normalize: bool,
    timeout_microseconds: int = 0,
) -> Draft:
    """Return the draft of these tensors and parameters. Keeps no reference to a tensor.

    Args:
        tensors: by input name; the first dimension is rows.
        parameters: the request's parameters, a JSON object. Names that are not ours are ignored, as frontends
            add their own, unless they look like a misspelt name of ours.
        intake: the checks of this model.
        normalize: the default of the parameter `normalize`.
        timeout_microseconds: the field `timeout` of the server's protocol; 0 is none. The earlier of
            it and `deadline_ms` is the deadline.

    Raises:
        RequestError: the request cannot be served; the message says what came and what is allowed.
    """
    options = read_parameters(parameters, _PARAMETERS)
    truncate = _flag(options, "truncate", default=False)
    normalize = _flag(options, "normalize", default=normalize)
    priority = read_priority(options)
    deadline = read_deadline(options, timeout_microseconds)
    checked = RequestOptions(normalize, priority, deadline)
    if "text" in tensors:
        return Draft(intake.text_steps(_texts(tensors), truncate=truncate), checked)
    if "input_ids" in tensors:
        return Draft.of_prompts(_token_rows(tensors, intake), checked)
    raise RequestError(
        f"the request has {shorten(', '.join(tensors)) or 'no inputs'}; send text, or input_ids"
    )


@dataclass(frozen=True, slots=True)
class ArrayAnswer:
    """Makes the response to a request, which holds all rows.

    Attributes:
        task: of the model.
        streams: whether parts are sent as they come.
    """

    task: Task
    streams: bool = field(default=False, init=False)

    def tensors(self, outputs: Sequence[tuple[int, Output]]) -> dict[str, npt.NDArray[Any]]:
        """Return the output tensor by name, given the output of each row."""
        rows = [output for _, output in sorted(outputs, key=lambda each: each[0])]
        return {_OUTPUT_NAMES[self.task]: _array(self.task, cast(list[Float32Array], rows))}


def read_parameters(parameters: str, names: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the parameters of a request by name.

    Args:
        parameters: a JSON object, or nothing.
        names: of our parameters; other names stay unless they look like a misspelt name of these.

    Raises:
        RequestError: this is no JSON object, or a name is misspelt.
    """
    try:
        options = json.loads(parameters) if parameters else {}
    except (ValueError, RecursionError):
        raise RequestError(
            f"the request parameters are {shorten(repr(parameters))}; send a JSON object"
        ) from None
    if not isinstance(options, dict):
        raise RequestError(
            f"the request parameters are {shorten(repr(options))}; send a JSON object"
        )
    for name in options:
        if len(name) <= _LONGEST_NEAR_MISS and (meant := _misspelt(name, names)):
            raise RequestError(
                f'unknown parameter "{name}". Did you mean "{meant}"? Allowed: {", ".join(names)}'
            )
    return options


def read_priority(options: Mapping[str, Any]) -> int:
    """Return the parameter `request_priority`, 0 by default."""
    value = options.get("request_priority", 0)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 0 <= value <= MAX_PRIORITY:
        raise RequestError(
            f"the parameter request_priority is {shorten(repr(value))};"
            f" send a whole number from 0 to {MAX_PRIORITY}"
        )
    return cast(int, value)


def read_deadline(options: Mapping[str, Any], timeout_microseconds: int) -> float | None:
    """Return the earlier of a request's two deadlines, in seconds from now."""
    if 0 < timeout_microseconds < _MIN_TIMEOUT_MICROSECONDS:
        raise RequestError(
            f"timeout is {timeout_microseconds} microseconds; send at least {_MIN_TIMEOUT_MICROSECONDS}"
            " microseconds, or no timeout (the model's setting ignore_request_timeout ignores it)"
        )
    deadlines = [timeout_microseconds / 1e6] if timeout_microseconds else []
    if "deadline_ms" in options:
        deadlines.append(_positive("deadline_ms", options["deadline_ms"]) / 1e3)
    return min(deadlines, default=None)


def _array(task: Task, rows: Sequence[Float32Array]) -> Float32Array:
    """Return a new array of all rows: `[rows, width]` or `[rows, longest, width]`.

    Rows of tasks with an output per token are padded with zeros to the longest.
    """
    if task not in ("hidden", "token_classify"):
        return np.stack(rows)
    longest = max(len(row) for row in rows)
    filled = np.zeros((len(rows), longest, rows[0].shape[1]), dtype=np.float32)
    for index, row in enumerate(rows):
        filled[index, : len(row)] = row
    return filled


def _texts(tensors: Tensors) -> list[Text]:
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        if name in tensors:
            raise RequestError(f"the request has both text and {name}; send one or the other")
    texts = _strings("text", tensors["text"])
    if "text_pair" not in tensors:
        return list(texts)
    pairs = _strings("text_pair", tensors["text_pair"])
    _check_rows("text_pair", len(pairs), "text", len(texts))
    return list(zip(texts, pairs, strict=True))


def _strings(name: str, tensor: npt.NDArray[Any]) -> list[str]:
    if tensor.ndim != 2 or tensor.shape[1] != 1:
        raise RequestError(f"{name} has shape {list(tensor.shape)}; send [rows, 1]")
    texts = []
    for row, element in enumerate(tensor[:, 0]):
        try:
            texts.append(bytes(element).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RequestError(
                f"row {row}: {name} is not UTF-8 at byte {error.start}; send UTF-8"
            ) from None
    return texts


def _token_rows(tensors: Tensors, intake: Intake) -> tuple[Prompt, ...]:
    if "text_pair" in tensors:
        raise RequestError("the request has text_pair without text; send both")
    ids = _integers("input_ids", tensors["input_ids"])
    lengths = _lengths(tensors.get("attention_mask"), ids.shape)
    rows = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    if "token_type_ids" not in tensors:
        return intake.token_ids(rows)
    types = _integers("token_type_ids", tensors["token_type_ids"])
    _check_shape("token_type_ids", types.shape, ids.shape)
    return intake.token_ids(
        rows, [row[:length] for row, length in zip(types, lengths, strict=True)]
    )


def _lengths(mask: npt.NDArray[Any] | None, shape: tuple[int, ...]) -> list[int]:
    """Return each row's length in tokens: its width, or its mask's leading ones."""
    if mask is None:
        return [shape[1]] * shape[0]
    mask = _integers("attention_mask", mask)
    _check_shape("attention_mask", mask.shape, shape)
    lengths = (mask == 1).sum(axis=1)
    expected = np.arange(shape[1]) < lengths[:, None]
    wrong = np.flatnonzero((mask != expected).any(axis=1))
    if wrong.size:
        raise RequestError(
            f"row {wrong[0]}: attention_mask is not ones followed by zeros; pad on the right, without holes"
        )
    return cast(list[int], lengths.tolist())


def _integers(name: str, tensor: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    if tensor.ndim != 2:
        raise RequestError(f"{name} has shape {list(tensor.shape)}; send [rows, tokens]")
    return tensor.astype(np.int64, copy=False)


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise RequestError(f"{name} has shape {list(shape)}; input_ids has {list(expected)}")


def _check_rows(name: str, rows: int, other: str, expected: int) -> None:
    if rows != expected:
        raise RequestError(f"{name} has {rows} rows; {other} has {expected}")


@lru_cache(maxsize=1024)
def _misspelt(name: str, names: tuple[str, ...]) -> str | None:
    """Return the parameter that `name` is a near miss of, or None."""
    # the server passes on HTTP headers too; "X-Deadline-Ms" is not a parameter
    if name in names or name.lower().startswith("x-"):
        return None
    return next(iter(get_close_matches(name.lower(), names, n=1, cutoff=_NEAR_MISS)), None)


def _flag(options: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"the parameter {name} is {shorten(repr(value))}; send true or false")
    return value


def _positive(name: str, value: object) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # not math.isfinite, which fails on large integers
    if not is_number or not 0 < cast(float, value) <= sys.float_info.max:
        raise RequestError(
            f"the parameter {name} is {shorten(repr(value))}; send a positive number"
        )
    return float(cast(float, value))
