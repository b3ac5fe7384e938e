"""A model's life on the API of each release of the server that was read.

`test_entry.py` and the other tests here see only what these releases have in common.
"""

import json
import sys
import time
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest

from tests.backend.fakes.server_api import Restricted, ServerApi, read_apis
from tests.backend.requests import text

APIS = read_apis()
SECONDS = 20.0
CONTEXT = '{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}'


@pytest.fixture(params=APIS)
def server_api(request):
    return APIS[request.param]


@pytest.fixture
def restricted(pb_utils):
    """The server's module as the backend sees it."""
    return sys.modules[pb_utils.__name__]


def minimal_config(restricted, **parameters):
    settings = {"dtype": "fp32", "threads": "1", "warmup_seconds": "0", **parameters}
    given = {name: {"string_value": value} for name, value in settings.items()}
    config = {"name": "m", "max_batch_size": 0, "input": [], "output": [], "parameters": given}
    return restricted.ModelConfig(json.dumps(config))


def wait_for(*requests):
    for request in requests:
        assert request.answered.wait(SECONDS), "a request was never answered"


def test_a_model_is_completed_loads_answers_and_ends(
    load, ask, server_model, pb_utils, restricted, small_bert, monkeypatch
):
    contexts = []
    tracer = SimpleNamespace(begin=lambda context, _: contexts.append(context), close=lambda: None)
    monkeypatch.setattr(server_model, "RequestTracer", lambda name, version: tracer)
    pb_utils.model_dir = str(small_bert)
    completed = server_model.TritonPythonModel.auto_complete_config(minimal_config(restricted))
    model = load(small_bert, completed.as_dict())
    good, bad, cancelled = ask(text=text("the cat")), ask(text=text(b"\xff")), ask(text=text("a"))
    good.trace_context = CONTEXT
    cancelled.cancelled = True
    # as if it had waited
    monkeypatch.setattr(sys.modules["varlen.server.replies"], "_CANCEL_CHECK_SECONDS", -1.0)

    model.execute([good, bad, cancelled])

    wait_for(good, bad, cancelled)
    codes = [each.response.error() and each.response.error().code() for each in (bad, cancelled)]
    assert good.response.error() is None
    assert codes == [pb_utils.TritonError.INVALID_ARG, pb_utils.TritonError.CANCELLED]
    assert contexts == [CONTEXT, None, None]
    assert model.is_ready() is True
    model._exporter.close()
    kinds = restricted.MetricFamily
    assert {family.kind for family in pb_utils.MetricFamily.made} == {
        kinds.COUNTER,
        kinds.GAUGE,
        kinds.HISTOGRAM,
    }


def test_a_model_that_generates_streams_until_its_client_leaves(
    load, ask, server_model, pb_utils, restricted, make_checkpoint
):
    folder = make_checkpoint("GPT2LMHeadModel")
    pb_utils.model_dir = str(folder)
    config = minimal_config(restricted, kv_bytes="1000000")
    completed = server_model.TritonPythonModel.auto_complete_config(config).as_dict()
    assert completed["model_transaction_policy"] == {"decoupled": True}
    model = load(folder, completed)
    options = {"max_tokens": 300, "ignore_eos": True, "temperature": 0.0}
    prompt = np.array([b"the cat"], dtype=np.object_)
    request = ask(options, decoupled=True, text_input=prompt, stream=np.array([True]))

    model.execute([request])
    until = time.monotonic() + SECONDS
    while not request.sends:
        assert time.monotonic() < until
    request.cancelled = True

    wait_for(request)
    assert request.response.error().code() == pb_utils.TritonError.CANCELLED


def test_arrays_are_checked_where_numpy_is_new(pb_utils, restricted, monkeypatch):
    monkeypatch.setattr(np, "__version__", "2.0.0")
    monkeypatch.delitem(sys.modules, "varlen.server.process", raising=False)

    import_module("varlen.server.process").check_numpy()

    sys.modules.pop("varlen.server.process")


def test_a_name_a_method_or_a_parameter_that_a_release_lacks_raises(pb_utils, restricted):
    tensor = restricted.Tensor("x", np.zeros(1))

    for use, error in [
        (lambda: restricted.crashes, AttributeError),
        (lambda: tensor.squeeze, AttributeError),
        (lambda: restricted.Tensor(name="x", tensor=np.zeros(1)), TypeError),
        (lambda: restricted.InferenceResponse([tensor], None, {}, "more"), TypeError),
        (lambda: restricted.get_model_dir("m"), TypeError),
    ]:
        with pytest.raises(error):
            use()
    assert tensor.name() == "x"


def test_a_parameter_of_some_releases_is_not_common_to_all(pb_utils):
    old, new = (Restricted(pb_utils, APIS[release]) for release in ("24.10", "25.02"))
    common = Restricted(pb_utils, ServerApi.common([APIS["25.02"], APIS["24.10"]]))

    assert hasattr(new.InferenceResponse, "parameters")
    for module in (old, common):
        assert not hasattr(module.InferenceResponse, "parameters")
        with pytest.raises(TypeError, match="parameters"):
            module.InferenceResponse([], parameters={})
