"""Translations on the wire: a request to generate that asks for scores, and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from varlen_client.errors import InvalidRequest, ServerError
from varlen_client.generation import FinishReason, Generation, Response, read_generations

# Names of the number of answers in the sampling parameters.
_COUNTS = ("n", "num_return_sequences")


@dataclass(frozen=True, slots=True)
class Translation:
    """The best translation of a text, and the next best ones.

    Attributes:
        text: the translation.
        token_ids: its tokens.
        score: sum of the log probabilities of its tokens, divided by the length penalty.
        finish_reason: whether the translation ended, or `max_tokens` was reached.
        alternatives: the next best translations, best first; without alternatives of their own. There are fewer than
            asked for if the options leave fewer.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    alternatives: tuple[Translation, ...] = ()


def search_options(
    options: Mapping[str, Any], *, num_beams: int | None, n_best: int, max_tokens: int | None
) -> dict[str, Any]:
    """Return the sampling parameters of a translation.

    Raises:
        InvalidRequest: n_best is no number from 1, or another option has the number of answers too.
    """
    if not isinstance(n_best, int) or n_best < 1:
        raise InvalidRequest(f"n_best is {n_best!r}; allowed: whole numbers from 1")
    if given := [name for name in _COUNTS if name in options]:
        raise InvalidRequest(f"{given[0]} is {options[given[0]]!r}; n_best is this number here")
    limits = {"num_beams": num_beams, "max_tokens": max_tokens}
    return {
        **options,
        **{name: value for name, value in limits.items() if value is not None},
        "n": n_best,
    }


def read_translation(responses: Sequence[Response], n_best: int) -> Translation:
    """Return the translation of a text, given all responses to its request.

    Raises:
        ServerError: a response cannot be read, or a translation has no end.
    """
    answers = read_generations(responses, n_best)
    try:
        scores = [float(score) for score in responses[-1]["score"]]
        made = [_translation(*each) for each in zip(answers, scores, strict=True)]
    except (KeyError, ValueError, TypeError) as error:
        raise ServerError(f"the response cannot be read: {error!r}") from error
    best, *others = made
    # where the search found no more, the server sends answers without tokens that have no end
    found = (each for each in others if each.token_ids or each.finish_reason == "stop")
    return replace(best, alternatives=tuple(found))


def _translation(answer: Generation, score: float) -> Translation:
    return Translation(answer.text, answer.token_ids, score, answer.finish_reason)
