"""Requests for spans on the wire: the parameter `labels`, and the tensors of an answer."""

import json

import numpy as np
import pytest

from tests.gliner_models import save_gliner
from varlen import Encoder
from varlen.request.request import Request
from varlen.server.kinds import Rows

from ..refusals import refused_request

OUTPUTS = ("starts", "ends", "spans", "span_labels", "scores", "num_spans", "num_tokens")
TEXTS = ["the cat sat, on the river", ""]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Return an encoder of a random model."""
    folder = save_gliner(tmp_path_factory.mktemp("wire") / "model")
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        yield encoder


def read(encoder, **parameters):
    """Return the draft of a request, its form and the kind that has read it."""
    kind = Rows(encoder._service, decoupled=False)
    text = np.array([[each.encode()] for each in TEXTS], dtype=np.object_)
    return *kind.read({"text": text}, json.dumps(parameters), OUTPUTS, 0), kind


def test_an_answer_has_the_spans_of_the_encoder(encoder):
    labels = ["x", "the river"]
    draft, form, kind = read(encoder, labels=json.dumps(labels), threshold=0.1, flat_ner=False)
    request = draft.complete()
    assert isinstance(request, Request)
    rows = encoder._answers(request.prompts)

    tensors = kind.answer(request, form).tensors(list(enumerate(rows)))

    expected = encoder.extract(TEXTS, labels, threshold=0.1, flat_ner=False)
    assert tuple(tensors) == OUTPUTS
    assert tensors["num_spans"].tolist() == [[len(expected[0])], [0]]
    count = len(expected[0])
    assert count
    found = zip(*(tensors[name][0, :count].tolist() for name in OUTPUTS[:5]), strict=True)
    assert list(found) == [
        (each.start, each.end, each.text.encode(), each.label.encode(), each.score)
        for each in expected[0]
    ]
    assert tensors["spans"][1].tolist() == [b""] * count


def test_a_probe_needs_no_labels(encoder):
    _, form, _ = read(encoder, probe=True)

    assert form.found.form.labels == ("a",)


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({}, "the request has no labels; send the parameter labels"),
        ({"labels": "[]"}, "labels is"),
        ({"labels": "person"}, "labels is"),
        ({"labels": ["x"], "threshold": 2}, "threshold is 2; allowed: numbers from 0 to 1"),
        ({"labels": ["x"], "truncate": True, "truncation_side": "left"}, "truncation_side is left"),
        ({"labels": ["x"], "top_k": 3}, "top_k"),
    ],
)
def test_wrong_parameters_are_refused(encoder, parameters, message):
    with refused_request(message):
        read(encoder, **parameters)
