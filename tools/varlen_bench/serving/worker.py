"""The process that sends requests over gRPC and answers with the row of each load.

Its interpreter does nothing else, and its garbage collector waits until a load is done.
"""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from tritonclient.grpc import InferInput, InferRequestedOutput, aio
from tritonclient.utils import InferenceServerException

from varlen_bench.harness.generator import Outcome, offer, saturate
from varlen_bench.harness.worker import Message, run_worker
from varlen_bench.serving.loads import Load
from varlen_bench.serving.rows import Row, load_row
from varlen_bench.serving.systems import INPUT, OUTPUT

# A request that names no outputs gets all that a model has, and peers have one.
_WANTED = [InferRequestedOutput(OUTPUT)]
# gRPC's words for a lost connection; a full queue has the same status.
_CONNECTION = re.compile(r"connect|socket|goaway|stream removed|recvmsg", re.IGNORECASE)


def outcome_of(error: InferenceServerException) -> Outcome:
    """Return whether an error is a refusal, which a caller may retry, or a failure."""
    message, status = str(error.message()), str(error.status())
    is_refusal = "UNAVAILABLE" in status and not _CONNECTION.search(message)
    return "refused" if is_refusal else "failed"


def start(argument: Message) -> Callable[[Message], Message]:
    """Return the function that answers orders for `models`: a `load`, or `requests` to embed."""
    address, vocabulary = argument["address"], argument["vocabulary"]

    def handle(order: Message) -> Message:
        if "requests" in order:
            return asyncio.run(_embed(address, order["models"], order["requests"]))
        load = Load.from_json(order["load"])
        gc.collect()
        gc.disable()
        row = asyncio.run(_offer(address, order["models"], load, load.token_ids(vocabulary)))
        gc.enable()
        return asdict(row)

    return handle


async def _offer(
    address: str, models: Sequence[str], load: Load, requests: Sequence[Sequence[int]]
) -> Row:
    # built before they are due
    inputs = [_inputs(ids) for ids in requests]
    parameters = {} if load.deadline_ms is None else {"deadline_ms": load.deadline_ms}
    async with aio.InferenceServerClient(address) as client:

        async def send(number: int) -> tuple[Outcome, str]:
            try:
                model = models[number % len(models)]
                await client.infer(model, inputs[number], outputs=_WANTED, parameters=parameters)
            except InferenceServerException as error:
                return outcome_of(error), str(error)
            return "ok", ""

        if load.rate is None:
            record = await saturate(
                len(requests), send, in_flight=load.max_waiting, seconds=load.end
            )
        else:
            record = await offer(
                load.due_times(), send, max_waiting=load.max_waiting, max_late=load.max_late
            )
    return load_row(load, models[0], record)


async def _embed(address: str, models: Sequence[str], requests: Sequence[Sequence[int]]) -> Message:
    """Return the vectors of requests that are sent at once, or the error of one."""
    async with aio.InferenceServerClient(address) as client:
        answers = [
            client.infer(models[number % len(models)], _inputs(ids), outputs=_WANTED)
            for number, ids in enumerate(requests)
        ]
        try:
            results = await asyncio.gather(*answers)
        except InferenceServerException as error:
            return {"error": str(error)}
    return {"vectors": [result.as_numpy(OUTPUT)[0].tolist() for result in results]}


def _inputs(ids: Sequence[int]) -> list[Any]:
    tensor = InferInput(INPUT, [1, len(ids)], "INT64")
    return [tensor.set_data_from_numpy(np.asarray([ids], dtype=np.int64))]


if __name__ == "__main__":
    run_worker(start)
