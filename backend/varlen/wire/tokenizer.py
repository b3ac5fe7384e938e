"""The wire format of `tokenize`, `detokenize` and `adapters`, which run no model.

The parameter `operation` asks for one of them. The threads that tokenize make a JSON object of each text, and these
objects are the answer: one BYTES tensor, under the name of an output that the request names (decision 0042).
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.errors import RequestError
from varlen.intake.checks import Intake
from varlen.intake.roles import TextRole
from varlen.parameter import JsonLimits, read_json, refuse
from varlen.request.request import Draft, Output, Prompt, RequestOptions, TokenizationTask, steps_of
from varlen.request.row_parameters import Operation, RowParameters

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
