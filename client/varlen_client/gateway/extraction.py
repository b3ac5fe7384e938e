"""`/v1/extract` of NeMo Guardrails' GLiNER server: spans with labels, or a schema's answer.

Source: the fields of `nemoguardrails.library.gliner.models` in the documentation of NeMo Guardrails. `schema` and its
answer follow the library gliner2.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, StrictStr
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import ListOf, RequestBody, TextFields, given_options
from varlen_client.gateway.json_writing import Rows, json_response
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.unserved_fields import TEXTS
from varlen_client.tasks.extraction import EXTRACT, EXTRACT_SCHEMA, Span


class ExtractBody(RequestBody, TextFields):
    """A request to `/v1/extract`."""

    unserved = TEXTS

    text: StrictStr
    labels: ListOf[StrictStr] | None = Field(default=None, min_length=1)
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    threshold: float = Field(default=0.5, ge=0, le=1)
    flat_ner: bool | None = None
    """By default false with labels, as there, and true with a schema."""
    multi_label: bool = False
    chunk_length: int | None = None
    """Ignored: a text is read as a whole, and one that the model does not take is refused."""
    overlap: int | None = None
    """Ignored, as `chunk_length`."""


async def extract(gateway: Gateway, body: ExtractBody) -> Response:
    """Find the spans of a text with one of the labels, or answer a schema."""
    if (body.labels is None) == (body.schema_ is None):
        raise InvalidRequest("the body has to have labels or schema, and not both")
    if body.schema_ is not None:
        asked = given_options(schema=body.schema_, threshold=body.threshold, flat_ner=body.flat_ner)
        _, found, _ = await gateway.answer(
            body.model, EXTRACT_SCHEMA, [body.text], text_fields=body, **asked
        )
        return json_response({"result": found[0]})
    options: dict[str, Any] = given_options(
        labels=body.labels,
        threshold=body.threshold,
        flat_ner=bool(body.flat_ner),
        multi_label=body.multi_label,
    )
    _, rows, _ = await gateway.answer(body.model, EXTRACT, [body.text], text_fields=body, **options)
    entities = (
        {
            "value": each.text,
            "suggested_label": each.label,
            "start_position": each.start,
            "end_position": each.end,
            "score": each.score,
        }
        for each in rows[0]
    )
    answer = {
        "entities": Rows(entities),
        "total_entities": len(rows[0]),
        "tagged_text": tagged(body.text, rows[0]),
    }
    return json_response(answer)


def tagged(text: str, spans: list[Span]) -> str:
    """Return a text with its spans as `[text](label)`; of spans that overlap, the first."""
    parts, end = [], 0
    for each in spans:
        if each.start >= end:
            parts += [text[end : each.start], f"[{each.text}]({each.label})"]
            end = each.end
    return "".join([*parts, text[end:]])
