"""The wire format of requests: tensors and parameters, and their conversion to a `Draft`.

Names follow exported Hugging Face models, so that existing clients work. This file uses arrays and
JSON, not the server's classes.
"""

import json
import sys
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError, shorten
from varlen.intake.checks import Intake
from varlen.intake.tokenization import Text, TruncationSide
from varlen.request.draft import Draft
from varlen.request.filled_masks import DEFAULT_TOP_K, check_top_k
from varlen.request.request import Prompt, RequestOptions
from varlen.request.scores import SCORE_FUNCTIONS, ScoreFunction
from varlen.request.sparse_vectors import check_max_active_dims
from varlen.request.vectors import VECTOR_DTYPES, VectorDType, VectorForm
from varlen.tasks import PROMPTED_TASKS, Task
from varlen.wire.outputs import AnswerOptions, ModelOutputs, TensorSpec

_Choice = TypeVar("_Choice")

Tensors: TypeAlias = Mapping[str, npt.NDArray[Any]]

# Largest request, in rows, unless config.pbtxt says otherwise.
DEFAULT_MAX_ROWS = 64

MAX_PRIORITY = 9

# A shorter `timeout` of the server's protocol is a number in another unit: passing the request to this
# process and its response back takes about half of this.
_MIN_TIMEOUT_MICROSECONDS = 1000

# Parameters of every task.
COMMON_PARAMETERS = ("request_priority", "deadline_ms")
# Parameters that only some tasks have.
_TASKS_OF_PARAMETER: Mapping[str, tuple[Task, ...]] = {
    "prompt_name": PROMPTED_TASKS,
    "dimensions": ("embed",),
    "output_dtype": ("embed",),
    "activation": ("classify", "rerank", "token_classify"),
    "max_active_dims": ("sparse_embed",),
    "top_k": ("fill_mask",),
}
_PARAMETERS = (
    "truncate",
    "truncation_side",
    "normalize",
    *_TASKS_OF_PARAMETER,
    *COMMON_PARAMETERS,
)
# Refuses `trunc` and `deadline`, and ignores `priority` (0.67) and `request_id` (0.69).
_NEAR_MISS = 0.75
# No name of ours is this long, nor a near miss of one.
_LONGEST_NEAR_MISS = 32
# A name of ours with so few letters is another one with any other letter: top_k and top_n.
_SHORT_NAME = 5

_PAIR_TASKS = frozenset({"classify", "rerank", "hidden", "token_classify"})
_SIDES: Mapping[str, TruncationSide] = {"right": "right", "left": "left"}
_DTYPES: Mapping[str, VectorDType] = {name: name for name in VECTOR_DTYPES}
_FUNCTIONS: Mapping[str, ScoreFunction] = {name: name for name in SCORE_FUNCTIONS}


def input_specs(task: Task) -> tuple[TensorSpec, ...]:
    """Return the inputs of a task, all optional: text or token ids."""
    texts = ("text", "text_pair") if task in _PAIR_TASKS else ("text",)
    ids = ("input_ids", "attention_mask", "token_type_ids")
    return (
        *(TensorSpec(name, "TYPE_STRING", (1,), optional=True) for name in texts),
        *(TensorSpec(name, "TYPE_INT64", (-1,), optional=True) for name in ids),
    )


def read_request(
    tensors: Tensors,
    parameters: str,
    intake: Intake,
    outputs: ModelOutputs,
    *,
    requested: Collection[str],
    timeout_microseconds: int = 0,
) -> tuple[Draft, AnswerOptions]:
    """Return the draft of these tensors and parameters, and the form of its answer.

    Keeps no reference to a tensor.

    Args:
        tensors: by input name; the first dimension is rows.
        parameters: the request's parameters, a JSON object. Names that are not ours are ignored, as frontends
            add their own, unless they look like a misspelt name of ours.
        intake: the checks of this model.
        outputs: of this model.
        requested: names of the outputs that the client wants.
        timeout_microseconds: the field `timeout` of the server's protocol; 0 is none. The earlier of
            it and `deadline_ms` is the deadline.

    Raises:
        RequestError: the request cannot be served; the message says what came and what is allowed.
    """
    options = read_parameters(parameters, _parameters_of(outputs.task))
    truncate = _flag(options, "truncate", default=False)
    side = _choice(options, "truncation_side", _SIDES, default="right")
    answer = _read_answer_options(options, outputs, requested)
    priority = read_priority(options)
    deadline = read_deadline(options, timeout_microseconds)
    checked = RequestOptions(answer.vectors.normalize, priority, deadline)
    prompt_name = _name(options, "prompt_name")
    if "text" in tensors:
        steps = intake.text_steps(
            _texts(tensors), truncate=truncate, side=side, prompt_name=prompt_name
        )
        return Draft(steps, checked), answer
    if "input_ids" in tensors:
        if prompt_name is not None:
            raise RequestError(
                "the request has prompt_name and input_ids; a prompt is put before texts: send text"
            )
        return Draft.of_prompts(_token_rows(tensors, intake), checked), answer
    raise RequestError(
        f"the request has {shorten(', '.join(tensors)) or 'no inputs'}; send text, or input_ids"
    )


def _parameters_of(task: Task) -> tuple[str, ...]:
    """Return the names of a task's parameters."""
    return tuple(name for name in _PARAMETERS if task in _TASKS_OF_PARAMETER.get(name, (task,)))


def _read_answer_options(
    options: Mapping[str, Any], outputs: ModelOutputs, requested: Collection[str]
) -> AnswerOptions:
    """Return what the parameters of a request ask of its answer."""
    for name, tasks in _TASKS_OF_PARAMETER.items():
        if name in options and outputs.task not in tasks:
            raise RequestError(
                f"the parameter {name} is for the task {' or '.join(tasks)};"
                f" this model has the task {outputs.task}"
            )
    vectors = VectorForm(
        _whole_number(options, "dimensions"),
        _flag(options, "normalize", default=outputs.normalize),
        _choice(options, "output_dtype", _DTYPES, default="float32"),
    )
    if outputs.task == "embed":
        vectors.check(outputs.width)
    functions = {"auto": outputs.labels.function, **_FUNCTIONS}
    function = _choice(options, "activation", functions, default="auto")
    most_terms = _whole_number(options, "max_active_dims")
    check_max_active_dims(most_terms, outputs.width)
    top_k = _whole_number(options, "top_k")
    if top_k is not None:
        check_top_k(top_k, outputs.width)
    return AnswerOptions(
        frozenset(requested),
        vectors,
        function,
        most_terms or outputs.max_active_dims,
        top_k or min(DEFAULT_TOP_K, outputs.width),
    )


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
    long = [each for each in names if len(each) > _SHORT_NAME]
    same = [each for each in names if _letters(each) == _letters(name)]
    return next(iter(same or get_close_matches(name.lower(), long, n=1, cutoff=_NEAR_MISS)), None)


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _flag(options: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"the parameter {name} is {shorten(repr(value))}; send true or false")
    return value


def _whole_number(options: Mapping[str, Any], name: str) -> int | None:
    value = options.get(name)
    if name in options and (not isinstance(value, int) or isinstance(value, bool)):
        raise RequestError(f"the parameter {name} is {shorten(repr(value))}; send a whole number")
    return value


def _name(options: Mapping[str, Any], name: str) -> str | None:
    value = options.get(name)
    if name in options and not isinstance(value, str):
        raise RequestError(f"the parameter {name} is {shorten(repr(value))}; send a string")
    return value


def _choice(
    options: Mapping[str, Any], name: str, choices: Mapping[str, _Choice], *, default: str
) -> _Choice:
    value = options.get(name, default)
    if not isinstance(value, str) or value not in choices:
        raise RequestError(
            f"the parameter {name} is {shorten(repr(value))}; send {', '.join(choices)}"
        )
    return choices[value]


def _positive(name: str, value: object) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # not math.isfinite, which fails on large integers
    if not is_number or not 0 < cast(float, value) <= sys.float_info.max:
        raise RequestError(
            f"the parameter {name} is {shorten(repr(value))}; send a positive number"
        )
    return float(cast(float, value))
