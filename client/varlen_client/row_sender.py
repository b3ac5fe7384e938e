"""Sends the rows of a call to a model in requests, and returns their outputs."""

from __future__ import annotations

from typing import Any

from varlen_client.row_call import RowCall
from varlen_client.row_outputs import Output, RowAnswers
from varlen_client.tasks import Options, RowTask
from varlen_client.transport.session import Session
from varlen_client.wire import InferRequest, Inputs, Pairs, read_inputs

DEFAULT_ROWS_PER_REQUEST = 32


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

    async def send(
        self,
        task: RowTask[Any],
        inputs: Inputs | Pairs,
        options: Options,
        *,
        counts_tokens: bool = False,
    ) -> RowAnswers:
        """Return the outputs of all requests of a call.

        Args:
            task: of the call.
            inputs: rows that the caller gave.
            options: those that were given, of `task.options`.
            counts_tokens: whether the number of tokens is requested, if the model has it.

        Raises:
            TypeError: there is no such option.
            VarlenClientError: see errors.py.
        """
        requested = task.requested(options)
        rows = read_inputs(inputs, takes_pairs=task.takes_pairs)
        parameters = task.parameters(options)
        call = RowCall(
            task.method,
            len(rows),
            timeout=options.get("timeout"),
            on_progress=options.get("on_progress"),
        )

        async def send_all() -> RowAnswers:
            info = await self._session.model_info(call.deadline)
            outputs = task.of_model(requested, info, counts_tokens=counts_tokens)
            # An explicit rows_per_request above max_batch_size is sent as it is: the server refuses it
            # with its own message.
            default = min(DEFAULT_ROWS_PER_REQUEST, info.max_batch_size)
            size = 1 if task.row_by_row else self._rows_per_request or default

            async def send(request: InferRequest) -> dict[str, Output]:
                arrays = await self._session.infer(info, request, call.deadline)
                return {
                    output.name: output.checked(arrays.get(output.name), len(request.rows))
                    for output in outputs
                }

            names = tuple(output.name for output in outputs)
            # the tensors of a request are built only when it is sent, to save memory
            requests = (
                (each, InferRequest(each, rows.tensors(each), names, parameters))
                for each in rows.split(size)
            )
            found = await call.send_all(requests, send, concurrency=self._concurrency)
            return RowAnswers(outputs, options, found)

        return await call.within_timeout(send_all())
