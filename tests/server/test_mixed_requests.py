"""1,000 requests at once, to models of many families and heads: no answer is wrong."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from varlen_client import Client
from varlen_tools.local_server import LocalServer

from .mixed_models import GROUPS, TEXTS, Subject
from .serving import add_model, load_all, running_server

pytestmark = pytest.mark.full

CLIENTS = 16
REQUESTS = 1000
# Lower bounds of cosines in bf16 that are not 0.999: scores near 0, whose addends nearly cancel. One is the difference
# of two logits, 0.2 on average: transformers in bf16 has 0.9955. One is 0.08 on average, with addends of 2: hidden
# states are as exact as in transformers (relative errors of 0.0047 and 0.0050), whose scores have 0.9994 by chance.
LOWEST = {"reranker_qwen3": 0.995, "jina_reranker": 0.995}
# The groups have about as many requests each.
COUNTS = [len(range(number, REQUESTS, len(GROUPS))) for number in range(len(GROUPS))]


@pytest.mark.parametrize("number", range(len(GROUPS)))
def test_no_answer_of_mixed_requests_is_wrong(tmp_path, number):
    subjects = _subjects(tmp_path, number)

    with _serving(tmp_path / "repository", subjects) as server:
        _ask_alone(server, subjects)
        right = _send_all(server, subjects, COUNTS[number])

    assert len(right) == COUNTS[number]


@pytest.mark.parametrize("number", range(len(GROUPS)))
def test_bf16_keeps_the_direction_of_every_vector_and_score(tmp_path, number):
    subjects = [
        subject
        for subject in _subjects(tmp_path, number)
        if isinstance(subject.expected[0], np.ndarray | np.floating)
    ]
    answers = {}

    with _serving(tmp_path / "repository", subjects, dtype="bf16") as server:
        for place, subject in enumerate(subjects):
            with Client(server.grpc_url, subject.model) as client:
                answers[place] = subject.ask(client, TEXTS)

    cosines = {}
    for place, answer in answers.items():
        actual, expected = np.float64(answer), np.float64(subjects[place].expected)
        if subjects[place].has_scores:
            # a few logits near 0 have no direction, but all logits together have one
            actual, expected = actual.reshape(1, -1), expected.reshape(1, -1)
        lengths = np.linalg.norm(actual, axis=1) * np.linalg.norm(expected, axis=1)
        cosine = float(((actual * expected).sum(1) / lengths).min())
        cosines[f"{subjects[place].model} {place}"] = cosine
        lowest = LOWEST.get(subjects[place].model, 0.999)
        assert cosine > lowest, cosines


def _subjects(folder: Path, number: int) -> list[Subject]:
    """Return the models of a group, saved below a folder."""
    made = [make(folder / str(at)) for at, make in enumerate(GROUPS[number])]
    return [subject for each in made for subject in each]


@contextmanager
def _serving(
    repository: Path, subjects: Sequence[Subject], **settings: str
) -> Iterator[LocalServer]:
    """Run a server with all models of some subjects."""
    models = {subject.model: subject for subject in subjects}
    for name, subject in models.items():
        add_model(repository, name, subject.folder, **subject.settings | settings)
    with running_server(repository) as server:
        load_all(server, models)
        yield server


def _ask_alone(server: LocalServer, subjects: Sequence[Subject]) -> None:
    """Check the answer to each text by itself, while nothing else runs."""
    for subject in subjects:
        with Client(server.grpc_url, subject.model) as client:
            for text, expected in zip(TEXTS, subject.expected, strict=True):
                [answer] = subject.ask(client, [text])
                subject.check(answer, expected)


def _send_all(server: LocalServer, subjects: Sequence[Subject], count: int) -> list[int]:
    """Send requests at the same time; return the number of right answers to each."""
    names = {subject.model for subject in subjects}
    clients = [
        {name: Client(url, name) for name in names} for url in (server.grpc_url, server.http_url)
    ]

    def send(request: int) -> int:
        chance = random.Random(request)
        subject = subjects[request % len(subjects)]
        chosen = chance.sample(range(len(TEXTS)), k=chance.choice((1, 1, 1, 2, 5, 12)))
        client = chance.choice(clients)[subject.model]
        answers = subject.ask(client, [TEXTS[index] for index in chosen])
        assert len(answers) == len(chosen)
        for answer, index in zip(answers, chosen, strict=True):
            subject.check(answer, subject.expected[index])
        return len(chosen)

    with ThreadPoolExecutor(CLIENTS) as threads:
        right = list(threads.map(send, range(count)))
    for by_name in clients:
        for client in by_name.values():
            client.close()
    return right
