"""A fake model for the client's tests, which computes every output from the input.

So tests can check order and batching. It can inject faults and delays, and it records the requests that it receives.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

# Dims of the outputs of a task; the first one is the main one.
OUTPUTS = {
    "embed": {"sentence_embedding": [3]},
    "sparse_embed": {"indices": [-1], "values": [-1], "terms": [-1], "num_terms": [1]},
    "fill_mask": {"token_ids": [-1, -1], "scores": [-1, -1], "tokens": [-1, -1], "num_masks": [1]},
    "classify": {"logits": [2], "scores": [2], "labels": [2]},
    "rerank": {"logits": [1], "scores": [1], "labels": [1]},
    "token_classify": {
        "logits": [-1, 2],
        "scores": [-1, 2],
        "labels": [2],
        "tokens": [-1],
        "entities": [1],
        "num_tokens": [1],
    },
    "question_answer": {"answers": [1]},
    "hidden": {"last_hidden_state": [-1, 3]},
    "token_embed": {"token_embeddings": [-1, 3]},
    "several": {
        "sentence_embedding": [3],
        **{f"sparse_{name}": [-1] for name in ("indices", "values", "terms")},
        "sparse_num_terms": [1],
        "token_embeddings": [-1, 3],
        "last_hidden_state": [-1, 3],
        "logits": [2],
    },
    "generate": {"text_output": [-1]},
    "translate": {"text_output": [-1]},
}


class Fault(Exception):  # noqa: N818 - injected, not a failure of the test
    """A failure that the fake server injects: a key of STATUS and a message."""

    def __init__(self, kind: str, message: str = "injected") -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def stream_message(self) -> str:
        """The message with its code, as the backend sends it in a stream."""
        if self.kind == "python_backend":
            # an error of the server itself
            return str(self)
        code = {"invalid": "INVALID_ARG"}.get(self.kind, self.kind.upper())
        return f"{code}: {self}"


@dataclass
class ReceivedRequest:
    """One request, as the server received it."""

    tensors: dict[str, np.ndarray]
    parameters: dict[str, Any]
    outputs: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of HTTP, or the metadata of gRPC."""

    @property
    def num_rows(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters of a request to generate."""
        return json.loads(self.tensors["sampling_parameters"][0])

    @property
    def prompt(self) -> str:
        """The text of a request to generate, in capitals."""
        text = self.tensors["text_input"][0]
        return (text.decode() if isinstance(text, bytes) else text).upper()

    @property
    def texts(self) -> list[str]:
        return [text.decode() for text in self.tensors["text"].ravel()]


@dataclass
class FakeModel:
    name: str = "fake"
    task: str = "embed"
    shows_task: bool = True
    """Whether the config names the task."""
    more_settings: dict[str, dict[str, str]] = field(default_factory=dict)
    """Parameters of the config beside the task."""
    max_batch_size: int = 8
    backend: str = ""
    """The backend in the config."""
    instances: int = 1
    requires_pairs: bool = False
    """Whether the config requires the second texts of pairs."""
    server_ready: bool = True
    models: list[tuple[str, str]] = field(default_factory=lambda: [("fake", "READY")])
    faults: list[Fault] = field(default_factory=list)
    """Each request consumes one, before `refuse` is called."""
    refuse: Callable[[ReceivedRequest], Fault | None] = lambda received: None
    delay: Callable[[ReceivedRequest], float] = lambda received: 0.0
    output_dtype: type = np.float32
    has_scores: bool = True
    scores_of: Callable[[np.ndarray], np.ndarray] = lambda logits: logits / 1000
    """Whether a classifier has more outputs than its logits."""
    counts_tokens: bool = False
    """Whether a model has the output num_tokens, here of one token per character."""
    returns_score: bool = True
    most_answers: int = 99
    """A search finds no more answers than these."""
    fail_after: tuple[int, Fault] | None = None
    """Number of parts of a generated answer, and the fault that comes then."""
    tokenizer_answer: bytes | None = None
    """The answer to `tokenize` and `detokenize`, instead of one of the text."""
    ends_after: int | None = None
    """Number of parts of a generated answer that has no last one."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when a client leaves before its answer is complete, or its gRPC stream has ended."""
    holds_streams: float = 0.0
    """Seconds for which a gRPC stream stays open after its last response."""
    requests: list[ReceivedRequest] = field(default_factory=list)
    in_flight: set[int] = field(default_factory=set)
    max_in_flight: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def config(self) -> dict[str, Any]:
        parameters = {"task": {"string_value": self.task}} if self.shows_task else {}
        return {
            "name": self.name,
            "backend": self.backend,
            "instance_group": [{"count": self.instances}],
            "max_batch_size": self.max_batch_size,
            "input": [
                {"name": "text", "data_type": "TYPE_STRING", "dims": [1]},
                {
                    "name": "text_pair",
                    "data_type": "TYPE_STRING",
                    "dims": [1],
                    "optional": not self.requires_pairs,
                },
            ],
            "output": [
                {"name": name, "data_type": "TYPE_FP32", "dims": dims}
                for name, dims in self.outputs.items()
            ],
            "parameters": parameters | self.more_settings,
        }

    @property
    def outputs(self) -> dict[str, list[int]]:
        """Dims of the outputs."""
        outputs = OUTPUTS[self.task]
        if not self.has_scores:
            outputs = {self.main_output: outputs[self.main_output]}
        return {**outputs, "num_tokens": [1]} if self.counts_tokens else outputs

    @property
    def main_output(self) -> str:
        return next(iter(OUTPUTS[self.task]))

    def check_name(self, name: str) -> None:
        if name not in [model for model, _ in self.models]:
            raise Fault("not_found", f"Request for unknown model: '{name}' is not found")

    @contextmanager
    def receiving(self, name: str, received: ReceivedRequest) -> Iterator[Fault | None]:
        """Record a request while it is in flight; yield the fault that it gets."""
        self.check_name(name)
        with self.lock:
            self.requests.append(received)
            self.in_flight.add(id(received))
            self.max_in_flight = max(self.max_in_flight, len(self.in_flight))
            fault = self.faults.pop(0) if self.faults else self.refuse(received)
        try:
            yield fault
        finally:
            self.end(received)

    def end(self, received: ReceivedRequest) -> None:
        """Count a request no longer.

        Its client may send the next request as soon as it has the last response.
        """
        with self.lock:
            self.in_flight.discard(id(received))

    def infer(self, name: str, received: ReceivedRequest) -> dict[str, np.ndarray]:
        with self.receiving(name, received) as fault:
            self.stopped.wait(self.delay(received))
            if fault is not None:
                raise fault
            outputs = self.answer(received)
            return {name: outputs[name] for name in received.outputs}

    def answer(self, received: ReceivedRequest) -> dict[str, np.ndarray]:
        """Return the outputs of a request, and others."""
        if operation := received.parameters.get("operation"):
            found = [[self.tokenizer_object(operation, text)] for text in received.texts]
            return {self.main_output: np.array(found)}
        own = {
            "sparse_embed": sparse_outputs,
            "fill_mask": mask_outputs,
            "several": self.several_outputs,
        }
        if self.task in own:
            return own[self.task](received)
        if "tokens" in received.outputs:
            return token_label_outputs(received, self.scores_of)
        counts = self.num_tokens(received)
        if spans := received.parameters.get("spans"):
            [document] = received.texts
            parts = [[document[begin:end].encode()] for begin, end in json.loads(spans)]
            received = replace(received, tensors={"text": np.array(parts, object)})
        if self.task == "question_answer":
            return context_outputs(received)
        main = self.form_of(self.output(received), received.parameters)
        labels = [f"über {number}".encode() for number in range(main.shape[-1])]
        return {
            self.main_output: main,
            "scores": self.scores_of(main),
            "num_tokens": counts,
            "labels": np.array([labels] * len(main)),
        }

    def several_outputs(self, received: ReceivedRequest) -> dict[str, np.ndarray]:
        """Return vectors, terms and labels of texts, and vectors of the words of one."""
        vectors = np.stack([vector_of_text(text) for text in received.texts])
        words = np.stack([vector_of_text(word) for word in received.texts[0].split()])[None]
        return {
            "sentence_embedding": self.form_of(vectors, received.parameters),
            **{f"sparse_{name}": found for name, found in sparse_outputs(received).items()},
            "token_embeddings": words,
            "last_hidden_state": words,
            "logits": np.array([[len(text), 0] for text in received.texts], np.float32),
        }

    def generate(self, name: str, received: ReceivedRequest) -> Iterator[dict[str, list[Any]]]:
        """Yield the responses to a request: parts of one token, or one response.

        Token 3 of row 1 has the text "1.3 ". The delay comes before each response.
        """
        with self.receiving(name, received) as fault:
            if fault is not None:
                raise fault
            yield from self.responses(received, received.sampling)

    def responses(
        self, received: ReceivedRequest, sampling: dict[str, Any]
    ) -> Iterator[dict[str, list[Any]]]:
        if operation := sampling.get("operation"):
            assert received.tensors.keys() <= {"text_input", "messages", "sampling_parameters"}
            text = received.tensors.get("text_input", received.tensors.get("messages"))[0]
            text = text.decode() if isinstance(text, bytes) else text
            self.stopped.wait(self.delay(received))
            yield {"text_output": [self.tokenizer_object(operation, text).decode()]}
            return
        tokens, rows = sampling.get("max_tokens", 4), sampling.get("n", 1)
        size = 1 if received.tensors["stream"][0] else tokens
        for number, begin in enumerate(range(0, tokens, size)):
            self.stopped.wait(self.delay(received))
            if self.fail_after and self.fail_after[0] == number:
                raise self.fail_after[1]
            if self.ends_after == number:
                return
            ids = range(begin, begin + size)
            is_last = begin + size == tokens
            logprobs = [
                {
                    str(each): {
                        "logprob": -0.5,
                        "rank": 1,
                        "decoded_token": f"token {each}",
                        "bytes": [240 + each],
                    }
                }
                for each in ids
            ]
            response: dict[str, list[Any]] = {
                "text_output": ["".join(f"{row}.{each} " for each in ids) for row in range(rows)],
                "finish_reason": ["length" if is_last else "None"] * rows,
                "num_input_tokens": [7],
                "num_output_tokens": [size] * rows,
                "output_ids": [*ids] * rows,
            }
            if received.tensors["return_logprobs"][0]:
                response["logprobs"] = [json.dumps(logprobs)] * rows
            if self.task == "translate":
                response["text_output"] = [f"{received.prompt} {row}" for row in range(rows)]
            if rows > self.most_answers:
                # as the backend sends them
                missing = rows - self.most_answers
                response["num_output_tokens"][-missing:] = [0] * missing
                response["output_ids"] = [*ids] * self.most_answers
            if "return_score" in received.tensors and self.returns_score:
                response["score"] = [-0.5 * (row + 1) for row in range(rows)]
            if is_last:
                self.end(received)
            yield response

    def tokenizer_object(self, operation: str, text: str) -> bytes:
        """Return the answer of a tokenizer with a token for each character."""
        if self.tokenizer_answer is not None:
            return self.tokenizer_answer
        if operation == "detokenize":
            return json.dumps({"text": "".join(map(chr, json.loads(text)))}).encode()
        found = {
            "token_ids": [ord(each) for each in text],
            "tokens": list(text),
            "special": [each == "[" for each in text],
            "offsets": [[at, at + 1] for at in range(len(text))],
            "prompt": "",
            "max_tokens": 99,
        }
        return json.dumps(found).encode()

    def num_tokens(self, received: ReceivedRequest) -> np.ndarray:
        lengths = [len(text) for text in received.texts] if "text" in received.tensors else []
        return np.array(lengths, dtype=np.int32)[:, None]

    def form_of(self, vectors: np.ndarray, parameters: dict[str, Any]) -> np.ndarray:
        """Return vectors with the dimensions and the dtype that a request asks for."""
        vectors = vectors[..., : parameters.get("dimensions")]
        dtype = parameters.get("output_dtype", "float32")
        if dtype == "ubinary":
            return np.packbits(vectors > 0, axis=1)
        return vectors.astype(self.output_dtype if dtype == "float32" else dtype)

    def output(self, received: ReceivedRequest) -> np.ndarray:
        if "input_ids" in received.tensors:
            ids = received.tensors["input_ids"]
            mask = received.tensors.get("attention_mask", np.ones_like(ids))
            return np.stack(
                [vector_of_ids(row[keep == 1]) for row, keep in zip(ids, mask, strict=True)]
            )
        pairs = [text.decode() for text in received.tensors.get("text_pair", np.array([])).ravel()]
        if self.task == "classify":
            return np.array(
                [
                    [len(text), len(pair)]
                    for text, pair in zip(received.texts, pairs or [""] * 999, strict=False)
                ]
            )
        if self.task == "rerank":
            return np.array(
                [[len(q) * 100 + len(d)] for q, d in zip(received.texts, pairs, strict=True)]
            )
        if self.task in ("token_classify", "hidden", "token_embed"):
            assert received.num_rows == 1, "rows of different lengths would be padded"
            words = received.texts[0].split()
            return np.array(
                [[vector_of_text(word)[: self.outputs[self.main_output][1]] for word in words]]
            )
        return np.stack([vector_of_text(text) for text in received.texts])


def sparse_outputs(received: ReceivedRequest) -> dict[str, np.ndarray]:
    """Return a term for each letter of a text, the later the larger its weight."""
    texts = received.texts
    shape = len(texts), max(map(len, texts))
    indices, values = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    terms = np.full(shape, b"", "S8")
    for row, text in enumerate(texts):
        letters = text[::-1]
        indices[row, : len(text)] = [ord(letter) for letter in letters]
        values[row, : len(text)] = range(len(text), 0, -1)
        terms[row, : len(text)] = [letter.encode() for letter in letters]
    counts = np.array([[len(text)] for text in texts], np.int32)
    return {
        "indices": indices,
        "values": values,
        "terms": terms,
        "num_terms": counts,
        "num_tokens": counts,
    }


def mask_outputs(received: ReceivedRequest) -> dict[str, np.ndarray]:
    """Return tokens that count from the length of a text, for each "_" in it."""
    texts, top_k = received.texts, received.parameters.get("top_k", 2)
    counts = np.array([[text.count("_")] for text in texts], np.int32)
    token_ids = np.zeros((len(texts), counts.max(), top_k), np.int32)
    for row, text in enumerate(texts):
        token_ids[row, : counts[row, 0]] = len(text) + np.arange(top_k)
    return {
        "token_ids": token_ids,
        "scores": (1 / np.maximum(token_ids, 1)).astype(np.float32),
        "tokens": np.char.encode(np.char.add("é", token_ids.astype(str))),
        "num_masks": counts,
    }


def context_outputs(received: ReceivedRequest) -> dict[str, np.ndarray]:
    """Return the first letters of each context as answers, and one without letters."""
    contexts = [text.decode() for text in received.tensors["text_pair"].ravel()]
    counts = range(received.parameters.get("top_k", 2) - 1, -1, -1)
    found = [
        [{"score": each / 8, "start": 0, "end": each, "answer": text[:each]} for each in counts]
        for text in contexts
    ]
    return {"answers": np.array([[json.dumps(each).encode()] for each in found])}


def token_label_outputs(
    received: ReceivedRequest, scores_of: Callable[[np.ndarray], np.ndarray]
) -> dict[str, np.ndarray]:
    """Return a token for each word; capitals have the second label."""
    words = [text.split() for text in received.texts]
    counts = np.array([[len(row)] for row in words], np.int32)
    tokens = np.full((len(words), counts.max()), b"", dtype="S16")
    logits = np.zeros((*tokens.shape, 2), np.float32)
    for row, found in enumerate(words):
        tokens[row, : len(found)] = [word.encode() for word in found]
        logits[row, : len(found)] = [[250, 750 * word.isupper()] for word in found]
    labels = np.array([[b"O", "Ö".encode()]] * len(words))
    return {
        "logits": logits,
        "scores": scores_of(logits),
        "labels": labels,
        "tokens": tokens,
        "num_tokens": counts,
    }


def vector_of_text(text: str) -> np.ndarray:
    return np.array([zlib.crc32(text.encode()) % 997, len(text), 1], dtype=np.float32)


def vector_of_ids(ids: np.ndarray) -> np.ndarray:
    return np.array([ids.sum(), ids.size, 2], dtype=np.float32)
