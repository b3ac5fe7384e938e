"""Fields of completions and chats: how tokens are chosen, and the form of answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import OpenAIBody

# The server checks the values of these.
_SAMPLING = {
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
}


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class JsonSchema(BaseModel):
    """A JSON schema that the answer has to match."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form of the answer."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingBody(OpenAIBody):
    """OpenAI's fields, and fields of vLLM that the backend has too."""

    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: ResponseFormat | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    service_tier: str | None = None
    """Ignored."""
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    """Not supported; it may be empty."""

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that the request has, without `n`."""
        given: dict[str, Any] = self.model_dump(include=_SAMPLING, exclude_none=True)
        if self.stop:
            given["stop"] = self.stop
        grammar = self._grammar()
        return given if grammar is None else {**given, "structured_outputs": grammar}

    def _grammar(self) -> dict[str, Any] | None:
        form = self.response_format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return {"json_object": True}
        if form.json_schema is None:
            raise InvalidRequest("response_format of type json_schema needs json_schema")
        return {"json": form.json_schema.schema_}
