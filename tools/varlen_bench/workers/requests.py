"""The process that sends texts and prompts with our client and times them.

A closed loop keeps requests in flight. Streams give the time to the first token and between tokens.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from varlen_bench.harness.generator import Outcome, saturate
from varlen_bench.harness.worker import Message, run_worker
from varlen_bench.workloads import WORDS
from varlen_client import AsyncClient, VarlenClientError

Kind: TypeAlias = Literal[
    "embed", "embed short", "greedy", "sampled", "penalty", "beams", "translate"
]
# Ids of random prompts and sources: letters of the decoders, and no special token of any model.
_IDS = range(2, 250)
_END = 0
_SAMPLING: dict[Kind, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "sampled": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "ignore_eos": True},
    "penalty": {"temperature": 0.0, "repetition_penalty": 1.05, "ignore_eos": True},
    "beams": {"num_beams": 4},
}


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """Requests to one model.

    Attributes:
        in_flight: requests without an answer, always.
        words: shortest and longest text of `embed`, in words.
        prompt_tokens, answer_tokens: length of prompts and sources, and of answers.
    """

    model: str
    kind: Kind
    in_flight: int
    seconds: float
    seed: int = 0
    words: tuple[int, int] = (5, 240)
    prompt_tokens: int = 128
    answer_tokens: int = 128


@dataclass(slots=True)
class Times:
    """Seconds of the requests that were answered, and what was not.

    Attributes:
        seconds: time between the first request and the last answer.
        first: time between a request and its first token.
        between: time between tokens of a stream.
    """

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    failed: int = 0
    reasons: list[str] = field(default_factory=list)


async def run_load(url: str, load: RequestLoad) -> Times:
    """Return the times of a load, without its first request, which opens the connection."""
    times, numbers = Times(), random.Random(load.seed)
    async with AsyncClient(url, model=load.model) as client:

        async def send(_: int) -> tuple[Outcome, str]:
            try:
                await _send(client, load, numbers, times)
            except VarlenClientError as error:
                return "failed", str(error)
            return "ok", ""

        await _send(client, load, numbers, Times())
        record = await saturate(1, send, in_flight=load.in_flight, seconds=load.seconds)
    ended = [request for request in record.requests if request.outcome == "ok"]
    times.latencies = [request.latency(since_sent=True) for request in ended]
    times.seconds = max((request.done or 0.0 for request in ended), default=load.seconds)
    times.failed, times.reasons = len(record.requests) - len(ended), record.reasons
    return times


async def _send(
    client: AsyncClient, load: RequestLoad, numbers: random.Random, times: Times
) -> None:
    """Send one request, and add its tokens and the times between them."""
    if load.kind in {"embed", "embed short"}:
        await client.embed([" ".join(numbers.choices(WORDS, k=numbers.randint(*load.words)))])
        return
    ids = numbers.choices(_IDS, k=load.prompt_tokens)
    if load.kind == "translate":
        (best,) = await client.translate([[*ids, _END]], num_beams=4, max_tokens=load.answer_tokens)
        times.tokens += len(best.token_ids)
        return
    sampling = _SAMPLING[load.kind] | {"max_tokens": load.answer_tokens}
    if load.kind == "sampled":
        sampling["seed"] = numbers.getrandbits(30)
    if load.kind == "beams":
        times.tokens += len((await client.generate(ids, **sampling)).token_ids)
        return
    last, is_first = time.perf_counter(), True
    async with aclosing(client.stream(ids, **sampling)) as parts:
        async for part in parts:
            if not part.token_ids:
                continue
            now = time.perf_counter()
            if is_first:
                times.first.append(now - last)
            else:
                times.between.append((now - last) / len(part.token_ids))
            times.tokens += len(part.token_ids)
            last, is_first = now, False


def start(argument: Message) -> Callable[[Message], Message]:
    """Return what answers a load; `argument` has the server's address, `url`."""

    def answer(order: Message) -> Message:
        fields = order | {"words": tuple(order["words"])}
        return asdict(asyncio.run(run_load(argument["url"], RequestLoad(**fields))))

    return answer


if __name__ == "__main__":
    run_worker(start)
