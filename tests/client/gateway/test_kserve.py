"""`/v2/models/NAME/infer` of the gateway, which litellm's `triton/` models use."""

import asyncio
import json

import numpy as np
import pytest

from .conftest import http_client
from .fake_models import vector_of

PATH = "/v2/models/embedder/infer"


def tensor(data, shape, **others):
    return {"name": "input_text", "shape": shape, "datatype": "BYTES", "data": data, **others}


@pytest.mark.parametrize("shape", [[2], [2, 1]])
def test_texts_come_back_as_a_matrix(post, calls, shape):
    answer = post(PATH, id="7", inputs=[tensor(["ab", "c"], shape)])

    [output] = answer.pop("outputs")
    assert answer == {"id": "7", "model_name": "embedder", "model_version": "1"}
    vectors = np.float32(output.pop("data")).reshape(output["shape"])
    np.testing.assert_array_equal(vectors, np.stack([vector_of("ab"), vector_of("c")]))
    assert output == {"name": "sentence_embedding", "datatype": "FP32", "shape": [2, 4]}
    assert calls.received == [("embedder", "embed", ["ab", "c"], {})]


def test_one_text_of_litellm_has_its_length_as_shape(post, calls):
    post(PATH, inputs=[tensor("abc", [3])], parameters={"truncate": True})

    options = {"truncate": True}
    assert calls.received == [("embedder", "embed", ["abc"], options)]


def test_blank_texts_are_rows(post, calls):
    post(PATH, inputs=[tensor(["", " "], [2])])
    post(PATH, inputs=[tensor("", [0])])

    assert [rows for _, _, rows, _ in calls.received] == [["", " "], [""]]


@pytest.mark.parametrize(
    "inputs, message",
    [
        ([tensor(["a", "b"], [3])], "input_text has the shape [3] and 2 texts; allowed: [texts]"),
        ([tensor(["a"] * 2049, [2049])], "with 1 to 2048 texts"),
        ([tensor(["a"], [1], name="input_ids")], "Input should be 'input_text' or 'text'"),
        ([tensor(["a"], [1], datatype="INT64")], "Input should be 'BYTES'"),
        ([], "inputs is []"),
    ],
    ids=["shape", "many", "name", "datatype", "none"],
)
def test_other_tensors_are_refused(refusal, calls, inputs, message):
    status, error = refusal(PATH, inputs=inputs)

    assert status == 400
    assert message in error["message"]
    assert calls.received == []


def test_a_body_needs_no_content_type(make_app):
    async def run():
        async with http_client(make_app()) as client:
            given = json.dumps({"inputs": [tensor(["ab"], [1])]})
            return [await client.post(PATH, content=each) for each in (given, "{", "[]")]

    found, broken, other = asyncio.run(run())

    assert found.json()["outputs"][0]["shape"] == [1, 4]
    assert broken.json()["error"]["message"].startswith("the body is not JSON: ")
    assert other.json()["error"]["message"] == "the body is []; send a JSON object"
    assert (broken.status_code, other.status_code) == (400, 400)


def test_other_outputs_and_models_are_refused(refusal):
    body = {"inputs": [tensor(["a"], [1])]}

    assert refusal(PATH, **body, outputs=[{"name": "logits"}])[0] == 400
    assert refusal("/v2/models/missing/infer", **body)[0] == 404
