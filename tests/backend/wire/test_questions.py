"""Questions on the wire: their parameters, and the tensors of an answer."""

import json

import numpy as np
import pytest

from tests.checkpoints import save_checkpoint
from varlen import Encoder
from varlen.request.request import Request
from varlen.server.kinds import Rows

from ..refusals import refused_request

OUTPUTS = ("answers", "num_tokens")
PAIRS = [("the cat?", "the river, the cat"), ("a", "river the Cat " * 40)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Return an encoder of a random model."""
    folder = save_checkpoint(tmp_path_factory.mktemp("wire") / "qa", "BertForQuestionAnswering")
    with Encoder.from_pretrained(folder, dtype="fp32", warmup_seconds=0) as encoder:
        yield encoder


def column(texts):
    return np.array([[each.encode()] for each in texts], dtype=np.object_)


def read(encoder, pairs=PAIRS, names=("text", "text_pair"), **parameters):
    """Return the draft of a request, its form and the kind that has read it."""
    kind = Rows(encoder._service, decoupled=False)
    columns = dict(zip(("text", "text_pair"), zip(*pairs, strict=True), strict=True))
    tensors = {name: column(columns[name]) for name in names}
    return *kind.read(tensors, json.dumps(parameters), OUTPUTS, 0), kind


def test_an_answer_has_one_row_for_all_windows(encoder):
    options = {"top_k": 3, "max_answer_len": 4, "doc_stride": 7, "handle_impossible_answer": True}
    draft, form, kind = read(encoder, **options)
    request = draft.complete()
    assert isinstance(request, Request)
    assert len(request.prompts) > 3
    rows = encoder._answers(request.prompts)

    answer = kind.answer(request, form)
    # in any order, as sequences of a batch end
    tensors = answer.tensors(list(enumerate(rows))[::-1])

    assert tuple(tensors) == OUTPUTS
    assert [json.loads(row) for row in tensors["answers"][:, 0]] == encoder.question_answer(
        PAIRS, **options
    )
    counts = [prompt.num_tokens for prompt in request.prompts]
    assert tensors["num_tokens"].tolist() == [[counts[0]], [sum(counts[1:])]]
    assert answer.num_bytes == 8


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"top_k": 101}, "top_k is 101; allowed: whole numbers from 1 to 100"),
        ({"max_answer_len": 513}, "max_answer_len is 513; allowed: whole numbers from 1 to 512"),
        ({"truncate": True}, "the request cuts texts, and this model reads a long context in"),
        ({"truncation_side": "left"}, "the request cuts texts"),
        ({"doc_stride": -1}, "doc_stride is -1; allowed: whole numbers from 0"),
        ({"labels": ["x"]}, "the parameter labels is for the task extract"),
    ],
)
def test_wrong_parameters_are_refused(encoder, parameters, message):
    with refused_request(message):
        read(encoder, **parameters)


def test_a_question_without_a_context_is_refused(encoder):
    with refused_request("the request has text; send text, the question, and text_pair, its conte"):
        read(encoder, names=["text"])
