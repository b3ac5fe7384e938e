"""`/v1/extract` answers in the form of NeMo Guardrails' GLiNER server."""

import pytest

from varlen_client.gateway.embeddings import tagged
from varlen_client.tasks.extraction import Span

BODY = {"model": "embedder", "text": "Ada", "labels": ["person"]}


def test_spans_have_the_names_of_nemo_guardrails(post, calls):
    found = post("/v1/extract", **BODY, threshold=0.25, chunk_length=384, overlap=128)

    [entity] = found["entities"]
    assert entity == {
        "value": "Ada",
        "suggested_label": "person",
        "start_position": 0,
        "end_position": 3,
        "score": 0.5,
    }
    assert found["total_entities"] == 1
    assert found["tagged_text"] == "[Ada](person)"
    [(model, method, rows, options)] = calls.received
    assert (model, method, rows) == ("embedder", "extract", ["Ada"])
    assert options["labels"] == ["person"]
    assert options["threshold"] == 0.25
    assert options["flat_ner"] is False


def test_a_schema_is_sent_and_its_answer_is_the_result(post, calls):
    body = {"model": "embedder", "text": "Ada", "schema": {"entities": ["person"]}}

    assert post("/v1/extract", **body) == {"result": {"entities": {}}}

    [(_, method, _, options)] = calls.received
    assert method == "extract_schema"
    assert options["schema"] == body["schema"]
    assert "flat_ner" not in options


@pytest.mark.parametrize(
    "wrong", [{"labels": []}, {"labels": None}, {"threshold": 2}, {"schema": {"entities": ["a"]}}]
)
def test_a_wrong_body_is_refused(send, wrong):
    assert send("POST", "/v1/extract", {**BODY, **wrong}).status_code in (400, 422)


def test_of_spans_that_overlap_the_first_is_tagged():
    spans = [Span(0, 3, "Ada", "a", 0.9), Span(2, 5, "a L", "b", 0.9), Span(6, 7, "e", "c", 0.5)]

    assert tagged("Ada Lee", spans) == "[Ada](a) Le[e](c)"
