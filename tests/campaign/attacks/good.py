"""Good requests of varlen's client, over both protocols: each answer must be the known one."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from varlen_client import DeadlineMissed, RequestTimeout, ServerUnavailable, VarlenClientError

from ..endings import End, Ending
from ..known import BEAMS, GREEDY, MAX_TOKENS, NUM_SAMPLES, SAMPLE_TOKENS, SEEDED, Vectors
from ..models import CACHED, CAPPED, DECODER, ENCODER, HIDDEN, TRANSLATOR
from ..target import MAX_ROWS, PROTOCOLS, Target

_MOST_ROWS = 6


def embed(draw: random.Random, target: Target) -> Ending:
    """Vectors of texts or of token ids."""
    return _embed(draw, target, ENCODER)


def embed_cached(draw: random.Random, target: Target) -> Ending:
    """The same with a response cache, which the next requests hit, join or evict from."""
    return _embed(draw, target, CACHED)


def embed_with_little_queue(draw: random.Random, target: Target) -> Ending:
    """Vectors with a priority, of a model that refuses what its queue cannot hold."""
    return _embed(
        draw,
        target,
        CAPPED,
        # the largest keep it busy, so that others meet a full queue
        rows=draw.choice((1, _MOST_ROWS, MAX_ROWS)),
        refusals=(ServerUnavailable,),
        priority=draw.randint(0, 9),
    )


def embed_with_deadline(draw: random.Random, target: Target) -> Ending:
    """Vectors within a time, which may be too short for the server."""
    refusals = (DeadlineMissed, RequestTimeout)
    return _embed(
        draw,
        target,
        ENCODER,
        refusals=refusals,
        deadline_ms=draw.choice((1, 20, 100, 10_000, 30_000)),
    )


def hidden(draw: random.Random, target: Target) -> Ending:
    """A vector per token: large answers."""
    known = target.known.encoders[HIDDEN]
    row = draw.randrange(len(known.ids))
    client = target.client(HIDDEN, draw.choice(PROTOCOLS))

    def ask() -> bool:
        # the client sends a request for each row
        [answer] = client.hidden([known.ids[row]], timeout=target.patience(HIDDEN))
        return known.is_right(answer, known.of_ids[row])

    return _ending(ask, HIDDEN)


def generate(draw: random.Random, target: Target) -> Ending:
    """A greedy continuation as a whole."""
    prompt, expected = draw.choice(list(target.known.continuations.items()))
    count = draw.choice((1, 7, MAX_TOKENS))
    client = target.client(DECODER, draw.choice(PROTOCOLS))

    def ask() -> bool:
        answer = client.generate(
            prompt,
            max_tokens=count,
            priority=draw.randint(0, 9),
            timeout=target.patience(DECODER),
            **GREEDY,
        )
        return answer.token_ids == expected[:count]

    return _ending(ask, DECODER)


def stream(draw: random.Random, target: Target) -> Ending:
    """The same in parts."""
    prompt, expected = draw.choice(list(target.known.continuations.items()))
    return _in_parts(draw, target, prompt, expected, max_tokens=MAX_TOKENS, **GREEDY)


def stream_seeded(draw: random.Random, target: Target) -> Ending:
    """A long sampled continuation in parts, with a seed."""
    prompt, (expected, *_) = draw.choice(list(target.known.samples.items()))
    return _in_parts(draw, target, prompt, expected, max_tokens=SAMPLE_TOKENS, **SEEDED)


def _in_parts(
    draw: random.Random, target: Target, prompt: str, expected: tuple[int, ...], **options: Any
) -> Ending:
    client = target.client(DECODER, draw.choice(PROTOCOLS))

    def ask() -> bool:
        parts = client.stream(prompt, timeout=target.patience(DECODER), **options)
        return tuple(token for part in parts for token in part.token_ids) == expected

    return _ending(ask, DECODER)


def samples_seeded(draw: random.Random, target: Target) -> Ending:
    """Several samples of one prompt as a whole, with a seed."""
    prompt, expected = draw.choice(list(target.known.samples.items()))
    count = draw.randint(2, NUM_SAMPLES)
    client = target.client(DECODER, draw.choice(PROTOCOLS))

    def ask() -> bool:
        answers = client.samples(
            prompt,
            count,
            max_tokens=SAMPLE_TOKENS,
            timeout=target.patience(DECODER),
            **SEEDED,
        )
        return [each.token_ids for each in answers] == list(expected[:count])

    return _ending(ask, DECODER)


def sample(draw: random.Random, target: Target) -> Ending:
    """Several samples with log probabilities; only their length is known."""
    prompt = draw.choice(list(target.known.continuations))
    client = target.client(DECODER, draw.choice(PROTOCOLS))
    count, tokens = draw.randint(1, 4), draw.randint(1, MAX_TOKENS)

    def ask() -> bool:
        answers = client.samples(
            prompt,
            count,
            max_tokens=tokens,
            temperature=draw.uniform(0.1, 2.0),
            top_p=draw.uniform(0.1, 1.0),
            seed=draw.randrange(2**31),
            logprobs=draw.choice((None, 0, 3)),
            ignore_eos=True,
            timeout=target.patience(DECODER),
        )
        return [len(each.token_ids) for each in answers] == [tokens] * count

    return _ending(ask, DECODER)


def translate(draw: random.Random, target: Target) -> Ending:
    """The best translation of a text."""
    text, expected = draw.choice(list(target.known.translations.items()))
    client = target.client(TRANSLATOR, draw.choice(PROTOCOLS))

    def ask() -> bool:
        [answer] = client.translate([text], timeout=target.patience(TRANSLATOR), **BEAMS)
        return answer.text == expected

    return _ending(ask, TRANSLATOR)


def _embed(
    draw: random.Random,
    target: Target,
    model: str,
    *,
    rows: int = 0,
    refusals: tuple[type[VarlenClientError], ...] = (),
    **options: Any,
) -> Ending:
    known: Vectors = target.known.encoders[model]
    count = rows or draw.choice((1, 1, 1, 2, _MOST_ROWS))
    chosen = draw.choices(range(len(known.texts)), k=count)
    inputs, answers = draw.choice(((known.texts, known.of_texts), (known.ids, known.of_ids)))
    client = target.client(model, draw.choice(PROTOCOLS))

    def ask() -> bool:
        sent: list[Any] = [inputs[row] for row in chosen]
        vectors = client.embed(sent, truncate=True, timeout=target.patience(model), **options)
        return known.is_right(vectors, np.stack([answers[row] for row in chosen]))

    return _ending(ask, model, rows=count, refusals=refusals)


def _ending(
    ask: Callable[[], bool],
    model: str,
    *,
    rows: int = 1,
    refusals: tuple[type[VarlenClientError], ...] = (),
) -> Ending:
    """Return how a request of varlen's client ended; `ask` returns whether the answer is right."""
    try:
        is_right = ask()
    except refusals as error:
        # a deadline passes at the client too, which tells the server only over gRPC
        end: End = "left" if isinstance(error, (RequestTimeout, DeadlineMissed)) else "refused"
        return Ending(end, model, "UNAVAILABLE", str(error), rows, is_ours=True)
    except RequestTimeout as error:
        return Ending("lost", model, "DEADLINE_EXCEEDED", str(error), rows)
    except VarlenClientError as error:
        return Ending("wrong", model, type(error).__name__, str(error), rows)
    if is_right:
        return Ending("right", model, rows=rows)
    return Ending("wrong", model, message="the answer is another one", rows=rows)
