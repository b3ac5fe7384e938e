"""A repository for other backends: kept fields, and the server's features around our models."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.closeness import assert_close
from varlen.server.config import num_warmup_requests
from varlen_client import Client
from varlen_tools.local_server import LOOPBACK, LocalServer

from .clients import AnswerError, GrpcClient, integers, texts
from .serving import add_model, http_call, load, metrics, unload, wait_until
from .task_models import save_task_model

pytestmark = pytest.mark.full

AROUND = Path(__file__).parent / "models/around.py"
LABELS = ("negative", "neutral", "positive")
DELAY_MICROSECONDS = 2000
# As of a Python model with transformers. `attention_mask` of zeros is refused, a text without characters is served.
KEPT = f"""
max_batch_size: 16
input [
  {{ name: "text" data_type: TYPE_STRING dims: [ -1 ] optional: true }},
  {{ name: "input_ids" data_type: TYPE_INT64 dims: [ 16 ] optional: true }},
  {{ name: "attention_mask" data_type: TYPE_INT64 dims: [ 16 ] optional: true }}
]
output [ {{ name: "logits" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels.txt" }} ]
dynamic_batching {{
  preferred_batch_size: [ 4, 8 ]
  max_queue_delay_microseconds: {DELAY_MICROSECONDS}
  preserve_ordering: true
  default_queue_policy {{
    timeout_action: REJECT default_timeout_microseconds: 60000000 allow_timeout_override: true max_queue_size: 1000
  }}
}}
instance_group [ {{ kind: KIND_AUTO rate_limiter {{ resources [ {{ name: "R" count: 1 }} ] }} }} ]
response_cache {{ enable: true }}
version_policy {{ latest {{ num_versions: 1 }} }}
optimization {{ input_pinned_memory {{ enable: true }} cuda {{ graphs: true }} }}
model_warmup [
  {{
    name: "texts" batch_size: 4 count: 2
    inputs {{ key: "text" value {{ data_type: TYPE_STRING dims: [ 1 ] zero_data: true }} }}
  }},
  {{
    name: "ids" batch_size: 1
    inputs {{ key: "input_ids" value {{ data_type: TYPE_INT64 dims: [ 16 ] zero_data: true }} }}
    inputs {{ key: "attention_mask" value {{ data_type: TYPE_INT64 dims: [ 16 ] zero_data: true }} }}
  }}
]
"""
# Messages without characters are refused.
KEPT_WRITER = f"""
dynamic_batching {{ max_queue_delay_microseconds: {DELAY_MICROSECONDS} }}
model_warmup {{
  name: "messages" batch_size: 1 count: 2
  inputs {{ key: "messages" value {{ data_type: TYPE_STRING dims: [ 1 ] zero_data: true }} }}
}}
"""
STEP = """
backend: "python"
max_batch_size: {rows}
input [ {{ name: "{name}" data_type: {kind} dims: [ {width} ] }} ]
output [ {{ name: "{output}" data_type: {output_kind} dims: [ {output_width} ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
parameters {{ key: "called" value: {{ string_value: "{called}" }} }}
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 16
input [ {{ name: "{name}" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "{output}" data_type: {kind} dims: [ {width} ] }} ]
ensemble_scheduling {{ step [
  {{ model_name: "{first}" model_version: -1
    input_map {{ key: "{first_in}" value: "{name}" }} output_map {{ key: "{first_out}" value: "between" }} }},
  {{ model_name: "{last}" model_version: -1
    input_map {{ key: "{last_in}" value: "between" }} output_map {{ key: "{last_out}" value: "{output}" }} }}
] }}
"""
BATCH = [f"{'word1 word2 ' * (1 + number % 7)}word{number % 10}" for number in range(24)]


def _step(name: str, kind: str, output: str, output_kind: str, **fields: Any) -> str:
    usual = {"rows": 16, "width": 1, "output_width": 1, "called": ""}
    return STEP.format(
        name=name, kind=kind, output=output, output_kind=output_kind, **usual | fields
    )


def _ensemble(
    name: str,
    output: str,
    kind: str,
    width: int,
    first: tuple[str, str, str],
    last: tuple[str, str, str],
) -> str:
    """Return the config of an ensemble.

    Args:
        first, last: model, input and output of a step.
    """
    steps = {
        f"{place}{part}": value
        for place, step in (("first", first), ("last", last))
        for part, value in zip(("", "_in", "_out"), step, strict=True)
    }
    return ENSEMBLE.format(name=name, output=output, kind=kind, width=width, **steps)


@pytest.fixture(scope="module")
def kept(server, repository, checkpoints, tmp_path_factory):
    """The server with the models of a kept repository."""
    add_model(repository, "kept", checkpoints["classifier"], text=KEPT)
    (repository / "kept/labels.txt").write_text("\n".join(LABELS))
    writer = save_task_model(tmp_path_factory.mktemp("writer"), "tiny_gpt2")
    add_model(repository, "kept_writer", writer, text=KEPT_WRITER, kv_bytes="1000000")
    python_models = {
        "lower": _step("TEXT", "TYPE_STRING", "text", "TYPE_STRING"),
        "best": _step("logits", "TYPE_FP32", "best", "TYPE_INT32", width=3),
        "caller": _step(
            *("TEXT", "TYPE_STRING", "LOGITS", "TYPE_FP32"),
            output_width=3,
            called="kept,text,logits,",
        ),
        "stream_caller": _step(
            *("TEXT", "TYPE_STRING", "ANSWER", "TYPE_STRING"),
            rows=0,
            output_width=2,
            called="kept_writer,text_input,text_output,true",
        ),
    }
    kept_step = ("kept", "text", "logits")
    ensembles = {
        "ours_last": _ensemble(
            *("TEXT", "LOGITS", "TYPE_FP32", 3), ("lower", "TEXT", "text"), kept_step
        ),
        "ours_first": _ensemble(
            *("TEXT", "BEST", "TYPE_INT32", 1), kept_step, ("best", "logits", "best")
        ),
    }
    for name, config in (python_models | ensembles).items():
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        (folder.parent / "config.pbtxt").write_text(config)
        if name in python_models:
            (folder / "model.py").symlink_to(AROUND)
    names = ["kept", "kept_writer", *python_models, *ensembles]
    for name in names:
        assert load(server, name) is None
    for name in ("kept", "kept_writer"):
        _, config = http_call(server, "GET", f"/v2/models/{name}/config")
        rows = num_warmup_requests(config)
        wait_until(
            lambda name=name, rows=rows: _answered(server, name) == rows, "its rows have run"
        )
    yield server
    for name in reversed(names):
        unload(server, name)


def _answered(server: LocalServer, model: str) -> float:
    """Return how many requests the model has answered so far."""
    series = metrics(server, model)
    return sum(value for name, value in series.items() if name.startswith("varlen_requests_total "))


@pytest.fixture(scope="module")
def logits(kept):
    """The logits of `BATCH`, by the same checkpoint with a config of ours."""
    with GrpcClient(kept) as client:
        return np.concatenate([client.infer("classifier", texts(text)) for text in BATCH])


def test_the_log_says_what_happens_instead_of_each_kept_field(kept):
    starts = (
        "dynamic_batching has no use: varlen forms batches itself, from the rows of all requests. The server still"
        f" holds a request back for up to {DELAY_MICROSECONDS} microseconds",
        "rate_limiter limits nothing",
        "response_cache: varlen's own cache keeps answers",
        "model_warmup is not needed",
        "rows of model_warmup that this model refuses are skipped: row 0: input_ids has no tokens",
    )
    for start in starts:
        assert kept.log().count(f"varlen: kept v1: {start}") == 1
    skipped = "varlen: kept_writer v1: rows of model_warmup that this model refuses are skipped: "
    assert kept.log().count(skipped) == 1


def test_answers_stay_right_behind_the_server_s_own_batching(kept, client, logits, roundings):
    # twice: the second time out of our cache
    for _ in range(2):
        answers = [client.start("kept", texts(text)) for text in BATCH]
        found = np.concatenate([answer.result() for answer in answers])
        assert_close(found, logits, roundings=roundings["classifier"])
    rows = client.infer("kept", texts(*BATCH[:16]))
    assert_close(rows, logits[:16], roundings=roundings["classifier"])
    assert metrics(kept, "kept")["varlen_response_cache_hits_total"] > 0

    # padded to the one length of the config
    ids, mask = np.full((1, 16), 9), np.ones((1, 16))
    ids[0, 12:], mask[0, 12:] = 0, 0
    padded = {"input_ids": integers(ids), "attention_mask": integers(mask)}
    assert_close(
        client.infer("kept", padded),
        client.infer("classifier", {"input_ids": integers(ids[:, :12])}),
        roundings=roundings["classifier"],
    )

    # a bad request fails alone
    good, bad = (
        client.start("kept", texts("word1 word2 word1")),
        client.start("kept", texts("a " * 600)),
    )
    assert good.result().shape == (1, 3)
    with pytest.raises(AnswerError, match="^INVALID_ARGUMENT: row 0: text has"):
        bad.result()


def test_streams_stay_right_behind_the_server_s_own_batching(kept):
    sampling = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}

    with Client(kept.grpc_url, "kept_writer") as client:

        def streamed(prompt: list[int]) -> str:
            return "".join(part.text for part in client.stream(prompt, **sampling))

        prompts = [[5, 6, 7 + number] for number in range(8)]
        alone = [client.generate(prompt, **sampling).text for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(streamed, prompts)) == alone


def test_statistics_count_requests_and_their_time_in_the_server_s_queue(kept, grpc_client):
    def statistics() -> dict[str, Any]:
        _, answer = http_call(kept, "GET", "/v2/models/kept/versions/1/stats")
        [found] = answer["model_stats"]
        return dict(found)

    before = statistics()
    for text in BATCH[:5]:
        grpc_client.infer("kept", texts(text, text))
    after = statistics()

    counts = {name: after[name] - before[name] for name in ("inference_count", "execution_count")}
    assert counts == {"inference_count": 10, "execution_count": 5}
    success, queue, compute = (
        {
            key: after["inference_stats"][part][key] - before["inference_stats"][part][key]
            for key in ("count", "ns")
        }
        for part in ("success", "queue", "compute_infer")
    )
    assert success["count"] == queue["count"] == compute["count"] == 5
    # each waits alone for a fuller batch
    assert queue["ns"] >= 5 * DELAY_MICROSECONDS * 1000
    assert success["ns"] >= queue["ns"] + compute["ns"] > queue["ns"]
    # a request is a success for the server once it is in our queue: its fate is in our metrics
    with pytest.raises(AnswerError):
        grpc_client.infer("kept", texts("a " * 600))
    failed = statistics()["inference_stats"]
    assert failed["success"]["count"] == after["inference_stats"]["success"]["count"] + 1
    assert failed["fail"]["count"] == 0


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_best_classes_of_a_row_have_labels(kept, logits, protocol):
    library: Any = triton_grpc if protocol == "grpc" else triton_http
    port = kept.grpc_port if protocol == "grpc" else kept.http_port
    given = library.InferInput("text", [3, 1], "BYTES")
    given.set_data_from_numpy(np.array([[text.encode()] for text in BATCH[:3]], dtype=object))
    asked = library.InferRequestedOutput("logits", class_count=2)

    with library.InferenceServerClient(f"{LOOPBACK}:{port}") as client:
        found = client.infer("kept", [given], outputs=[asked]).as_numpy("logits")

    assert found.shape == (3, 2)
    for row, expected in zip(found, logits[:3], strict=True):
        best = np.argsort(-expected)[:2]
        values, indices, labels = zip(*(entry.decode().split(":") for entry in row), strict=True)
        assert [int(index) for index in indices] == list(best)
        assert list(labels) == [LABELS[index] for index in best]
        np.testing.assert_allclose([float(value) for value in values], expected[best], rtol=1e-3)


def test_our_model_is_the_last_step_of_an_ensemble(kept, client, logits, roundings):
    found = client.infer("ours_last", {"TEXT": texts(*map(str.upper, BATCH[:16]))["text"]})

    assert_close(found, logits[:16], roundings=roundings["classifier"])
    with pytest.raises(AnswerError, match="row 0: text has"):
        client.infer("ours_last", {"TEXT": texts("A " * 600)["text"]})


def test_our_model_is_the_first_step_of_an_ensemble(kept, logits):
    rows = [{"name": "TEXT", "shape": [16, 1], "datatype": "BYTES", "data": BATCH[:16]}]
    _, answer = http_call(kept, "POST", "/v2/models/ours_first/infer", {"inputs": rows})

    [output] = answer["outputs"]
    assert output["data"] == list(logits[:16].argmax(axis=1))


def test_a_python_model_calls_ours(kept, client, logits, roundings):
    found = client.infer("caller", {"TEXT": texts(*BATCH[:16])["text"]})

    assert_close(found, logits[:16], roundings=roundings["classifier"])
    with pytest.raises(AnswerError, match="row 0: text has"):
        client.infer("caller", {"TEXT": texts("a " * 600)["text"]})


def test_a_python_model_reads_a_stream_of_ours(kept):
    given = [{"name": "TEXT", "shape": [1], "datatype": "BYTES", "data": ["the cat"]}]
    _, answer = http_call(kept, "POST", "/v2/models/stream_caller/infer", {"inputs": given})

    text, parts = answer["outputs"][0]["data"]
    with Client(kept.grpc_url, "kept_writer") as client:
        whole = client.generate("the cat", max_tokens=5, temperature=0, ignore_eos=True)
    assert text == whole.text
    assert int(parts) > 1
