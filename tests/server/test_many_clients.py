"""Many concurrent clients, both protocols, mixed lengths: each gets its own answers."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.closeness import assert_close

from .clients import Client, texts

pytestmark = pytest.mark.full

CLIENTS = 16
REQUESTS_EACH = 12


def test_every_client_among_many_gets_its_own_answer(
    grpc_client, http_client, in_process, roundings
):
    pool = [_text(seed) for seed in range(60)]
    expected = in_process.embed(pool)

    def talk(number: int) -> int:
        """Send a client's requests one by one; return the number of right answers."""
        client: Client = (grpc_client, http_client)[number % 2]
        chance = random.Random(number)
        for _ in range(REQUESTS_EACH):
            chosen = chance.sample(range(len(pool)), k=chance.choice((1, 1, 1, 2, 5)))
            answer = client.infer("minilm", texts(*(pool[index] for index in chosen)))
            assert_close(answer, expected[chosen], roundings=roundings["minilm"])
        return REQUESTS_EACH

    with ThreadPoolExecutor(CLIENTS) as threads:
        right = list(threads.map(talk, range(CLIENTS)))

    assert sum(right) == CLIENTS * REQUESTS_EACH


def _text(seed: int) -> str:
    """Return a text of 1 to 200 words, more often short than long."""
    chance = random.Random(seed)
    count = int(200 ** chance.random())
    return " ".join(chance.choices(("tea", "river", "seven", "of", "blue", "running"), k=count))
