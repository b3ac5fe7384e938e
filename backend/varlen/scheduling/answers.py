"""The answers of generated sequences: their writers, and what the output of a step adds."""

import logging
import math
from collections.abc import Iterable
from itertools import chain, repeat
from typing import cast

from varlen.errors import EngineError
from varlen.scheduling.batch import Event, SequenceFailure, SequenceOutput
from varlen.scheduling.choices import BeamAnswer, SampledToken
from varlen.scheduling.sequence import GeneratedSequence, NewWriter, RequestState

_log = logging.getLogger(__name__)

_TEXT_FAILED = "the text of the answer could not be made; the server's log says why"
# Where a search has found fewer answers than the request asks for.
_NO_ANSWER = BeamAnswer((), -math.inf, "length")


def add_writers(request: RequestState, new_writer: NewWriter) -> None:
    """Give each sequence of a request its writer.

    Raises:
        EngineError: a writer could not be made.
    """
    try:
        for sequence in cast(tuple[GeneratedSequence, ...], request.sequences):
            sequence.writer = new_writer(sequence)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        # a panic of the tokenizers library is no Exception
        _log.exception("the text of an answer could not be made; its request fails")
        raise EngineError(_TEXT_FAILED) from None


def append_token(sequence: GeneratedSequence, token: SampledToken) -> Event:
    """Append a token to a sequence; return what it adds to the answer."""
    sequence.token_ids.append(token.token_id)
    if token.error is not None:
        return SequenceFailure(sequence, token.error)
    return _write(sequence, token)


def write_answers(
    sequences: Iterable[GeneratedSequence], answers: Iterable[BeamAnswer]
) -> list[Event]:
    """Return the answers of a search that has ended, one for each sequence."""
    found = chain(answers, repeat(_NO_ANSWER))
    return [_write(*each) for each in zip(sequences, found, strict=False)]


def _write(sequence: GeneratedSequence, output: SampledToken | BeamAnswer) -> Event:
    """Return what a token, or the end of a search, adds to an answer."""
    try:
        part = sequence.writer.write(output)
    except BaseException:
        # a panic of the tokenizers library is no Exception
        _log.exception("the text of an answer could not be made; its request fails")
        return SequenceFailure(sequence, EngineError(_TEXT_FAILED))
    if part.finish_reason is not None:
        sequence.finish()
    return SequenceOutput(sequence, part)
