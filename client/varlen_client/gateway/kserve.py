"""`/v2/models/NAME/infer` for embeddings, in the form of KServe that `triton/` models of litellm use.

litellm sends `input_text` BYTES [texts], which a server with `max_batch_size` refuses: it expects [texts, 1]. And it
takes every output of the answer for vectors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from pydantic import Field, StrictInt, StrictStr
from starlette.responses import Response

from varlen_client.errors import InvalidRequest
from varlen_client.gateway.bodies import MAX_INPUTS, Fields, ListOf
from varlen_client.gateway.body_route import read_body
from varlen_client.gateway.embeddings import VectorFields
from varlen_client.gateway.json_writing import Blocks, Rows, json_response
from varlen_client.gateway.models import Gateway
from varlen_client.gateway.unserved_fields import OUTPUTS
from varlen_client.tasks import EMBED

_OUTPUT = "sentence_embedding"


class InputTensor(Fields):
    """The texts."""

    noun = "input"

    name: Literal["input_text", "text"]
    datatype: Literal["BYTES"]
    shape: ListOf[StrictInt]
    data: StrictStr | Annotated[ListOf[StrictStr], Field(min_length=1)]
    """One text without a list is litellm's, whose shape is its length; it may be empty."""

    def rows(self) -> list[str]:
        """Return one text per row.

        Raises:
            InvalidRequest: they are not as many as `shape` says, or more than MAX_INPUTS.
        """
        if isinstance(self.data, str):
            return [self.data]
        count = len(self.data)
        if self.shape not in ([count], [count, 1]) or count > MAX_INPUTS:
            raise InvalidRequest(
                f"{self.name} has the shape {self.shape} and {count} texts; allowed: [texts] or [texts, 1],"
                f" with 1 to {MAX_INPUTS} texts"
            )
        return self.data


class OutputName(Fields):
    """A requested output."""

    noun = "output"
    unserved = OUTPUTS

    name: Literal["sentence_embedding"]


class InferParameters(VectorFields):
    """Parameters of a request; as at the server, an unknown one is refused."""

    is_strict = True


class InferBody(Fields):
    """A request to `/v2/models/NAME/infer`."""

    id: StrictStr | None = None
    inputs: ListOf[InputTensor] = Field(min_length=1, max_length=1)
    outputs: ListOf[OutputName] = Field(default=[], max_length=1)
    parameters: InferParameters = InferParameters()


def add_kserve_route(app: FastAPI, gateway: Gateway) -> None:
    """Add the route."""

    @app.post("/v2/models/{name}/infer", tags=["KServe"])
    async def infer(name: str, request: Request) -> Response:
        """Embed the texts of the tensor `input_text`; the answer has one output, in JSON."""
        # litellm sends no Content-Type, without which FastAPI reads no body
        body = await read_body(InferBody, await request.body(), gateway.ignore_fields)
        _, vectors, _ = await gateway.answer(
            name,
            EMBED,
            body.inputs[0].rows(),
            text_fields=body.parameters,
            **body.parameters.options(),
        )
        answer: dict[str, Any] = {
            "model_name": name,
            "model_version": "1",
            "outputs": Rows(
                [
                    {
                        "name": _OUTPUT,
                        "datatype": "FP32",
                        "shape": list(vectors.shape),
                        "data": Blocks(vector.tolist() for vector in vectors),
                    }
                ]
            ),
        }
        return json_response(answer if body.id is None else {"id": body.id, **answer})
