"""Packs what the searches of a step need, for the ops of `varlen_kernels.reference.beam_search`."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.request.request import Int32Array
from varlen.scheduling.batch import Chunk
from varlen.scheduling.choices import DeviceChoice
from varlen_kernels.reference.beam import NO_TOKEN
from varlen_kernels.reference.beam_search import ENDS_WHEN_FULL, IS_LAST, NOT_GIVEN

# Arguments of an op by name.
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]


def beam_arrays(chunks: Sequence[Chunk]) -> Arrays:
    """Return the arguments of `follow_beams`; nothing is given by the host. Empty without beams."""
    rows: list[tuple[int, ...]] = []
    row = beam = 0
    for each in chunks:
        if each.beams:
            assert each.search is not None
            rows.append((each.search, row, each.beams, each.num_generated, beam))
            beam += each.beams
        # a chunk of several tokens comes after all beams
        row += each.beams or 1
    if not rows:
        return {}
    searches = np.array(rows, np.int32)
    return {"searches": searches, "given": np.full((beam, 2), NOT_GIVEN, np.int32)}


def search_arrays(chunks: Sequence[Chunk], choice: DeviceChoice) -> Arrays:
    """Return what searches take their steps with; empty if none does."""
    rows: list[tuple[int, ...]] = []
    ends: list[int] = []
    banned: list[Int32Array] = []
    logit_rows: list[int] = []
    divisors: list[tuple[float, float]] = []
    rules, logit_row, row, beam, width = iter(choice.searches), 0, 0, 0, 0
    for each in chunks:
        count = each.num_logit_rows
        if each.search is not None and each.samples and (own := next(rules, None)) is not None:
            flags = IS_LAST * own.is_last | ENDS_WHEN_FULL * own.ends_when_full
            forced = NO_TOKEN if own.forced is None else own.forced
            of_ends = len(ends), len(ends) + len(own.end_ids)
            length = each.num_generated + 1
            rows.append(
                (each.search, row, count, own.num_beams, length, flags, forced, *of_ends, beam)
            )
            ends += own.end_ids
            divisors.append((own.divisor, own.best_divisor))
            logit_rows += range(logit_row, logit_row + count)
            banned += [own.banned] * count
            row, beam = row + count, beam + own.num_beams
            width = max(width, own.num_beams + len(own.end_ids))
        logit_row += count
    if not rows:
        return {}
    sizes = [len(each) for each in banned]
    return {
        "searches": np.array(rows, np.int32),
        "divisors": np.array(divisors, np.float32),
        "ends": np.array(ends, np.int32),
        "rows": np.array(logit_rows, np.int32),
        "banned_rows": np.repeat(np.arange(row, dtype=np.int32), sizes),
        "banned_tokens": np.concatenate(banned),
        "sizes": np.array([width, beam, choice.renormalizes], np.int32),
    }
