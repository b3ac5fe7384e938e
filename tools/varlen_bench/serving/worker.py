"""The load generator in a process of its own: reads orders as JSON lines, answers each with one JSON line.

Its interpreter is busy with nothing else, and its collector of garbage waits until an order is done.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Literal

from varlen_bench.serving.arrivals import token_ids
from varlen_bench.serving.client import GrpcSender
from varlen_bench.serving.generator import Bounds, Offering, offer, saturate


@dataclass(frozen=True, slots=True)
class Order:
    """What to send where.

    Attributes:
        do: `offer` sends at the times `dues`; `saturate` keeps `outstanding` requests in flight for `seconds`.
        address, model: of the server.
        lengths: of the requests, in tokens.
        vocabulary: number of token ids.
        seed: of the ids.
        outstanding, patience, late_seconds, late_most: see `Bounds`.
        parameters: of every request.
    """

    do: Literal["offer", "saturate"]
    address: str
    model: str
    lengths: list[int]
    vocabulary: int
    seed: int
    outstanding: int
    dues: list[float] = field(default_factory=list)
    seconds: float = 0.0
    patience: float = 60.0
    late_seconds: float | None = None
    late_most: int = 0
    parameters: Mapping[str, Any] = field(default_factory=dict)


async def carry_out(order: Order) -> Offering:
    """Return what became of the requests of an order."""
    ids = token_ids(order.lengths, order.vocabulary, order.seed)
    async with GrpcSender(order.address, order.model, ids, order.parameters) as sender:
        if order.do == "saturate":
            return await saturate(len(ids), sender.send, order.outstanding, order.seconds)
        late = float("inf") if order.late_seconds is None else order.late_seconds
        bounds = Bounds(order.outstanding, order.patience, late, order.late_most)
        return await offer(order.dues, sender.send, bounds)


def serve(orders: IO[str], answers: IO[str]) -> None:
    """Answer orders until their stream ends. The first line says that the process is ready."""
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in orders:
        gc.collect()
        gc.disable()
        offering = asyncio.run(carry_out(Order(**json.loads(line))))
        gc.enable()
        print(json.dumps(offering.to_json()), file=answers, flush=True)


if __name__ == "__main__":
    # Libraries print to stdout: keep the pipe for answers and send the rest to stderr.
    _answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, _answers)
