"""Calls of the sync client while the process of their model ends, over both protocols."""

import pytest

from varlen_client import Client, InvalidRequest, ModelProcessEnded

NOT_HEALTHY = "Stub process 'fake_0' is not healthy."
ENDED = "the process of fake_0 has ended or does not respond: unload and load the model, or restart the server"
LONG = 300.0


@pytest.fixture
def model(server):
    """A model of varlen that answers no request, and refuses the operations of its tokenizer."""
    server.model.backend = "varlen"
    server.model.delay = lambda received: 0.0 if is_question(received) else LONG
    return server.model


def is_question(received):
    options = received.parameters or (
        received.sampling if "sampling_parameters" in received.tensors else {}
    )
    return options.get("operation") == "tokenize"


def refuse_questions(model, fault, message):
    found = fault("python_backend", message)
    model.refuse = lambda received: found if is_question(received) else None


def questions(model):
    return [received for received in model.requests if is_question(received)]


@pytest.mark.parametrize(
    "message, text",
    [
        (NOT_HEALTHY, ENDED),
        ("Failed to obtain the health mutex.", "the model's process has ended"),
        (f"[request id: <id_unknown>] {NOT_HEALTHY}", ENDED),
    ],
)
def test_a_new_request_to_an_ended_process_is_not_retried(client, server, fault, message, text):
    server.model.faults = [fault("python_backend", message)]

    with pytest.raises(ModelProcessEnded, match=text):
        client.embed(["a"])

    assert len(server.model.requests) == 1


def test_a_message_that_repeats_the_words_of_the_server_is_another_error(client, server, fault):
    server.model.faults = [fault("invalid", f"row 0: unknown label {NOT_HEALTHY}")]

    with pytest.raises(InvalidRequest):
        client.embed(["a"])


def test_a_call_that_waits_fails_with_its_rows(server, model, fault):
    refuse_questions(model, fault, NOT_HEALTHY)

    with (
        Client(server.url, watch_seconds=0.1, rows_per_request=1) as client,
        pytest.raises(
            ModelProcessEnded, match=f"of 9: no answer will come, since {ENDED}"
        ) as caught,
    ):
        client.embed(["a"] * 9)

    assert caught.value.rows is not None
    assert len(questions(model)) == 3


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_an_answer_that_is_generated_fails(server, model, fault, streams):
    model.task = "generate"
    refuse_questions(model, fault, NOT_HEALTHY)

    with Client(server.url, watch_seconds=0.1) as client, pytest.raises(ModelProcessEnded):
        list(client.stream("a")) if streams else client.generate("a")

    assert len(questions(model)) == 3


@pytest.mark.parametrize(
    "change", [{"backend": "python"}, {"instances": 2}], ids=["foreign", "two_instances"]
)
def test_models_whose_requests_another_process_may_answer_are_not_asked(
    server, model, change, vectors_of
):
    for name, value in change.items():
        setattr(model, name, value)
    model.delay = lambda received: 1.0

    with Client(server.url, watch_seconds=0.01) as client:
        assert client.embed(["a"]).tolist() == vectors_of(["a"]).tolist()

    assert questions(model) == []


def test_a_model_that_refuses_the_question_otherwise_is_waited_for(
    server, model, fault, vectors_of
):
    refuse_questions(model, fault, "the model has no tokenizer")
    model.delay = lambda received: 0.0 if is_question(received) else 1.0

    with Client(server.url, watch_seconds=0.01) as client:
        assert client.embed(["a"]).tolist() == vectors_of(["a"]).tolist()

    assert questions(model)


def test_a_watch_of_less_than_no_seconds_is_refused(server):
    with pytest.raises(ValueError, match="watch_seconds is -1; at least 0"):
        Client(server.url, watch_seconds=-1)
