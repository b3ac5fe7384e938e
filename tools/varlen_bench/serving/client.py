"""Requests over gRPC: built before they are due, sent on the event loop, told apart by how they end."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from varlen_bench.serving.generator import Outcome

INPUT, OUTPUT = "input_ids", "sentence_embedding"
# What gRPC says of a connection that is gone, under the status that servers also use for a full queue.
_CONNECTION = re.compile(r"connect|socket|goaway|stream removed|recvmsg", re.IGNORECASE)


def outcome_of(error: Exception) -> Outcome:
    """Return whether an error is a refusal, which a caller may send again, or a failure."""
    message, status = (getattr(error, name, str)() or "" for name in ("message", "status"))
    is_refusal = "UNAVAILABLE" in str(status) and not _CONNECTION.search(str(message))
    return "refused" if is_refusal else "failed"


class GrpcSender:
    """Sends requests of token ids to one model; use it inside `async with`.

    Args:
        address: host and port.
        model: its name.
        requests: ids of each request, one sequence.
        parameters: of every request.
    """

    def __init__(
        self,
        address: str,
        model: str,
        requests: Sequence[Sequence[int]],
        parameters: Mapping[str, Any],
    ) -> None:
        from tritonclient.grpc import aio

        self._client = aio.InferenceServerClient(address)
        self._model = model
        self._requests = [[_tensor(ids)] for ids in requests]
        self._parameters = dict(parameters)

    async def __aenter__(self) -> GrpcSender:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.close()

    async def send(self, number: int) -> tuple[Outcome, str]:
        """Send a request and return what became of it."""
        from tritonclient.utils import InferenceServerException

        try:
            await self._client.infer(
                self._model, self._requests[number], parameters=self._parameters
            )
        except InferenceServerException as error:
            return outcome_of(error), str(error)
        return "ok", ""


def _tensor(ids: Sequence[int]) -> Any:
    from tritonclient.grpc import InferInput

    tensor = InferInput(INPUT, [1, len(ids)], "INT64")
    return tensor.set_data_from_numpy(np.asarray([ids], dtype=np.int64))
