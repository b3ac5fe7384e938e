"""Sends the requests of a call to a model, and joins their outputs."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy.typing as npt

from varlen_client.row_call import RowCall
from varlen_client.row_options import RowRequests
from varlen_client.row_outputs import RowTask
from varlen_client.transport.session import Session
from varlen_client.wire import Floats, InferRequest, infer_requests

DEFAULT_ROWS_PER_REQUEST = 32

# The outputs of a request, or of a call.
Outputs: TypeAlias = tuple[npt.NDArray[Any], ...]


class RowSender:
    """Sends rows to one model.

    Args:
        session: of the model.
        rows_per_request: None is 32, or the model's max_batch_size if that is less.
        concurrency: maximum requests of one call in flight.
    """

    def __init__(self, session: Session, rows_per_request: int | None, concurrency: int) -> None:
        self._session = session
        self._rows_per_request = rows_per_request
        self._concurrency = concurrency

    async def matrices(self, requests: RowRequests) -> Outputs:
        """Return each output of all rows in one array, [rows, width]."""
        answers, task = await self._send(requests, self._rows_per_request)
        return task.joined(answers)

    async def counted(self, requests: RowRequests) -> tuple[Outputs, int | None]:
        """Return the outputs of `matrices`, and the number of tokens of all rows.

        It is None if the model does not count them.
        """
        answers, task = await self._send(requests, self._rows_per_request, counts_tokens=True)
        outputs = task.joined(answers)
        if not task.counts_tokens:
            return outputs, None
        return outputs[:-1], int(outputs[-1].sum())

    async def arrays(self, requests: RowRequests) -> list[Floats]:
        """Return the only output of each row in its own array, without the batch dimension."""
        answers, _ = await self._send(requests, rows_per_request=1)
        return [output[0].copy() for (output,) in answers]

    async def answers(self, requests: RowRequests) -> list[Outputs]:
        """Return the outputs of each request, whose rows are padded."""
        answers, _ = await self._send(requests, self._rows_per_request)
        return answers

    async def counted_answers(self, requests: RowRequests) -> tuple[list[Outputs], int | None]:
        """Return the outputs of `answers`, and the number of tokens, as `counted`."""
        answers, task = await self._send(requests, self._rows_per_request, counts_tokens=True)
        if not task.counts_tokens:
            return answers, None
        return [each[:-1] for each in answers], sum(int(each[-1].sum()) for each in answers)

    async def _send(
        self,
        requests: RowRequests,
        rows_per_request: int | None,
        *,
        counts_tokens: bool = False,
    ) -> tuple[list[Outputs], RowTask]:
        """Return the outputs of each request, in order, and the task with the model's widths.

        Args:
            requests: of the call.
            rows_per_request: None is the default.
            counts_tokens: see `RowTask.counting_tokens`.
        """
        rows = requests.rows
        call = RowCall(
            requests.task.method,
            len(rows),
            timeout=requests.timeout,
            on_progress=requests.on_progress,
        )

        async def send_all() -> tuple[list[Outputs], RowTask]:
            info = await self._session.model_info(call.deadline)
            task = requests.task.counting_tokens(info) if counts_tokens else requests.task
            task = task.of_model(info)
            # An explicit rows_per_request above max_batch_size is sent as it is: the server refuses it
            # with its own message.
            default = min(DEFAULT_ROWS_PER_REQUEST, info.max_batch_size)
            ranges = rows.split(rows_per_request or default)

            async def send(request: InferRequest) -> Outputs:
                arrays = await self._session.infer(info, request, call.deadline)
                return task.checked(arrays, len(request.rows))

            sent = infer_requests(rows, ranges, task.names, requests.parameters)
            answers = await call.send_all(
                ((request.rows, request) for request in sent), send, concurrency=self._concurrency
            )
            return answers, task

        return await call.within_timeout(send_all())
