"""A model's counters on the server's metrics page, and what happened between two looks at them."""

from __future__ import annotations

import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

# Our counters reach the page twice a second.
_FLUSH_SECONDS = 1.5
_LOOK_SECONDS = 0.05
_LINE = re.compile(r"(\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_OURS = "varlen_requests_total"


@dataclass(frozen=True, slots=True)
class Counted:
    """What a system counted during a load; None where it does not count.

    Attributes:
        mean_batch: sequences that ran together.
        padding_share: padding over all tokens that ran.
        prediction_error: predicted over actual seconds of all batches, less 1.
    """

    mean_batch: float | None = None
    padding_share: float | None = None
    prediction_error: float | None = None


def model_metrics(url: str, model: str) -> dict[str, float]:
    """Return a model's series by name, summed over their other labels; without the buckets of histograms."""
    with urllib.request.urlopen(url, timeout=10) as page:  # noqa: S310 - a server on loopback
        text = page.read().decode()
    found: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        labels = dict(_LABEL.findall(match[2])) if match else {}
        if match and labels.get("model") == model and "le" not in labels:
            found[match[1]] += float(match[3])
    return dict(found)


def metrics_after(
    url: str, model: str, before: Mapping[str, float], answered: int
) -> dict[str, float]:
    """Return a model's series once they hold so many more requests than before, or soon after."""
    deadline = time.monotonic() + _FLUSH_SECONDS
    while True:
        after = model_metrics(url, model)
        ours = after.get(_OURS)
        if ours is None or ours - before.get(_OURS, 0) >= answered or time.monotonic() > deadline:
            return after
        time.sleep(_LOOK_SECONDS)


def counted(before: Mapping[str, float], after: Mapping[str, float]) -> Counted:
    """Return what happened between two looks."""

    def grown(name: str) -> float | None:
        return after[name] - before.get(name, 0.0) if name in after else None

    batches = _over(grown("varlen_batch_sequences_sum"), grown("varlen_batch_sequences_count"))
    if _OURS not in after:
        # a batch of a plain python backend is one call of `execute`
        batches = _over(grown("nv_inference_count"), grown("nv_inference_exec_count"))
    padding, tokens = grown("varlen_padding_tokens_total"), grown("varlen_tokens_total")
    predicted = grown("varlen_batch_predicted_seconds_sum")
    ratio = _over(predicted, grown("varlen_batch_seconds_sum"))
    return Counted(
        mean_batch=batches,
        padding_share=None if padding is None else _over(padding, padding + (tokens or 0.0)),
        prediction_error=None if ratio is None else ratio - 1,
    )


def _over(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole
