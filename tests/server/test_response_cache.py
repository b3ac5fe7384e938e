"""The response cache in the real server, and request deadlines and priorities."""

import numpy as np
import pytest

from tests.closeness import assert_close
from varlen_client import Client as VarlenClient
from varlen_client import DeadlineMissed
from varlen_tools.local_server import LOOPBACK, LocalServer

from .clients import AnswerError, HttpClient, integers, texts
from .serving import add_model, load, metrics, outcomes, unload, wait_until_idle

# Shorter than any answer takes.
NO_TIME = 0.001
CACHE_BYTES = 200_000


@pytest.fixture(scope="module")
def cached(server, repository, checkpoints):
    """A model with a cache, in which each test keeps answers of its own."""
    add_model(
        repository, "cached", checkpoints["slow"], response_cache_bytes=str(100 * CACHE_BYTES)
    )
    assert load(server, "cached") is None
    yield "cached"
    unload(server, "cached")


@pytest.fixture
def small_cache(server, repository, checkpoints):
    """A model with an empty cache of `CACHE_BYTES`."""
    add_model(repository, "small", checkpoints["slow"], response_cache_bytes=str(CACHE_BYTES))
    assert load(server, "small") is None
    yield "small"
    unload(server, "small")


class Watch:
    """Growth of a model's series since this object was created."""

    def __init__(self, server: LocalServer, model: str) -> None:
        self._server, self._model = server, model
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        # answers are counted first, and then exported with all other series
        outcomes(self._server, self._model)
        wait_until_idle(self._server, self._model)
        return metrics(self._server, self._model)

    def grown(self) -> dict[str, float]:
        """Return the growth of the cache's series, and the sequences that ran."""
        prefix = "varlen_response_cache_"
        return {
            name.removeprefix(prefix).removesuffix("_total"): value - self._before[name]
            for name, value in self._now().items()
            if name.startswith(prefix) or name == "varlen_sequences_total"
        }


def test_a_hit_is_equal_to_the_bit_through_both_protocols(
    cached, server, grpc_client, http_client, roundings
):
    watch = Watch(server, cached)
    inputs = texts("word1 word2", "word3", "word1 word2")

    first = grpc_client.infer(cached, inputs)
    again = [client.infer(cached, inputs) for client in (http_client, grpc_client)]
    # row by row, in another order, as token ids, beside a new one
    ids = {"input_ids": integers([[2, 8, 3], [2, 9, 3]])}
    mixed = http_client.infer(cached, ids)

    for answers in again:
        np.testing.assert_array_equal(answers, first)
    np.testing.assert_array_equal(first[0], first[2])
    np.testing.assert_array_equal(mixed[0], first[1])
    assert_close(first, grpc_client.infer("slow", inputs), roundings=roundings["slow"])
    grown = watch.grown()
    assert (grown["misses"], grown["joined"], grown["hits"]) == (3, 1, 7)
    assert grown["varlen_sequences"] == grown["entries"] == 3
    assert 3 * 128 * 4 < grown["bytes"] < CACHE_BYTES


def test_what_the_answer_depends_on_is_in_the_key(cached, client):
    ids = {"input_ids": integers([[2, 8, 9, 3]])}
    types = {**ids, "token_type_ids": integers([[0, 0, 1, 1]])}
    padded = {
        "input_ids": integers([[2, 8, 9, 3, 0]]),
        "attention_mask": integers([[1, 1, 1, 1, 0]]),
    }

    plain = client.infer(cached, ids)
    normalized = client.infer(cached, ids, {"normalize": True})
    with_types = client.infer(cached, types)

    # the model sums 128 squares, and so does this
    assert_close(np.linalg.norm(normalized), 1.0, roundings=2 * 128)
    assert abs(plain - normalized).max() > 0.01
    assert abs(plain - with_types).max() > 0.01
    # each hit gives its own answer; padding and urgency make no difference
    for inputs, parameters, expected in [
        (ids, {}, plain),
        (padded, {"request_priority": 9}, plain),
        (ids, {"normalize": True, "deadline_ms": 60_000}, normalized),
        (types, {"normalize": False}, with_types),
    ]:
        np.testing.assert_array_equal(client.infer(cached, inputs, parameters), expected)


def test_callers_of_different_salts_share_no_answer(cached, server, url):
    watch, text = Watch(server, cached), f"word{100 + url.startswith('grpc')}"
    with VarlenClient(url, cached) as client:
        answers = [client.embed([text], cache_salt=salt) for salt in ("a", "b", "a", None)]

    for each in answers:
        np.testing.assert_array_equal(each, answers[0])
    grown = watch.grown()
    assert (grown["misses"], grown["hits"]) == (3, 1)


def test_an_error_is_not_kept(cached, server, client, roundings):
    watch = Watch(server, cached)
    # token ids: a text has to be tokenized first, which takes time
    inputs = {"input_ids": integers([[4, 5 + isinstance(client, HttpClient)]])}
    for _ in range(2):
        with pytest.raises(AnswerError, match="^UNAVAILABLE: deadline missed: "):
            client.infer(cached, inputs, {"deadline_ms": NO_TIME})
    with pytest.raises(AnswerError, match="^INVALID_ARGUMENT: "):
        client.infer(cached, {"input_ids": integers([[-1]])})
    assert watch.grown()["entries"] == 0

    answer = client.infer(cached, inputs)

    assert_close(answer, client.infer("slow", inputs), roundings=roundings["slow"])
    # a hit needs no time
    again = client.infer(cached, inputs, {"deadline_ms": NO_TIME})
    np.testing.assert_array_equal(again, answer)
    assert watch.grown()["varlen_sequences"] == 1


def test_equal_requests_in_flight_run_once(cached, server, grpc_client, http_client):
    watch = Watch(server, cached)
    # keeps the model busy while the others come
    ids = np.random.default_rng(0).integers(0, 190, (64, 500))
    busy = grpc_client.start(cached, {"input_ids": integers(ids)})
    inputs = texts(*(f"word{number}" for number in range(20, 40)))

    answers = [client.start(cached, inputs) for client in (grpc_client, http_client) * 8]

    rows = [answer.result() for answer in answers]
    for found in rows:
        np.testing.assert_array_equal(found, rows[0])
    assert busy.result().shape == (64, 128)
    grown = watch.grown()
    assert grown["varlen_sequences"] == grown["misses"] == 64 + 20
    assert grown["joined"] + grown["hits"] == 15 * 20


@pytest.mark.full
def test_the_cache_stays_within_its_bytes(small_cache, server, grpc_client):
    watch = Watch(server, small_cache)
    for first in range(0, 190, 10):
        rows = [[first + row, other] for row in range(10) for other in range(6)]
        grpc_client.infer(small_cache, {"input_ids": integers(rows)})
        assert metrics(server, small_cache)["varlen_response_cache_bytes"] <= CACHE_BYTES

    grown = watch.grown()
    assert grown["evictions"] == grown["misses"] - grown["entries"] > 0
    # it is full but for less than an entry
    assert grown["bytes"] > CACHE_BYTES - 2000


def test_a_model_without_the_setting_keeps_nothing(server, grpc_client):
    watch = Watch(server, "slow")
    for _ in range(2):
        grpc_client.infer("slow", texts("word1", "word1"))

    grown = watch.grown()
    assert grown.pop("varlen_sequences") == 4
    assert not any(grown.values())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("deadline_ms", value) for value in (0, -0.5, "100", True)),
        *(("request_priority", value) for value in (10, 1.5, "high")),
    ],
)
def test_an_invalid_deadline_or_priority_is_refused(client, name, value):
    with pytest.raises(AnswerError, match=f"^INVALID_ARGUMENT: .*{name}"):
        client.infer("encoder", texts("word1"), {name: value})


@pytest.mark.parametrize("parameters", [{"deadline_ms": NO_TIME}, {"timeout": 1000}], ids=str)
def test_a_deadline_that_cannot_be_kept_is_refused(server, client, parameters):
    # 32,768 tokens: no machine runs them in the shortest timeout that is accepted
    bulk = {"input_ids": integers(np.ones((64, 512)))}
    before = outcomes(server, "encoder")

    with pytest.raises(AnswerError, match="^UNAVAILABLE: deadline missed: "):
        client.infer("encoder", bulk, parameters)

    assert outcomes(server, "encoder") == before | {"refused": before["refused"] + 1}


@pytest.mark.parametrize(
    "parameters",
    [
        {"deadline_ms": 60_000},
        {"deadline_ms": 60_000.5, "request_priority": 9},
        {"timeout": 60_000_000},
    ],
    ids=str,
)
def test_a_deadline_that_can_be_kept_changes_nothing(client, parameters):
    assert client.infer("encoder", texts("word1"), parameters).shape == (1, 3, 32)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_client_passes_deadlines_on_and_knows_a_missed_one(server, protocol):
    port = server.grpc_port if protocol == "grpc" else server.http_port
    with VarlenClient(f"{protocol}://{LOOPBACK}:{port}", "slow") as client:
        vectors = client.embed(["word1"] * 3, deadline_ms=60_000.5, priority=9)
        assert vectors.shape == (3, 128)
        with pytest.raises(DeadlineMissed, match="^deadline missed: "):
            client.embed(["word2"], deadline_ms=NO_TIME)
