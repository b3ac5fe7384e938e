"""`/v1/extract`, the interface of NeMo Guardrails' GLiNER server: spans of a text with labels.

Source: the fields of `nemoguardrails.library.gliner.models` in the documentation of NeMo Guardrails.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, StrictStr
from starlette.responses import Response

from varlen_client.gateway.bodies import ListOf, RequestBody, TextFields, given_options
from varlen_client.gateway.json_writing import Rows, json_response
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.unserved_fields import TEXTS
from varlen_client.row_answers import Span
from varlen_client.tasks import EXTRACT


class ExtractBody(RequestBody, TextFields):
    """A request to `/v1/extract`."""

    unserved = TEXTS

    text: StrictStr
    labels: ListOf[StrictStr] = Field(min_length=1)
    threshold: float = Field(default=0.5, ge=0, le=1)
    flat_ner: bool = False
    multi_label: bool = False
    chunk_length: int | None = None
    """Ignored: a text is read as a whole, and one that the model does not take is refused."""
    overlap: int | None = None
    """Ignored, as `chunk_length`."""


async def extract(gateway: Gateway, body: ExtractBody) -> Response:
    """Find the spans of a text that have one of the labels."""
    options: dict[str, Any] = given_options(
        labels=body.labels,
        threshold=body.threshold,
        flat_ner=body.flat_ner,
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
