"""The wire format of tasks of one step, and of operations that run no model.

Names follow exported Hugging Face models, so that existing clients work. This file uses arrays, not the server's
classes: it makes a `Draft` of tensors and parameters.

The parameter `operation` asks for `tokenize`, `detokenize` or `adapters`. The threads that tokenize make a JSON object
of each text, and these objects are the answer: one BYTES tensor, under the name of an output that the request names
(decision 0042).
"""

import json
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, lru_cache, partial
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError, shorten
from varlen.intake.checks import Intake
from varlen.intake.found import FOUND
from varlen.intake.long_texts import InputLimits, LongTextForm, LongTexts, limits_of
from varlen.intake.roles import TextRole
from varlen.intake.tokenization import Text
from varlen.parameter import LONGEST_NEAR_MISS, JsonLimits, read_json, refuse
from varlen.request.request import Draft, Output, Prompt, RequestOptions, TokenizationTask, steps_of
from varlen.request.row_parameters import (
    ROW_PARAMETERS,
    Operation,
    RowParameters,
    TruncationSide,
    reads,
)
from varlen.tasks import TASKS, Task
from varlen.wire.entities import EntityReader
from varlen.wire.outputs import SCORES, AnswerOptions, ModelOutputs, ScoredPairs

_EVERY = ("operation", "request_priority", "deadline_ms", "tenant", "cache_salt")
_PARAMETERS: Mapping[Operation, Collection[str]] = {
    "tokenize": (
        *_EVERY,
        "add_special_tokens",
        "truncate",
        "truncate_prompt_tokens",
        "truncation_side",
        "prompt_name",
        "input_type",
        "instruction",
        "prompt",
    ),
    "detokenize": (*_EVERY, "skip_special_tokens"),
    "adapters": _EVERY,
}
Tensors: TypeAlias = Mapping[str, npt.NDArray[Any]]

# Largest request, in rows, unless config.pbtxt says otherwise.
DEFAULT_MAX_ROWS = 64
# A shorter `timeout` of the server's protocol is a number in another unit: passing the request to this
# process and its response back takes about half of this.
_MIN_TIMEOUT_MICROSECONDS = 1000
# Refuses `trunc` and `deadline`, and ignores `priority` (0.67) and `request_id` (0.69).
_NEAR_MISS = 0.75
_SHORT_PARAMETERS = 256
# Each name that is not ours is compared with all that are.
_MAX_NAMES = 100
# A name of ours with so few letters is another one with any other letter: top_k and top_n.
_SHORT_NAME = 5


@dataclass(slots=True)
class TokenizerAnswer:
    """The answer to a request, which its steps write.

    Attributes:
        has_rows: whether the shape of the tensor is `[rows, 1]`; else it is `[1]`.
    """

    output: str
    has_rows: bool
    rows: list[bytes] = field(default_factory=list, init=False)
    streams: bool = field(default=False, init=False)

    @property
    def num_bytes(self) -> int:
        return sum(4 + len(row) for row in self.rows)

    def tensors(self, outputs: Sequence[tuple[int, Output]]) -> Mapping[str, npt.NDArray[Any]]:  # noqa: ARG002
        rows = np.array(self.rows, dtype=np.object_)
        return {self.output: rows[:, None] if self.has_rows else rows}


def check_operation(operation: Operation, names: Collection[str]) -> None:
    """Refuse parameters that an operation does not read.

    Args:
        operation: operation of the request; `infer` reads all but the ones of the others.
        names: names of the parameters that the request has, of ours.

    Raises:
        RequestError: one is not for the operation.
    """
    for name in names:
        if operation == "infer":
            owner = "tokenize" if name == "add_special_tokens" else "detokenize"
            if name in ("add_special_tokens", "skip_special_tokens"):
                raise RequestError(f"the parameter {name} is for the operation {owner}")
        elif name not in _PARAMETERS[operation]:
            raise RequestError(
                f"the parameter {name} is not for the operation {operation}; leave it out"
            )


def tokenizer_draft(
    texts: Sequence[str],
    given: RowParameters,
    intake: Intake,
    answer: TokenizerAnswer,
    options: RequestOptions,
) -> Draft:
    """Return the draft of a request, whose steps write the answer.

    Raises:
        RequestError: a text cannot be read, or there is no such prompt. A step raises it for token ids.
    """
    sizes = intake.limits.check_texts(texts, truncate=given.is_cut)
    role = intake.role(given.prefix)
    intake.check_length(texts, role, given.truncate_prompt_tokens)

    def run(rows: range) -> tuple[Prompt, ...]:
        part = texts[rows.start : rows.stop]
        if given.operation == "adapters":
            answer.rows += [_json({"adapters": intake.adapters})] * len(part)
        elif given.operation == "tokenize":
            answer.rows += _token_objects(part, given, intake, role, first_row=rows.start)
        else:
            skip = given.skip_special_tokens is not False
            answer.rows += [
                _text_object(row, text, intake, skip_special_tokens=skip)
                for row, text in zip(rows, part, strict=True)
            ]
        return ()

    return Draft(steps_of(sizes, run), options)


@dataclass(frozen=True, slots=True)
class ChatText:
    """Chat messages to tokenize.

    Attributes:
        read: function that returns the messages; see `Intake.chat_step`.
        variables: see `Intake.chat`.
        num_bytes: length of the messages, as a measure of the work.
    """

    read: Callable[[], Sequence[Mapping[str, Any]]]
    variables: Mapping[str, object]
    num_bytes: int


def chat_draft(
    chat: ChatText,
    given: RowParameters,
    intake: Intake,
    answer: TokenizerAnswer,
    options: RequestOptions,
) -> Draft:
    """Return the draft of a request that tokenizes chat messages; see `tokenizer_draft`."""

    def run() -> tuple[Prompt, ...]:
        text = intake.chat_text(chat.read(), chat.variables)
        intake.limits.check_texts([text])
        answer.rows += _token_objects([text], given, intake, TextRole(), special_tokens=False)
        return ()

    return Draft((TokenizationTask(chat.num_bytes, run),), options)


def _token_objects(
    texts: Sequence[str],
    given: RowParameters,
    intake: Intake,
    role: TextRole,
    *,
    special_tokens: bool = True,
    first_row: int = 0,
) -> list[bytes]:
    special_tokens = special_tokens and not role.is_looked_up
    if given.add_special_tokens is not None:
        special_tokens = given.add_special_tokens
    most = role.max_tokens or intake.limits.max_sequence_tokens
    found = intake.tokenizer.tokens_of(
        [role.prompt + text for text in texts],
        truncate=given.is_cut,
        side=given.truncation_side,
        special_tokens=special_tokens,
        max_tokens=given.truncate_prompt_tokens or most,
        max_text_bytes=intake.limits.max_text_bytes + len(role.prompt.encode()),
    )
    objects = []
    for row, each in enumerate(found, start=first_row):
        if each is None:
            intake.limits.refuse_part(row, given.truncate_prompt_tokens or most)
        objects.append(
            _json(
                {
                    "token_ids": each.token_ids,
                    "tokens": each.tokens,
                    "special": each.is_special,
                    "offsets": each.offsets,
                    "prompt": role.prompt,
                    "max_tokens": most,
                }
            )
        )
    return objects


def _text_object(row: int, text: str, intake: Intake, *, skip_special_tokens: bool) -> bytes:
    name, size = f"row {row}: text", intake.limits.vocab_size
    ids = read_json(name, text, JsonLimits(intake.limits.max_text_bytes))
    if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < size for each in ids):
        refuse(name, ids, f"a JSON list of token ids from 0 to {size - 1}")
    return _json({"text": intake.tokenizer.text_of(ids, skip_special_tokens=skip_special_tokens)})


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def read_request(
    tensors: Tensors,
    parameters: str,
    intake: Intake,
    outputs: ModelOutputs,
    *,
    requested: Collection[str],
    timeout_microseconds: int = 0,
) -> tuple[Draft, AnswerOptions | ScoredPairs | TokenizerAnswer]:
    """Return the draft of a request, and the form of its answer, or the answer.

    Keeps no reference to a tensor.

    Args:
        tensors: tensors by input name; the first dimension is rows.
        parameters: the request's parameters, a JSON object. Names that are not ours are ignored, as frontends
            add their own, unless they look like a misspelt name of ours.
        requested: names of the outputs that the client wants.
        timeout_microseconds: the field `timeout` of the server's protocol; 0 is none. The earlier of
            it and `deadline_ms` is the deadline.

    Raises:
        RequestError: the request cannot be served; the message says what came and what is allowed.
    """
    task, is_short = outputs.task, len(parameters) <= _SHORT_PARAMETERS
    read = _read_options if is_short else _read_options.__wrapped__
    given, answer, options = read(parameters, outputs, tuple(requested), timeout_microseconds)
    deadline = options.deadline_seconds
    if given.operation != "infer":
        written = TokenizerAnswer(outputs.first_of(requested), has_rows=True)
        texts = _only_texts(tensors, given, intake)
        return tokenizer_draft(texts, given, intake, written, given.options(deadline)), written
    kind = FOUND.get(task)
    if kind is not None:
        if tensors.keys() != {tensor.name for tensor in TASKS[task].inputs}:
            raise RequestError(
                f"the request has {shorten(', '.join(tensors)) or 'no inputs'}; send {kind.needs}"
            )
        given = kind.check(given)
        found = kind.of(_texts(tensors, intake, _cut_side(given, intake)), given, intake)
        return Draft(found.steps, given.options(deadline)), replace(answer, found=found)
    if given.reads_parts:
        long = _long_texts(tensors, given, intake, answer)
        checked = given.options(deadline, normalize=long.normalizes_parts)
        return Draft(long.steps, checked), replace(answer, long=long)
    if given.aggregation_strategy is not None:
        answer = replace(answer, entities=_entity_reader(tensors, given, intake))
    if task == "token_embed" and "text_pair" in tensors and "text" in tensors:
        # a side is cut as a text of its own
        side = _cut_side(given, intake)
        scored = ScoredPairs.of(_texts(tensors, intake, side), requested, given)
        return Draft(scored.steps(given, intake), replace(options, outputs=())), scored
    if task == "token_embed" and set(requested) == {SCORES}:
        raise RequestError(
            f"the request names only {SCORES}, of pairs; send the documents as text_pair, or name another output"
        )
    if "text" in tensors:
        steps = intake.text_steps(
            _texts(tensors, intake, _cut_side(given, intake)),
            truncate=given.is_cut,
            side=given.truncation_side,
            max_tokens=given.truncate_prompt_tokens,
            prefix=given.prefix,
        )
        return Draft(steps, options), answer
    if "input_ids" in tensors:
        given.prefix.check_has_texts()
        return Draft.of_prompts(_token_rows(tensors, intake), options), answer
    raise RequestError(
        f"the request has {shorten(', '.join(tensors)) or 'no inputs'}; send text, or input_ids"
    )


@lru_cache(256)
def _read_options(
    parameters: str,
    outputs: ModelOutputs,
    requested: tuple[str, ...],
    timeout_microseconds: int,
) -> tuple[RowParameters, AnswerOptions, RequestOptions]:
    """Return what a request asks for beside its inputs; clients ask for few different things."""
    further = {each.task: each.width for each in outputs.further}
    named = read_parameters(parameters, _names_of(outputs.task, tuple(further)))
    given = RowParameters.read(named, outputs.task, width=outputs.width, further=further)
    check_operation(given.operation, [name for name in ROW_PARAMETERS if name in named])
    deadline = deadline_seconds(given.deadline_ms, timeout_microseconds)
    answer = AnswerOptions.of(given, outputs, requested)
    tasks = answer.tasks(outputs)
    return given, answer, given.options(deadline, normalize=answer.vectors.normalize, outputs=tasks)


def read_parameters(
    parameters: str, names: tuple[str, ...], foreign: Container[str] = ()
) -> Mapping[str, Any]:
    """Return the parameters of a request by name.

    Args:
        parameters: a JSON object, or nothing.
        names: names of our parameters; other names stay unless they look like a misspelt name of these.
        foreign: names of other servers, which are no misspelt ones.

    Raises:
        RequestError: this is no JSON object, or too long; or it has too many names, or a misspelt one.
    """
    options = read_json("parameters", parameters) if parameters else {}
    if not isinstance(options, dict):
        refuse("parameters", options, "a JSON object")
    if len(options) > _MAX_NAMES:
        raise RequestError(
            f"the request has {len(options)} parameters; allowed: up to {_MAX_NAMES}"
        )
    for name in options:
        is_short = len(name) <= LONGEST_NEAR_MISS and name not in foreign
        if is_short and (meant := _misspelt(name, names)):
            raise RequestError(
                f'unknown parameter "{name}". Did you mean "{meant}"? Allowed: {", ".join(names)}'
            )
    return options


def deadline_seconds(deadline_ms: float | None, timeout_microseconds: int) -> float | None:
    """Return the earlier of a request's two deadlines, in seconds from now."""
    if 0 < timeout_microseconds < _MIN_TIMEOUT_MICROSECONDS:
        raise RequestError(
            f"timeout is {timeout_microseconds} microseconds; send at least {_MIN_TIMEOUT_MICROSECONDS}"
            " microseconds, or no timeout (the model's setting ignore_request_timeout ignores it)"
        )
    deadlines = [timeout_microseconds / 1e6] if timeout_microseconds else []
    if deadline_ms is not None:
        deadlines.append(deadline_ms / 1e3)
    return min(deadlines, default=None)


def _entity_reader(tensors: Tensors, given: RowParameters, intake: Intake) -> EntityReader:
    strategy = given.aggregation_strategy
    assert strategy is not None
    if tensors.keys() != {"text"}:
        raise RequestError(
            f"the request has aggregation_strategy and {shorten(', '.join(tensors)) or 'no inputs'}; entities are parts"
            " of single texts: send text alone"
        )
    if given.activation not in ("auto", "softmax"):
        raise RequestError(
            f"the request has aggregation_strategy and activation {given.activation}; the scores of entities are of"
            " softmax: leave activation out"
        )
    side = _cut_side(given, intake)
    tokens_of = partial(
        intake.tokenizer.tokens_of,
        truncate=given.is_cut,
        side=side,
        max_tokens=given.truncate_prompt_tokens or intake.limits.max_sequence_tokens,
        max_text_bytes=intake.limits.max_text_bytes,
    )
    texts = _texts_from_start(tensors, given, intake)
    return EntityReader(strategy, texts, tokens_of, intake.tokenizer.word_rules)


def _long_texts(
    tensors: Tensors, given: RowParameters, intake: Intake, answer: AnswerOptions
) -> LongTexts:
    asked = "spans" if given.spans is not None else "windows"
    if tensors.keys() != {"text"}:
        raise RequestError(
            f"the request has {asked} and {shorten(', '.join(tensors)) or 'no inputs'}; these are parts of single"
            " texts: send text alone"
        )
    if answer.further:
        raise RequestError(
            f"the request has {asked} and asks for {', '.join(answer.further)} too; name only sentence_embedding"
        )
    if given.is_cut or given.truncation_side is not None:
        raise RequestError(
            f"the request has {asked} and cuts texts; leave truncate, truncate_prompt_tokens and truncation_side out"
            " (windows: true reads all of a long text)"
        )
    texts = _strings("text", tensors["text"], limits_of(intake, windows=given.windows))
    form = LongTextForm(given.spans, given.windows, given.window_overlap, answer.vectors.normalize)
    return LongTexts(intake, texts, form, given.prefix)


def _cut_side(given: RowParameters, intake: Intake) -> TruncationSide | None:
    return intake.cut_side(given) if given.is_cut else None


@cache
def _names_of(task: Task, further: tuple[Task, ...]) -> tuple[str, ...]:
    return tuple(
        name
        for name, each in ROW_PARAMETERS.items()
        if task in each.tasks or any(reads(name, other) for other in further)
    )


def _only_texts(tensors: Tensors, given: RowParameters, intake: Intake) -> list[str]:
    operation = given.operation
    # the server wants every input that config.pbtxt requires, such as the pairs of a reranker
    if tensors.keys() - {"text_pair"} != {"text"}:
        raise RequestError(
            f"the request has {shorten(', '.join(tensors)) or 'no inputs'}; the operation {operation} reads only text"
        )
    texts = _texts_from_start(tensors, given, intake)
    if "text_pair" in tensors:
        pairs = _strings("text_pair", tensors["text_pair"], intake.limits)
        _check_rows("text_pair", len(pairs), "text", len(texts))
        for row, pair in enumerate(pairs):
            if pair:
                raise RequestError(
                    f"row {row}: text_pair is not empty; the operation {operation} reads only text"
                )
    return texts


def _texts_from_start(tensors: Tensors, given: RowParameters, intake: Intake) -> list[str]:
    """Return the texts of a request, for offsets that count from their beginnings.

    Only a part is read of a text that is cut on the right.
    """
    side = _cut_side(given, intake)
    return _strings("text", tensors["text"], intake.limits, "right" if side == "right" else None)


def _texts(tensors: Tensors, intake: Intake, cut: TruncationSide | None) -> list[Text]:
    """Return texts or pairs; of a text that is cut, the part that is read."""
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        if name in tensors:
            raise RequestError(f"the request has both text and {name}; send one or the other")
    texts = _strings("text", tensors["text"], intake.limits, cut)
    if "text_pair" not in tensors:
        return list(texts)
    pairs = _strings("text_pair", tensors["text_pair"], intake.limits, cut)
    _check_rows("text_pair", len(pairs), "text", len(texts))
    return list(zip(texts, pairs, strict=True))


def _strings(
    name: str, tensor: npt.NDArray[Any], limits: InputLimits, cut: TruncationSide | None = None
) -> list[str]:
    if tensor.ndim != 2 or tensor.shape[1] != 1:
        raise RequestError(f"{name} has shape {list(tensor.shape)}; send [rows, 1]")
    return [
        limits.decoded(row, name, bytes(element), cut) for row, element in enumerate(tensor[:, 0])
    ]


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
    # the server passes on HTTP headers too; "X-Deadline-Ms" is not a parameter
    if name in names or name.lower().startswith("x-"):
        return None
    long = [each for each in names if len(each) > _SHORT_NAME]
    same = [each for each in names if _letters(each) == _letters(name)]
    return next(iter(same or get_close_matches(name.lower(), long, n=1, cutoff=_NEAR_MISS)), None)


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
