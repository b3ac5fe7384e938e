"""Summaries of samples: percentiles, medians with their spread, and ratios within a round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some samples, their 20th and 80th percentile, and their number."""

    median: float
    p20: float
    p80: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Return the spread of samples, at least one."""
        low, median, high = np.percentile(samples, [20, 50, 80]).tolist()
        return cls(median, low, high, len(samples))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the least value that `percent` % of the values do not exceed; None of none."""
    return float(np.percentile(values, percent, method="inverted_cdf")) if len(values) else None


def percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    """Return a percentile of seconds in milliseconds; None of none."""
    value = percentile(seconds, percent)
    return None if value is None else 1000 * value


def paired_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over rounds of a value over the base of the same round."""
    return statistics.median(a / b for a, b in zip(values, base, strict=True))


def flatness(samples: Sequence[float]) -> float:
    """Return the range of samples as a share of their median."""
    return (max(samples) - min(samples)) / statistics.median(samples)


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return part over whole; None if one is missing or the whole is 0."""
    return None if part is None or not whole else part / whole


def worst(choose: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """Return what `choose`, min or max, takes of the known values; None of none."""
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def rounded(value: float | None, digits: int = 4) -> float | None:
    """Return a rounded figure; None stays None."""
    return None if value is None else round(value, digits)


def shown(value: object, form: str) -> str:
    """Return a figure as a table shows it; empty for None."""
    return "" if value is None else format(value, form)
