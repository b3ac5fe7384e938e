"""Each mistake of a request has its message; see tests/refusals.py."""

import json

import pytest

from tests.backend.fakes.input_limits import input_limits
from tests.refusals import Model, malformed, refusals
from varlen.errors import RequestError
from varlen.intake.checks import Intake
from varlen.intake.tokenization import Tokenizer
from varlen.models.checkpoint.family import NO_LABELS
from varlen.wire.outputs import ModelOutputs
from varlen.wire.rows import read_request

MODEL = Model(tokens=12, text_bytes=4000, vocabulary=60, features=24)


@pytest.fixture(scope="module")
def intake(small_bert):
    return Intake(Tokenizer(small_bert, MODEL.tokens), input_limits(MODEL.text_bytes))


def read(case, intake):
    """Read a request whose texts are tokenized at once."""
    outputs = ModelOutputs("embed", MODEL.features, NO_LABELS, normalize=False)
    parameters = json.dumps(case.parameters)
    draft, _ = read_request(
        case.inputs, parameters, intake, outputs, requested=(), timeout_microseconds=case.timeout
    )
    draft.complete()


@pytest.mark.parametrize(
    "case", [*refusals(MODEL), *malformed()], ids=lambda case: case.description
)
def test_a_mistake_is_refused_with_its_message(intake, case):
    with pytest.raises(RequestError) as caught:
        read(case, intake)

    assert str(caught.value) == case.message
