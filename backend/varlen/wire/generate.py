"""The wire format of `generate` and `translate`: one prompt, text whole or in parts.

Uses the names, types and defaults of NVIDIA's vLLM backend, so its clients work unchanged. Token ids as
prompt and answer, and chat messages, are added to them. This file uses arrays and JSON, not the server's classes.

Source: src/utils/request.py of triton-inference-server/vllm_backend.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen.decoding.text.writer import TokenBytes
from varlen.errors import RequestError, shorten
from varlen.intake.checks import Intake
from varlen.parameter import OPTION_JSON, JsonLimits, check_bytes, items_of, read_json, refuse
from varlen.request.generation import OPTION_NAMES, PARAMETER_NAMES, GenerationOptions
from varlen.request.request import (
    Draft,
    GeneratedPart,
    Output,
    Request,
    TokenizationTask,
    TokenLogprobs,
)
from varlen.request.row_parameters import COMMON_PARAMETERS, ROW_PARAMETERS, RowParameters
from varlen.tasks import TASKS
from varlen.wire.rows import (
    ChatText,
    Tensors,
    TokenizerAnswer,
    chat_draft,
    check_operation,
    deadline_seconds,
    read_parameters,
    tokenizer_draft,
)

PROMPTS = ("text_input", "input_ids", "messages")
_TEMPLATE_KWARGS = "chat_template_kwargs"
_MAX_TEMPLATE_CHARACTERS = 65_536
_MAX_TEMPLATE_DEPTH = 16
# Outputs beside the text. The input `return_` and its name asks for one.
_OPTIONAL_OUTPUTS = tuple(tensor.name for tensor in TASKS["generate"].outputs[1:])

# The finish reason of a row that goes on, as the vLLM backend writes it.
_UNFINISHED = "None"
# JSON has no infinity.
_LOWEST_LOGPROB = -9999.0
_LOWEST_SCORE = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True)
class ResponseSpec:
    """What the responses to a request hold.

    Attributes:
        stream: whether parts of the answer are sent as they come.
        prefix: text that each row begins with: the prompt, or nothing.
        returns: names of the outputs to send beside `text_output`.
    """

    rows: int
    stream: bool = False
    prefix: str = ""
    returns: frozenset[str] = frozenset()


def read_generate_request(
    tensors: Tensors,
    parameters: str,
    intake: Intake,
    *,
    decoupled: bool,
    read_options: Callable[
        [Mapping[str, object]], GenerationOptions
    ] = GenerationOptions.from_parameters,
    timeout_microseconds: int = 0,
) -> tuple[Draft, ResponseSpec | TokenizerAnswer]:
    """Return the draft of a request, and what its responses hold; see `rows.read_request`.

    Args:
        tensors: tensors by input name; without a dimension of rows.
        parameters: the request's parameters, a JSON object. Options of the input `sampling_parameters` come before
            them; parameters that every task has come in one of both. Names that no server has for generation are
            ignored here, as frontends add their own, and refused there.
        decoupled: whether the model may send several responses to a request.
        read_options: returns checked options, with the defaults of the model.

    Raises:
        RequestError: the request cannot be served; the message says what came and what is allowed.
    """
    stream = _flag(tensors, "stream")
    if stream and not decoupled:
        raise RequestError(
            "stream is true, but this model sends one response per request; send false, or set"
            " model_transaction_policy { decoupled: true } in config.pbtxt"
        )
    names = (*COMMON_PARAMETERS, _TEMPLATE_KWARGS, *OPTION_NAMES)
    named = read_parameters(parameters, names, PARAMETER_NAMES)
    ours = PARAMETER_NAMES.union(names)
    options = {name: value for name, value in named.items() if name in ours}
    sampling = _sampling_parameters(tensors)
    if twice := [name for name in COMMON_PARAMETERS if name in options and name in sampling]:
        # a proxy that sets one of them has the last word
        raise RequestError(
            f"{twice[0]} is a parameter of the request and in sampling_parameters; send it once"
        )
    options |= sampling
    variables = _template_variables(options.pop(_TEMPLATE_KWARGS, None), tensors)
    if options.get("operation", "infer") != "infer":
        return _read_operation(tensors, options, variables, intake, timeout_microseconds)
    check_operation("infer", [name for name in COMMON_PARAMETERS if name in options])
    common = RowParameters.read(
        {name: options.pop(name) for name in COMMON_PARAMETERS if name in options}, "generate"
    )
    generation = read_options(options)
    returns = frozenset(name for name in _OPTIONAL_OUTPUTS if _flag(tensors, f"return_{name}"))
    step = _prompt_step(tensors, intake, variables)
    if generation.is_search or intake.reads_sources:
        _check_returns(
            returns, {"cumulative_logprob", "logprobs"}, "score is that of a beam search"
        )
    else:
        _check_returns(returns, {"score"}, "only a beam search has it")
        if generation.logprobs is None and returns & {"cumulative_logprob", "logprobs"}:
            generation = replace(generation, logprobs=0)
    draft = Draft(
        (step,),
        common.options(
            deadline_seconds(common.deadline_ms, timeout_microseconds),
            generation=generation,
            streams=stream,
        ),
    )
    prefix = _prefix(tensors, stream, intake)
    return draft, ResponseSpec(generation.n, stream, prefix, returns)


def _read_operation(
    tensors: Tensors,
    options: Mapping[str, Any],
    variables: Mapping[str, object],
    intake: Intake,
    timeout_microseconds: int,
) -> tuple[Draft, TokenizerAnswer]:
    """Return the draft and the answer of a request that runs no model."""
    operation = options["operation"]
    ROW_PARAMETERS["operation"].check("operation", operation)
    check_operation(operation, options)
    given = RowParameters.read(options, "generate")
    prompts = ("text_input", "messages") if operation == "tokenize" else ("text_input",)
    names = tensors.keys() - {"sampling_parameters"}
    if names not in [{name} for name in prompts]:
        raise RequestError(
            f"the request has {shorten(', '.join(sorted(names))) or 'no prompt'}; the operation {operation} reads only"
            f" {' or '.join(prompts)}"
        )
    deadline = deadline_seconds(given.deadline_ms, timeout_microseconds)
    checked = given.options(deadline)
    answer = TokenizerAnswer("text_output", has_rows=False)
    if "messages" in tensors:
        chat = _chat(tensors, variables, intake)
        return chat_draft(chat, given, intake, answer, checked), answer
    text = _text_input(tensors, intake)
    return tokenizer_draft([text], given, intake, answer, checked), answer


@dataclass(slots=True)
class _Row:
    finish_reason: str = _UNFINISHED
    cumulative_logprob: float = 0.0
    score: float = 0.0


@dataclass(slots=True)
class GeneratedAnswer:
    """Makes the responses to a request out of the parts of its answer.

    Attributes:
        num_input_tokens: length of the prompt, or of the source text, in tokens.
        token_text: returns the text of a token id, for log probabilities.
        token_bytes: returns the UTF-8 that a token id would add to the text, for those that were not chosen.
    """

    spec: ResponseSpec
    num_input_tokens: int
    token_text: Callable[[int], str]
    token_bytes: Callable[[int], bytes]
    _rows: list[_Row] = field(init=False)
    _prefix: str = field(init=False)

    @classmethod
    def to(
        cls,
        request: Request,
        spec: ResponseSpec,
        token_text: Callable[[int], str],
        token_bytes: TokenBytes,
    ) -> GeneratedAnswer:
        (prompt,) = request.prompts
        options = request.options.generation
        assert options is not None
        return cls(
            spec,
            prompt.num_source_tokens or prompt.num_tokens,
            token_text,
            partial(token_bytes.of, skip_special_tokens=options.skip_special_tokens),
        )

    def __post_init__(self) -> None:
        self._rows = [_Row() for _ in range(self.spec.rows)]
        self._prefix = self.spec.prefix

    @property
    def streams(self) -> bool:
        return self.spec.stream

    @property
    def num_bytes(self) -> int:
        """0: the length of a generated answer is not known before it runs."""
        return 0

    def tensors(self, outputs: Sequence[tuple[int, Output]]) -> dict[str, npt.NDArray[Any]]:
        """Return the outputs of a response by name, given all parts since the last response.

        Text, log probabilities, token ids and their numbers come from these parts. Cumulative log probabilities and
        finish reasons cover the rows up to now. `output_ids` holds the rows one after another.
        """
        parts: list[list[GeneratedPart]] = [[] for _ in self._rows]
        for row, part in outputs:
            assert isinstance(part, GeneratedPart)
            parts[row].append(part)
            self._rows[row].finish_reason = part.finish_reason or self._rows[row].finish_reason
            if part.score is not None:
                # a search that finds too few answers gives the others -inf
                self._rows[row].score = max(part.score, _LOWEST_SCORE)
            self._rows[row].cumulative_logprob += sum(token.logprob for token in part.logprobs)
        texts = [self._prefix + "".join(part.text for part in each) for each in parts]
        self._prefix = ""
        named = {name: self._output(name, parts) for name in self.spec.returns}
        return {"text_output": _strings(texts), **named}

    def _output(self, name: str, parts: Sequence[Sequence[GeneratedPart]]) -> npt.NDArray[Any]:
        tokens = [[token_id for part in row for token_id in part.token_ids] for row in parts]
        if name == "finish_reason":
            return _strings([row.finish_reason for row in self._rows])
        if name in ("cumulative_logprob", "score"):
            return np.array([getattr(row, name) for row in self._rows], dtype=np.float32)
        if name == "logprobs":
            return _strings([self._logprobs(row) for row in parts])
        if name == "num_input_tokens":
            return np.array([self.num_input_tokens], dtype=np.uint32)
        if name == "num_output_tokens":
            return np.array([len(row) for row in tokens], dtype=np.uint32)
        assert name == "output_ids"
        return np.array([token_id for row in tokens for token_id in row], dtype=np.int64)

    def _logprobs(self, parts: Sequence[GeneratedPart]) -> str:
        """Return a JSON list: per token, the most likely tokens and the chosen one."""
        # token by token: one call for all would keep the other threads from running for as long as it takes
        tokens = (token for part in parts for token in part.logprobs)
        return f"[{', '.join(json.dumps(self._token_object(token)) for token in tokens)}]"

    def _token_object(self, token: TokenLogprobs) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for rank, (token_id, logprob) in enumerate(token.top, start=1):
            found[token_id] = self._entry(token, token_id, logprob, rank)
        if token.token_id not in found:
            found[token.token_id] = self._entry(token, token.token_id, token.logprob, None)
        return found

    def _entry(
        self, chosen: TokenLogprobs, token_id: int, logprob: float, rank: int | None
    ) -> dict[str, Any]:
        is_chosen = token_id == chosen.token_id
        return {
            "logprob": max(logprob, _LOWEST_LOGPROB),
            "rank": rank,
            "decoded_token": self.token_text(token_id),
            "bytes": [*(chosen.token_bytes if is_chosen else self.token_bytes(token_id))],
        }


def _check_returns(returns: frozenset[str], wrong: set[str], reason: str) -> None:
    if found := sorted(returns & wrong):
        raise RequestError(f"return_{found[0]} is true; {reason}")


def _prompt_step(
    tensors: Tensors, intake: Intake, variables: Mapping[str, object]
) -> TokenizationTask:
    given = [name for name in PROMPTS if name in tensors]
    if len(given) != 1:
        raise RequestError(
            f"the request has {' and '.join(given) or 'no prompt'}; send one of {', '.join(PROMPTS)}"
        )
    if "input_ids" in tensors:
        ids = tensors["input_ids"]
        if ids.ndim != 1:
            raise RequestError(f"input_ids has shape {list(ids.shape)}; send [tokens]")
        prompts = intake.token_ids([ids.astype(np.int64, copy=False)])
        return TokenizationTask(0, lambda: prompts)
    if "messages" in tensors:
        chat = _chat(tensors, variables, intake)
        return intake.chat_step(chat.read, chat.num_bytes, variables)
    (step,) = intake.text_steps([_text_input(tensors, intake)], truncate=False)
    return step


def _prefix(tensors: Tensors, stream: bool, intake: Intake) -> str:
    """Return the text that the answer begins with, by default the prompt unless streamed.

    A translation never starts with its source text.
    """
    can_include = "text_input" in tensors and not stream and not intake.reads_sources
    if _flag(tensors, "exclude_input_in_output", default=not can_include):
        return ""
    if not can_include:
        raise RequestError(
            "exclude_input_in_output is false; only a request with text_input, without stream, to a model that"
            " continues text gets its input back"
        )
    return _text_input(tensors, intake)


def _text_input(tensors: Tensors, intake: Intake) -> str:
    text = _bytes("text_input", tensors)
    intake.limits.check_text_bytes(0, len(text))
    return _decoded("text_input", text)


def _chat(tensors: Tensors, variables: Mapping[str, object], intake: Intake) -> ChatText:
    text, limits = _bytes("messages", tensors), intake.limits.messages
    check_bytes("messages", len(text), limits.max_bytes)
    return ChatText(partial(_read_messages, text, limits), variables, len(text))


def _read_messages(text: bytes, limits: JsonLimits) -> list[Mapping[str, Any]]:
    messages = read_json("messages", _decoded("messages", text), limits)
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        refuse("messages", messages, "a JSON list of objects with role and content")
    return messages


def _template_variables(value: object, tensors: Tensors) -> Mapping[str, object]:
    if value is None:
        return {}
    if "messages" not in tensors:
        raise RequestError(f"the request has {_TEMPLATE_KWARGS} without messages; send messages")
    if isinstance(value, str):
        _check_template_size(len(value))
        value = read_json(_TEMPLATE_KWARGS, value)
    if not isinstance(value, dict):
        refuse(_TEMPLATE_KWARGS, value, ROW_PARAMETERS[_TEMPLATE_KWARGS].allowed)
    level: list[object] = [value]
    for _ in range(_MAX_TEMPLATE_DEPTH):
        level = [inner for each in level for inner in items_of(each)]
    if level:
        raise RequestError(
            f"{_TEMPLATE_KWARGS} is nested more than {_MAX_TEMPLATE_DEPTH} deep; send a flatter object"
        )
    _check_template_size(len(json.dumps(value, ensure_ascii=False)))
    return value


def _check_template_size(characters: int) -> None:
    if characters > _MAX_TEMPLATE_CHARACTERS:
        raise RequestError(
            f"{_TEMPLATE_KWARGS} has {characters} characters; allowed: up to {_MAX_TEMPLATE_CHARACTERS}"
        )


def _sampling_parameters(tensors: Tensors) -> Mapping[str, Any]:
    if "sampling_parameters" not in tensors:
        return {}
    text = _bytes("sampling_parameters", tensors)
    # before it is decoded
    check_bytes("sampling_parameters", len(text), OPTION_JSON.max_bytes)
    sampling = read_json("sampling_parameters", _decoded("sampling_parameters", text))
    if not isinstance(sampling, dict):
        refuse("sampling_parameters", sampling, "a JSON object")
    return sampling


def _bytes(name: str, tensors: Tensors) -> bytes:
    return bytes(_only(name, tensors))


def _decoded(name: str, text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 at byte {error.start}; send UTF-8") from None


def _flag(tensors: Tensors, name: str, *, default: bool = False) -> bool:
    return bool(_only(name, tensors)) if name in tensors else default


def _only(name: str, tensors: Tensors) -> Any:
    tensor = tensors[name]
    if tensor.shape != (1,):
        raise RequestError(f"{name} has shape {list(tensor.shape)}; send [1]")
    return tensor[0]


def _strings(texts: Sequence[str]) -> npt.NDArray[np.object_]:
    return np.array([text.encode() for text in texts], dtype=np.object_)
