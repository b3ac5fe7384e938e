"""Python models around ours: steps of an ensemble, and callers (BLS).

The tensors in config.pbtxt say which: text in and text out is a step before, scores in are a step after, and a caller
has the name of a model in its parameters. It needs numpy only.
"""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers each request with its one output."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the configuration."""
        config = json.loads(args["model_config"])
        self._input, self._output = config["input"][0]["name"], config["output"][0]["name"]
        called = config["parameters"].get("called", {"string_value": ""})["string_value"]
        self._called = called.split(",") if called else []

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return a response for each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        given = pb_utils.get_input_tensor_by_name(request, self._input).as_numpy()
        try:
            made = self._call(given) if self._called else _step(given)
        except ValueError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse([pb_utils.Tensor(self._output, made)])

    def _call(self, given: Any) -> Any:
        """Return what the called model answers; the parts of a stream are put together."""
        model, name, output, streams = self._called
        inputs, parameters = [pb_utils.Tensor(name, given)], {}
        if streams:
            inputs.append(pb_utils.Tensor("stream", np.array([True])))
            parameters = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
        request = pb_utils.InferenceRequest(
            model_name=model, inputs=inputs, requested_output_names=[output], parameters=parameters
        )
        responses = list(request.exec(decoupled=True)) if streams else [request.exec()]
        parts = []
        for response in responses:
            if response.has_error():
                raise ValueError(response.error().message())
            if response.output_tensors():
                parts.append(pb_utils.get_output_tensor_by_name(response, output).as_numpy())
        if streams:
            # each part is a text of its own response
            return np.array([b"".join(part[0] for part in parts), b"%d" % len(parts)], dtype=object)
        return parts[0]


def _step(given: Any) -> Any:
    if given.dtype == np.object_:
        return np.array([text.lower() for text in given.flat], dtype=object).reshape(given.shape)
    return given.argmax(axis=-1, keepdims=True).astype(np.int32)
