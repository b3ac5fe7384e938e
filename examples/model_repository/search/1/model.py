"""Ranks documents inside the server: the nearest by their vectors, ordered by a reranker."""

import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils

# Rows of a request: `max_batch_size` of the models that `fetch` writes. `retrieve` may not exceed it.
ROWS = 64


class TritonPythonModel:
    """Model of the Python backend that the server loads."""

    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self._settings = {key: value["string_value"] for key, value in parameters.items()}

    async def execute(self, requests):
        return [await self._answer(request) for request in requests]

    async def _answer(self, request):
        try:
            query, documents = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy()
                for name in ("query", "documents")
            )
            # rows of varlen: [rows, 1]
            texts = np.concatenate([query, documents])[:, None]
            parts = np.split(texts, range(ROWS, len(texts), ROWS))
            asked = [self._ask("embedder", "sentence_embedding", text=part) for part in parts]
            vectors = np.concatenate(await asyncio.gather(*asked))
            nearest = np.argsort(-vectors[1:] @ vectors[0])[: int(self._settings["retrieve"])]
            pairs = {"text": np.repeat(query[:, None], len(nearest), axis=0)}
            pairs["text_pair"] = documents[nearest][:, None]
            scores = (await self._ask("reranker", "logits", **pairs))[:, 0]
        except Exception as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        order = np.argsort(-scores)
        outputs = {"places": nearest[order].astype(np.int64), "scores": scores[order]}
        return pb_utils.InferenceResponse([pb_utils.Tensor(*pair) for pair in outputs.items()])

    async def _ask(self, role, output, **inputs):
        """Return an output of another model of this server."""
        asked = pb_utils.InferenceRequest(
            model_name=self._settings[role],
            requested_output_names=[output],
            inputs=[pb_utils.Tensor(*pair) for pair in inputs.items()],
            parameters={"truncate": True},
        )
        response = await asked.async_exec()
        if response.has_error():
            raise RuntimeError(f"{self._settings[role]}: {response.error().message()}")
        return pb_utils.get_output_tensor_by_name(response, output).as_numpy()
