"""Fields of completions and chats: how tokens are chosen, and the form of answers.

Fields are in four groups: passed on to the server, read by the gateway, allowed in one value, and ignored. The one
value is OpenAI's or vLLM's default, or asks for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.answers import StreamUsage
from varlen_client.gateway.bodies import ListOf, Object, OpenAIBody, check_number_of_fields
from varlen_client.gateway.unserved_fields import GENERATION

# Kind of structured output that each field of older vLLM clients asks for.
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"}
# Field that each type of `response_format` may have; the empty one is no field.
_FORMATS: Mapping[str, Collection[str]] = {
    "text": ("",),
    "json_object": ("", "value"),
    "json_schema": ("json_schema",),
    "json": ("value",),
    "regex": ("value",),
}
MAX_REQUEST_ID_CHARACTERS = 128
# As many as the server takes.
MAX_BIASED_TOKENS = 1024

Bias: TypeAlias = Annotated[
    dict[str, float], BeforeValidator(partial(check_number_of_fields, most=MAX_BIASED_TOKENS))
]


class StreamOptions(Object):
    """Options of a stream."""

    noun = "stream_options"

    include_usage: bool | None = None
    include_obfuscation: Any = None
    """Ignored: it pads chunks against listeners who count bytes."""
    continuous_usage_stats: bool | None = None
    """vLLM's: whether each chunk has the usage of its answer so far."""


class JsonSchema(Object):
    """A JSON schema that the answer has to match."""

    model_config = ConfigDict(populate_by_name=True)

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Object):
    """The form of the answer, in OpenAI's fields or in the field `value` of TGI."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchema | None = None
    value: dict[str, Any] | str | None = None

    def structured_outputs(self) -> dict[str, Any] | None:
        """Return what the answer has to match; None is any text.

        Raises:
            InvalidRequest: this type has other fields.
        """
        fields = {"json_schema": self.json_schema, "value": self.value}
        given = " and ".join(name for name, each in fields.items() if each is not None)
        allowed = _FORMATS[self.type]
        if given not in allowed:
            raise InvalidRequest(
                f"response_format of type {self.type} has {given or 'no other field'}; allowed:"
                f" {' or '.join(name or 'no other field' for name in allowed)}"
            )
        if self.json_schema is not None:
            return {"json": self.json_schema.schema_}
        if self.value is not None:
            return {"regex" if self.type == "regex" else "json": self.value}
        return {"json_object": True} if self.type == "json_object" else None


class ServerFields(OpenAIBody):
    """Fields that are passed on; the server checks their values."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Bias | None = None
    bad_words: ListOf[str] | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    cache_salt: str | None = None

    def server_options(self) -> dict[str, Any]:
        """Return the fields that the request has, as sampling parameters."""
        given = self.model_dump(include=_PASSED_ON)
        if isinstance(self.stop, list):
            given["stop"] = [text for text in self.stop if text]
        # an empty text, list or object asks for nothing
        return {name: each for name, each in given.items() if each not in (None, "", [], {})}


class FixedFields(OpenAIBody):
    """Fields that are allowed in one value."""

    # vLLM's
    detokenize: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    watermarking: Literal[False] | None = None
    thinking_token_budget: Literal[-1] | None = None
    stream_interval: Literal[1] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None
    return_token_ids: Literal[False] | None = None
    return_token_offsets: Literal[False] | None = None
    return_mm_kwargs: Literal[True] | None = None
    routed_experts_prompt_start: Literal[0] | None = None
    priority: Literal[0] | None = None
    """vLLM runs low numbers first, and the server's `request_priority` high ones."""


class IgnoredFields(OpenAIBody):
    """Fields that change no answer."""

    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    store: Any = None
    # vLLM's
    session_id: Any = None
    guided_decoding_backend: Any = None


class SamplingBody(ServerFields, FixedFields, IgnoredFields):
    """Fields of OpenAI, and fields of vLLM and Hugging Face that the backend has too."""

    unserved = GENERATION

    n: int = Field(1, ge=1)
    best_of: int | None = None
    use_beam_search: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    request_id: str | None = Field(None, min_length=1, max_length=MAX_REQUEST_ID_CHARACTERS)

    @property
    def stream_usage(self) -> StreamUsage:
        """Chunks of a stream that have the usage."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return "none"
        return "all" if options.continuous_usage_stats else "last"

    @property
    def num_samples(self) -> int:
        """Number of samples of each prompt; the best `n` are the answer."""
        # samples of temperature 0 are equal
        return self.n if self.best_of is None or self.temperature == 0 else self.best_of

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that the request has, without `n`.

        Raises:
            InvalidRequest: two fields contradict each other, or ask for the same.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true; send both")
        self._check_best_of()
        options = self.server_options()
        if self.num_samples > self.n:
            # they are ranked by them
            options["logprobs"] = 0
        return options | self._beams() | self._structured_outputs()

    def _check_best_of(self) -> None:
        if self.best_of is None or self.best_of == self.n:
            return
        if self.best_of < self.n:
            raise InvalidRequest(f"best_of is {self.best_of}; allowed: from n, which is {self.n}")
        if self.stream:
            raise InvalidRequest(
                f"best_of is {self.best_of} with stream: true; allowed: n, which is {self.n}, as the best answers are"
                " known at the end"
            )
        if self.use_beam_search or self.num_beams not in (None, 1):
            raise InvalidRequest("the request has best_of and beams; send one")

    def _beams(self) -> dict[str, int]:
        """Return the number of beams that vLLM's flag stands for."""
        if not self.use_beam_search:
            return {}
        if self.num_beams is not None:
            raise InvalidRequest("the request has use_beam_search and num_beams; send one")
        if self.n == 1:
            raise InvalidRequest(
                "use_beam_search is True and n is 1; allowed: n from 2, which is the number of beams"
            )
        return {"num_beams": self.n}

    def _structured_outputs(self) -> dict[str, Any]:
        """Return what the answer has to match."""
        asked = {
            "response_format": self.response_format and self.response_format.structured_outputs(),
            "structured_outputs": self.structured_outputs,
        }
        given = {name: each for name, each in asked.items() if each is not None}
        for name, kind in _GUIDED.items():
            if (value := getattr(self, name)) is not None:
                given[name] = {kind: value}
        if len(given) > 1:
            raise InvalidRequest(f"the request has {' and '.join(given)}; send one")
        return {"structured_outputs": next(iter(given.values()))} if given else {}


_PASSED_ON = ServerFields.model_fields.keys() - OpenAIBody.model_fields.keys()
