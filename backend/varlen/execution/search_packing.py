"""Packs what the searches of a step need, for the ops of `varlen_kernels.reference.beam_search`."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from varlen.request.request import Int32Array
from varlen.scheduling.batch import Chunk
from varlen.scheduling.choices import DeviceChoice
from varlen_kernels.reference.beam import MAX_WIDTH, NO_TOKEN
from varlen_kernels.reference.beam_search import ENDS_WHEN_FULL, IS_LAST, NOT_GIVEN

_LARGEST, _LEAST_DIVISOR = np.finfo(np.float32).max, np.finfo(np.float32).tiny
# Candidates of a beam are a multiple of this, so that few kernels are compiled for the language Triton.
_WIDTHS = 4
# Arguments of an op by name.
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]


def beam_arrays(chunks: Sequence[Chunk]) -> Arrays:
    """Return the arguments of `follow_beams`; nothing is given by the host. Empty without beams."""
    if not any(each.beams for each in chunks):
        return {}
    rows: list[tuple[int, ...]] = []
    places: list[int] = []
    row = 0
    for each in chunks:
        if each.beams:
            rows.append((row, each.beams, each.num_generated, len(places)))
            places += each.beam_places
        # a chunk of several tokens comes after all beams
        row += each.beams or 1
    return {
        "searches": np.array(rows, np.int32),
        "places": np.array(places, np.int32),
        "given": np.full((len(places), 2), NOT_GIVEN, np.int32),
    }


def search_arrays(chunks: Sequence[Chunk], choice: DeviceChoice) -> Arrays:
    """Return what searches take their steps with; empty if none does."""
    if not any(choice.searches):
        return {}
    rows: list[tuple[int, ...]] = []
    ends: list[int] = []
    banned: list[Int32Array] = []
    logit_rows: list[int] = []
    divisors: list[tuple[float, float]] = []
    places: list[int] = []
    rules, logit_row, row, width = iter(choice.searches), 0, 0, 0
    for each in chunks:
        count = each.num_logit_rows
        if each.beam_places and each.samples and (own := next(rules, None)) is not None:
            flags = IS_LAST * own.is_last | ENDS_WHEN_FULL * own.ends_when_full
            forced = NO_TOKEN if own.forced is None else own.forced
            of_ends = len(ends), len(ends) + len(own.end_ids)
            length = each.num_generated + 1
            beams = len(places)
            rows.append((row, count, own.num_beams, length, flags, forced, *of_ends, beams))
            places += each.beam_places
            ends += own.end_ids
            divisors.append((own.divisor, own.best_divisor))
            logit_rows += range(logit_row, logit_row + count)
            banned += [own.banned] * count
            row += count
            width = max(width, own.num_beams + len(own.end_ids))
        logit_row += count
    sizes = [len(each) for each in banned]
    width = min(-(-width // _WIDTHS) * _WIDTHS, MAX_WIDTH)
    return {
        "searches": np.array(rows, np.int32),
        "places": np.array(places, np.int32),
        # fp32 holds no larger ones, and none may be 0
        "divisors": np.clip(np.array(divisors), _LEAST_DIVISOR, _LARGEST).astype(np.float32),
        "ends": np.array(ends, np.int32),
        "rows": np.array(logit_rows, np.int32),
        "banned_rows": np.repeat(np.arange(row, dtype=np.int32), sizes),
        "banned_tokens": np.concatenate(banned),
        "sizes": np.array([width, len(places), choice.renormalizes], np.int32),
    }
