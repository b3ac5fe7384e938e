"""Generation on the wire: a prompt with sampling parameters, and its answer or translations.

A prompt is a text, token ids, or chat messages. Names and meanings of sampling parameters are the server's, which
follow vLLM, and the server checks them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from varlen_client.errors import InvalidRequest, ServerError
from varlen_client.wire import Tensor, TokenIds

FinishReason: TypeAlias = Literal["stop", "length"]
Messages: TypeAlias = Sequence[Mapping[str, Any]]
GenerationPrompt: TypeAlias = str | TokenIds | Messages

# The outputs of one response by name, each with one value per element.
Response: TypeAlias = Mapping[str, Sequence[Any]]

# Names of the number of answers in the sampling parameters.
_COUNTS = ("n", "num_return_sequences")
# Options of calls among them, whose default is None; and names that differ in the protocol.
_CALL_OPTIONS = ("deadline_ms", "priority", "adapter")
_WIRE_NAMES = {"priority": "request_priority"}
_LARGEST_ID = 2**63 - 1
_RETURNED = ("finish_reason", "num_input_tokens", "num_output_tokens", "output_ids")


@dataclass(frozen=True, slots=True)
class GeneratedPart:
    """A part of a generated answer.

    Attributes:
        text: the next part of the text; it may be empty.
        token_ids: its tokens.
        finish_reason: reason of the end, set in the last part: a stop condition held, or `max_tokens` was reached.
        logprobs: log probabilities, by token, of the most likely tokens and the chosen one; empty without the
            sampling parameter `logprobs`.
        token_texts: texts, by token, of the tokens in `logprobs`, each by itself.
        token_bytes: UTF-8, by token, that these tokens add to the text, perhaps a part of a character; empty from
            an older server.
        num_prompt_tokens: length of the prompt, in tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[Mapping[int, float], ...] = ()
    token_texts: tuple[Mapping[int, str], ...] = ()
    num_prompt_tokens: int = 0
    token_bytes: tuple[Mapping[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A generated answer.

    Attributes:
        token_ids, finish_reason, logprobs, token_texts, num_prompt_tokens, token_bytes: fields of `GeneratedPart`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    logprobs: tuple[Mapping[int, float], ...] = ()
    token_texts: tuple[Mapping[int, str], ...] = ()
    token_bytes: tuple[Mapping[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Translation:
    """The best translation of a text, and the next best ones.

    Attributes:
        score: sum of the log probabilities of its tokens, divided by the length penalty.
        finish_reason: whether the translation ended, or `max_tokens` was reached.
        alternatives: the next best translations, best first; without alternatives of their own. There are fewer than
            asked for if the options leave fewer.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    alternatives: tuple[Translation, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request for an answer.

    Attributes:
        prompt: the input's name, and its text, token ids or JSON.
        sampling: sampling parameters, priority and deadline.
        stream: whether the answer comes in parts.
        returns_score: whether the answer has scores, which only a beam search has.
    """

    prompt: tuple[Literal["text_input", "input_ids", "messages"], str | list[int]]
    sampling: Mapping[str, Any]
    stream: bool
    returns_score: bool = False

    @property
    def rows(self) -> int:
        """Number of samples."""
        return int(self.sampling.get("n", 1))

    def values(self) -> dict[str, str | bool | list[int]]:
        """Return the inputs by name, in the form of the HTTP endpoints `generate` and `generate_stream`."""
        name, prompt = self.prompt
        returned = (*_RETURNED, "score") if self.returns_score else _RETURNED
        flags = {f"return_{output}": True for output in returned}
        return {
            name: prompt,
            "sampling_parameters": json.dumps(self.sampling),
            "stream": self.stream,
            "exclude_input_in_output": True,
            **flags,
            "return_logprobs": self.sampling.get("logprobs") is not None,
        }

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the inputs as tensors."""
        return tuple(_tensor(name, value) for name, value in self.values().items())


@dataclass(frozen=True, slots=True)
class OperationRequest(GenerateRequest):
    """A request to a model that generates, for its tokenizer only."""

    def values(self) -> dict[str, str | bool | list[int]]:
        """Return the inputs by name."""
        name, prompt = self.prompt
        return {name: prompt, "sampling_parameters": json.dumps(self.sampling)}


def generate_request(
    prompt: GenerationPrompt,
    sampling: Mapping[str, Any],
    *,
    stream: bool,
    returns_score: bool = False,
) -> GenerateRequest:
    """Return a request whose prompt has a known form.

    Raises:
        InvalidRequest: the prompt is no text, token ids or messages, or JSON has no form for a sampling parameter.
    """
    options = {
        _WIRE_NAMES.get(name, name): value
        for name, value in sampling.items()
        if value is not None or name not in _CALL_OPTIONS
    }
    json_text("the sampling parameters", options)
    return GenerateRequest(_prompt(prompt), options, stream, returns_score)


def json_text(name: str, value: object) -> str:
    """Return a value as JSON.

    Raises:
        InvalidRequest: JSON has no form for it, or it has too many levels; the message names it.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} are no JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest(f"{name} have too many levels of objects and lists") from None


def read_parts(response: Response, rows: int) -> list[GeneratedPart]:
    """Return the part of each row in a response.

    Raises:
        ServerError: the response lacks an output, or an output lacks a row.
    """
    try:
        ids = [int(token_id) for token_id in response["output_ids"]]
        counts = [int(count) for count in response["num_output_tokens"]]
        texts, reasons = response["text_output"], response["finish_reason"]
        logprobs = response.get("logprobs", ["[]"] * rows)
        num_prompt_tokens = int(response.get("num_input_tokens", [0])[0])
        assert all(len(each) == rows for each in (texts, reasons, counts, logprobs))
        assert sum(counts) == len(ids)
        ends = np.cumsum(counts).tolist()
        return [
            GeneratedPart(
                texts[row],
                tuple(ids[ends[row] - counts[row] : ends[row]]),
                _finish_reason(reasons[row]),
                num_prompt_tokens=num_prompt_tokens,
                **_logprobs(logprobs[row]),
            )
            for row in range(rows)
        ]
    except (KeyError, ValueError, TypeError, AttributeError, AssertionError) as error:
        raise ServerError(f"the response cannot be read: {error!r}") from error


def read_generations(responses: Sequence[Response], rows: int) -> list[Generation]:
    """Return the answer of each row, given all responses to a request.

    Raises:
        ServerError: a response cannot be read, or a row has no end.
    """
    by_response = [read_parts(response, rows) for response in responses]
    answers = []
    for row in range(rows):
        parts = [each[row] for each in by_response]
        reason = parts[-1].finish_reason if parts else None
        if reason is None:
            raise ServerError("the server ended an answer before its last part")
        answers.append(
            Generation(
                "".join(part.text for part in parts),
                tuple(token_id for part in parts for token_id in part.token_ids),
                reason,
                parts[0].num_prompt_tokens,
                tuple(entry for part in parts for entry in part.logprobs),
                tuple(entry for part in parts for entry in part.token_texts),
                tuple(entry for part in parts for entry in part.token_bytes),
            )
        )
    return answers


def search_options(
    options: Mapping[str, Any], *, num_beams: int | None, n_best: int, max_tokens: int | None
) -> dict[str, Any]:
    """Return the sampling parameters of a translation.

    Raises:
        InvalidRequest: n_best is no number from 1, or another option has the number of answers too.
    """
    if not isinstance(n_best, int) or n_best < 1:
        raise InvalidRequest(f"n_best is {n_best!r}; allowed: whole numbers from 1")
    if given := [name for name in _COUNTS if name in options]:
        raise InvalidRequest(f"{given[0]} is {options[given[0]]!r}; n_best is this number here")
    limits = {"num_beams": num_beams, "max_tokens": max_tokens}
    return {
        **options,
        **{name: value for name, value in limits.items() if value is not None},
        "n": n_best,
    }


def read_translation(responses: Sequence[Response], n_best: int) -> Translation:
    """Return the translation of a text, given all responses to its request.

    Raises:
        ServerError: a response cannot be read, or a translation has no end.
    """
    answers = read_generations(responses, n_best)
    try:
        scores = [float(score) for score in responses[-1]["score"]]
        best, *others = [
            Translation(each.text, each.token_ids, score, each.finish_reason)
            for each, score in zip(answers, scores, strict=True)
        ]
    except (KeyError, ValueError, TypeError) as error:
        raise ServerError(f"the response cannot be read: {error!r}") from error
    # where the search found no more, the server sends answers without tokens that have no end
    found = (each for each in others if each.token_ids or each.finish_reason == "stop")
    return replace(best, alternatives=tuple(found))


def _prompt(
    prompt: GenerationPrompt,
) -> tuple[Literal["text_input", "input_ids", "messages"], str | list[int]]:
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("the prompt is not valid Unicode") from None
        return "text_input", prompt
    if len(prompt) and all(isinstance(each, Mapping) for each in prompt):
        messages = [dict(cast(Mapping[str, Any], each)) for each in prompt]
        return "messages", json_text("the messages", messages)
    ids = np.asarray(prompt)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise InvalidRequest("the prompt is neither a text, nor a list of token ids or messages")
    if ids.min() < 0 or ids.max() > _LARGEST_ID:
        raise InvalidRequest(f"the prompt has token ids outside of 0 to {_LARGEST_ID}")
    return "input_ids", ids.tolist()


def _tensor(name: str, value: str | bool | list[int]) -> Tensor:
    if isinstance(value, str):
        return Tensor(name, "BYTES", np.array([value.encode()], dtype=np.object_))
    if isinstance(value, bool):
        return Tensor(name, "BOOL", np.array([value]))
    return Tensor(name, "INT64", np.array(value, dtype=np.int64))


def _finish_reason(reason: str) -> FinishReason | None:
    # how the vLLM backend, and ours, write that a row goes on
    if reason == "None":
        return None
    if reason not in ("stop", "length"):
        raise ValueError(f"the finish reason {reason!r}")
    return cast(FinishReason, reason)


def _logprobs(text: str) -> dict[str, Any]:
    """Return the fields of `GeneratedPart` about the reported tokens, each by token."""
    tokens = [
        {int(token_id): entry for token_id, entry in token.items()} for token in json.loads(text)
    ]
    has_bytes = all("bytes" in entry for token in tokens for entry in token.values())

    def of_each(read: Callable[[Mapping[str, Any]], Any]) -> tuple[dict[int, Any], ...]:
        return tuple({each: read(entry) for each, entry in token.items()} for token in tokens)

    return {
        "logprobs": of_each(lambda entry: float(entry["logprob"])),
        "token_texts": of_each(lambda entry: str(entry.get("decoded_token", ""))),
        "token_bytes": of_each(lambda entry: bytes(entry["bytes"])) if has_bytes else (),
    }
