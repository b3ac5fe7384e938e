"""Whether the counters of the server agree with what clients saw.

A request whose client left may have ended in any way, or not have arrived, so counts have bounds: what clients know
for sure, and that plus the requests whose end they do not know.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.server.serving import metrics
from varlen_tools.local_server import LocalServer

from .endings import ModelEndings
from .models import ENCODERS

_SETTLE_SECONDS = 60.0
_OUTCOMES = "varlen_requests_total "
_SERVER_COUNT = "nv_inference_request_success"
# Gauges of work in progress.
_WORK = (
    "varlen_queued_requests",
    "varlen_queued_tokens",
    "varlen_queued_text_bytes",
    "varlen_running_sequences",
    "varlen_waiting_sequences",
    "varlen_kv_blocks_used",
    "varlen_kv_blocks_reserved",
)
# gRPC code of an error that the backend gives -> outcome that it counts
_OUTCOME_OF = {"INVALID_ARGUMENT": "invalid", "UNAVAILABLE": "refused", "INTERNAL": "failed"}

Series = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Counters:
    """The series of some models at one time, by model."""

    series: Mapping[str, Series]

    @classmethod
    def settled(cls, server: LocalServer, models: tuple[str, ...]) -> tuple[Counters, list[str]]:
        """Return the counters once all requests are counted, and what never ended."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            found = {model: metrics(server, model) for model in models}
            busy = [problem for model in models for problem in _unsettled(model, found[model])]
            if not busy or time.monotonic() > deadline:
                return cls(found), busy
            time.sleep(0.5)

    def disagreements(
        self, after: Counters, endings: Mapping[str, ModelEndings], *, is_complete: bool
    ) -> list[str]:
        """Return where later counters do not agree with the ends that clients saw.

        Args:
            after: counters after all these requests.
            endings: ends of the requests since these counters, by model.
            is_complete: whether `endings` has every request; mutated ones may have reached any model.
        """
        return [
            problem
            for model in self.series
            for problem in _disagreements(
                model, self.series[model], after.series[model], endings.get(model, ModelEndings()),
                is_complete=is_complete,
            )
        ]  # fmt: skip


def _unsettled(model: str, series: Series) -> Iterator[str]:
    counted = sum(value for name, value in series.items() if name.startswith(_OUTCOMES))
    passed_on = series[_SERVER_COUNT]
    if counted != passed_on:
        yield f"{model}: the server passed on {passed_on:g} requests, {counted:g} got a final response"
    for name in _WORK:
        if series[name]:
            yield f"{model}: {name} is {series[name]:g} without a request"


def _disagreements(
    model: str, before: Series, after: Series, endings: ModelEndings, *, is_complete: bool
) -> Iterator[str]:
    def grown(name: str) -> int:
        return round(after[name] - before[name])

    requests, rows = endings.requests, endings.rows
    answers = requests["right"] + requests["answered"]
    unknown = requests["left"] + requests["lost"]
    limits = {"ok": (answers, answers + unknown), "cancelled": (0, unknown)}
    for code, outcome in _OUTCOME_OF.items():
        most = endings.errors[code] + unknown
        limits[outcome] = (endings.our_errors[code], most)
    for outcome, (least, most) in limits.items():
        count = grown(_OUTCOMES + outcome)
        if count < least or (is_complete and count > most):
            yield f"{model}: counted {count} requests as {outcome}; clients saw {least} to {most}"
    if model in ENCODERS and not after["varlen_response_cache_entries"]:
        least = rows["right"] + rows["answered"]
        # a large answer may be refused after the work
        most = (
            least
            + rows["left"]
            + rows["lost"]
            + (rows["refused"] if endings.errors["INTERNAL"] else 0)
        )
        count = grown("varlen_sequences_total")
        if count < least or (is_complete and count > most):
            yield f"{model}: {count} sequences ran; clients saw {least} to {most} rows"
    if after["varlen_arena_reserved_bytes"] > after["varlen_arena_capacity_bytes"]:
        yield f"{model}: the arena is larger than its limit"
