"""A server with the existing model, alone or beside the new one, and its requests.

Load on two models by turns is a closed loop of single texts, in short rounds. The server reads a view of the
repository: links, and stand-ins of ONNX models where it has no ONNX backend.
"""

import asyncio
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import text_format
from tokenizers import Tokenizer
from tritonclient.grpc import (
    InferenceServerClient,
    InferInput,
    InferRequestedOutput,
    aio,
    model_config_pb2,
)
from tritonclient.utils import InferenceServerException

from varlen.config import DType, EngineConfig
from varlen.execution.device import choose_device, choose_dtype, usable_cores
from varlen.request.request import Float32Array
from varlen_tools.adopt.wish import AdoptError
from varlen_tools.doctor.comparison import short_dtype
from varlen_tools.make_tokenizer import read_message
from varlen_tools.model_source import read_model_config
from varlen_tools.serve.server import LOAD_SECONDS, ServerCommand, start_server

# Names of outputs that are answers, the first one there counts; else there has to be only one.
_ANSWERS = ("sentence_embedding", "embedding", "pooler", "logits", "scores", "last_hidden_state")


@dataclass(frozen=True, slots=True)
class Request:
    """One text as a request to a model."""

    model: str
    inputs: Sequence[InferInput]
    output: str
    parameters: Mapping[str, Any]

    @property
    def outputs(self) -> list[InferRequestedOutput]:
        """The outputs, as tritonclient takes them."""
        return [InferRequestedOutput(self.output)]


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input of the model."""

    name: str
    datatype: str
    rank: int


@dataclass(frozen=True, slots=True)
class Existing:
    """A model of the repository, as a client sees it.

    Attributes:
        text: the input of texts; None if it takes token ids.
        token_tensors: inputs of token ids, by what they are: `ids`, `attention_mask`, `type_ids`.
    """

    name: str
    text: Tensor | None
    token_tensors: Mapping[str, Tensor]
    output: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def request(self, text: str, tokenizer: Tokenizer, longest: int) -> Request:
        """Return the request for one text.

        Args:
            tokenizer: tokenizer of the checkpoint, for a model that takes token ids.
            longest: number of tokens after which ids are cut.
        """
        if self.text is not None:
            words = np.array([text.encode()], dtype=np.object_)
            return Request(self.name, [_filled(self.text, words)], self.output, self.parameters)
        tokenizer.enable_truncation(longest)
        encoding = tokenizer.encode(text)
        inputs = [
            _filled(tensor, np.array(getattr(encoding, role)))
            for role, tensor in self.token_tensors.items()
        ]
        return Request(self.name, inputs, self.output, self.parameters)


def _filled(tensor: Tensor, row: npt.NDArray[Any]) -> InferInput:
    values = row if tensor.rank < 2 else row[None]
    if tensor.datatype in {"INT32", "INT64"}:
        values = values.astype(np.int32 if tensor.datatype == "INT32" else np.int64)
    made = InferInput(tensor.name, list(values.shape), tensor.datatype)
    made.set_data_from_numpy(values)
    return made


def read_existing(
    name: str, metadata: Mapping[str, Any], optional: Sequence[str], output: str | None
) -> Existing:
    """Return how a model is asked, from the metadata that the server gives.

    Args:
        metadata: its metadata as JSON: `inputs` and `outputs` with `name`, `datatype` and `shape`.
        optional: names of inputs that a request may leave out.

    Raises:
        AdoptError: an input is neither a text nor token ids, or no output is an answer.
    """
    tensors = _tensors(metadata["inputs"])
    texts = [tensor for tensor in tensors if tensor.datatype == "BYTES"]
    ids = {role: tensor for tensor in tensors if (role := _role(tensor)) is not None}
    chosen = texts[:1] or list(ids.values())
    if len(texts) > 1:
        chosen = [tensor for tensor in texts if tensor.name not in optional][:1] or texts[:1]
    others = [each.name for each in tensors if each not in chosen and each.name not in optional]
    if others or not chosen or not (texts or "ids" in ids):
        shown = ", ".join(f"{each.name} {each.datatype}" for each in tensors)
        raise AdoptError(
            f"{name} takes {shown}; adopt knows models of one text, or of input_ids with attention_mask and"
            " token_type_ids"
        )
    return Existing(
        name, chosen[0] if texts else None, {} if texts else ids, _answer(name, metadata, output)
    )


def read_tokenizer(name: str, metadata: Mapping[str, Any]) -> Existing | None:
    """Return how a tokenizer is asked for ids; None for other models."""
    inputs = _tensors(metadata["inputs"])
    ids = [each.name for each in _tensors(metadata["outputs"]) if _role(each) == "ids"]
    if [each.datatype for each in inputs] != ["BYTES"] or not ids:
        return None
    return Existing(name, inputs[0], {}, ids[0])


def _tensors(metadata: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    return [Tensor(each["name"], each["datatype"], len(each["shape"])) for each in metadata]


def _role(tensor: Tensor) -> str | None:
    """Return the attribute of an encoding of `tokenizers` that an input takes."""
    if tensor.datatype not in {"INT32", "INT64"}:
        return None
    name = tensor.name.lower()
    if "type" in name or "segment" in name:
        return "type_ids"
    if "mask" in name:
        return "attention_mask"
    return "ids" if "id" in name or "token" in name else None


def _answer(name: str, metadata: Mapping[str, Any], output: str | None) -> str:
    names = [each["name"] for each in metadata["outputs"] if each["datatype"].startswith("FP")]
    if output is not None:
        found = [each for each in names if each == output]
    else:
        known = [each for part in _ANSWERS for each in names if part in each.lower()]
        found = known[:1] or (names if len(names) == 1 else [])
    if not found:
        raise AdoptError(
            f"{name} has the outputs {', '.join(names) or 'without numbers'}; name the answer with --output"
        )
    return str(found[0])


# Rounds of each model; the first one of each warms up and is not counted.
_ROUNDS = 4


@dataclass(slots=True)
class Measured:
    """Rounds of one model.

    Attributes:
        rates: answers in a second, by round.
        latencies: seconds from a request to its answer, of all rounds.
    """

    rates: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """The median of the rounds, in answers in a second."""
        return median(self.rates)

    def percentile(self, share: float) -> float:
        """Return the latency that a share of requests does not exceed, in milliseconds."""
        return 1000 * float(np.percentile(self.latencies, 100 * share))


async def compare_loads(
    url: str, models: Sequence[Sequence[Request]], *, concurrency: int, seconds: float
) -> list[Measured]:
    """Send requests to each model in turn, and return what was measured.

    Args:
        url: host and port of the server's gRPC endpoint.
        models: the same requests in the form of each model.
        seconds: time of all counted rounds of one model.
    """
    measured = [Measured() for _ in models]
    async with aio.InferenceServerClient(url) as client:
        for number in range(_ROUNDS):
            for requests, into in zip(models, measured, strict=True):
                part = Measured() if number == 0 else into
                await _round(client, requests, part, concurrency, seconds / (_ROUNDS - 1))
    return measured


async def _round(
    client: aio.InferenceServerClient,
    requests: Sequence[Request],
    into: Measured,
    concurrency: int,
    seconds: float,
) -> None:
    began, numbers, done = time.perf_counter(), count(), 0

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            request = requests[next(numbers) % len(requests)]
            sent = time.perf_counter()
            await client.infer(
                request.model,
                list(request.inputs),
                outputs=request.outputs,
                parameters=dict(request.parameters),
            )
            into.latencies.append(time.perf_counter() - sent)
            done += 1

    await asyncio.gather(*(caller() for _ in range(concurrency)))
    into.rates.append(done / (time.perf_counter() - began))


@dataclass(frozen=True, slots=True)
class Session:
    """A ready server."""

    address: str
    client: InferenceServerClient

    def read(self, model: str, output: str | None) -> Existing:
        metadata = self.client.get_model_metadata(model, as_json=True)
        given = self.config(model).get("input", ())
        optional = [each["name"] for each in given if each.get("optional")]
        return read_existing(model, metadata, optional, output)

    def config(self, model: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.client.get_model_config(model, as_json=True)["config"]
        return found

    def find_tokenizer(self, models: Iterable[str]) -> Existing | None:
        """Return how the tokenizer among models is asked; None if there is none."""
        found = (
            read_tokenizer(model, self.client.get_model_metadata(model, as_json=True))
            for model in models
        )
        return next((each for each in found if each is not None), None)

    def ask(self, requests: Sequence[Request]) -> list[Float32Array]:
        """Return the answer to each text: `[features]`, or `[tokens, features]`.

        Raises:
            AdoptError: an answer has another shape.
        """
        return [self._ask(request) for request in requests]

    def measure(
        self, models: Sequence[Sequence[Request]], concurrency: int, seconds: float
    ) -> list[Measured]:
        loads = compare_loads(self.address, models, concurrency=concurrency, seconds=seconds)
        return asyncio.run(loads)

    def _ask(self, request: Request) -> Float32Array:
        result = self.client.infer(
            request.model,
            list(request.inputs),
            outputs=request.outputs,
            parameters=dict(request.parameters),
        )
        answer = np.asarray(result.as_numpy(request.output), dtype=np.float32)
        if answer.ndim > 1 and answer.shape[0] == 1:
            answer = answer[0]
        if answer.ndim not in {1, 2}:
            raise AdoptError(
                f"{request.model} answers one text with {request.output} of the shape {answer.shape};"
                " adopt knows one row of features, or of tokens and features"
            )
        return answer


@contextmanager
def open_session(command: ServerCommand, view: Path, models: Sequence[str]) -> Iterator[Session]:
    """Start a server with models of a view, and end it.

    Raises:
        AdoptError: the server refuses a request.
        ServerError: it ends, or does not load a model.
    """
    folders = [view / name for name in with_parts(view, models)]
    with start_server(command, folders) as server:
        server.wait_ready(LOAD_SECONDS)
        address = server.grpc_url.removeprefix("grpc://")
        with InferenceServerClient(address) as client:
            try:
                yield Session(address, client)
            except InferenceServerException as error:
                raise AdoptError(f"the server refuses: {error.message()}") from None


ONNX_BACKEND = "onnxruntime"
_ONNX_FILE = "model.onnx"
# Parameters of the ONNX backend that the stand-in has too.
_KEPT = ("intra_op_thread_count", "inter_op_thread_count")
_STAND_IN = Path(__file__).with_name("onnx_model.py")


def write_view(repository: Path, view: Path, backends: Path) -> list[str]:
    """Link models into a folder, and return those that Python's onnxruntime runs.

    Args:
        repository: the model repository, which is not changed.
        view: an empty folder.

    Raises:
        AdoptError: a model needs onnxruntime, and it is not installed; or no model is there.
        CheckpointError: a config.pbtxt cannot be read.
    """
    replaced = []
    models = [entry for entry in sorted(repository.iterdir()) if entry.is_dir()]
    for model in models:
        config = _config(model)
        if not is_onnx_model(model) or (backends / ONNX_BACKEND).is_dir():
            (view / model.name).symlink_to(model.resolve())
            continue
        if find_spec("onnxruntime") is None:
            raise AdoptError(
                f"{model.name} is an ONNX model, and this server has no ONNX backend; put a tritonserver that has it on"
                " PATH, or pip install onnxruntime"
            )
        _write_stand_in(model, view / model.name, config)
        replaced.append(model.name)
    if not models:
        raise AdoptError(f"{repository} has no models: folders with numbered versions")
    return replaced


def with_parts(view: Path, models: Sequence[str]) -> list[str]:
    """Return models, and the parts of ensembles among them."""
    found = list(dict.fromkeys(models))
    for model in found:
        steps = _config(view / model).ensemble_scheduling.step
        parts = dict.fromkeys(step.model_name for step in steps)
        found += [part for part in parts if part not in found]
    return found


def is_onnx_model(model: Path) -> bool:
    """Return whether a model is an ONNX file, by its config.pbtxt or its files."""
    config = _config(model)
    if config.backend or config.platform:
        return bool(config.backend == ONNX_BACKEND or config.platform.startswith(ONNX_BACKEND))
    return any(model.glob(f"[0-9]*/{_ONNX_FILE}"))


def _config(model: Path) -> model_config_pb2.ModelConfig:
    has_config = (model / "config.pbtxt").is_file()
    return read_model_config(model) if has_config else model_config_pb2.ModelConfig()


def _write_stand_in(model: Path, target: Path, config: model_config_pb2.ModelConfig) -> None:
    file = config.default_model_filename or _ONNX_FILE
    changed = model_config_pb2.ModelConfig()
    changed.CopyFrom(config)
    changed.backend, changed.platform, changed.default_model_filename = "python", "", ""
    for key in [key for key in changed.parameters if key not in _KEPT]:
        del changed.parameters[key]
    changed.ClearField("optimization")
    changed.parameters["file"].string_value = file
    target.mkdir()
    (target / "config.pbtxt").write_text(text_format.MessageToString(changed), encoding="utf-8")
    for version in (each for each in model.iterdir() if each.name.isdecimal()):
        (target / version.name).mkdir()
        # with the files of external weights
        for entry in version.iterdir():
            (target / version.name / entry.name).symlink_to(entry.resolve())
        shutil.copyfile(_STAND_IN, target / version.name / "model.py")


# The setting of the ONNX and of the PyTorch backend, in any case.
_THREADS = "intra_op_thread_count"
# The part of onnx.proto that names the dtype of each weight; the package onnx may be absent.
_ONNX = """
name: "weights.proto"
message_type { name: "Model"
  field { name: "graph" number: 7 type: TYPE_MESSAGE type_name: "Graph" } }
message_type { name: "Graph"
  field { name: "initializer" number: 5 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Tensor" } }
message_type { name: "Tensor"
  field { name: "dims" number: 1 label: LABEL_REPEATED type: TYPE_INT64 }
  field { name: "data_type" number: 2 type: TYPE_INT32 } }
"""
_ONNX_DTYPES: Mapping[int, DType] = {
    1: "fp32",
    2: "int8",
    3: "int8",
    10: "fp16",
    16: "bf16",
    21: "int4",
    22: "int4",
}


@dataclass(frozen=True, slots=True)
class ModelSide:
    """How one model of the server runs.

    Attributes:
        dtype: dtype of its weights; None if only its own code knows.
        threads: its threads for one batch; None if only its own code knows.
        lengths: tokens that each text has in it; empty for another step of an ensemble, or if only its own code knows.
    """

    name: str
    backend: str
    dtype: DType | None
    threads: int | None
    instances: int
    lengths: Sequence[int] = ()


def existing_side(folder: Path, config: Mapping[str, Any], lengths: Sequence[int]) -> ModelSide:
    """Return how a model that exists runs.

    Args:
        config: its configuration as JSON, completed by the server.
        lengths: tokens that each text has in it.
    """
    # config names the python backend if Python's onnxruntime runs it
    is_onnx = is_onnx_model(folder)
    parameters = {
        key.lower(): value["string_value"] for key, value in config.get("parameters", {}).items()
    }
    # onnxruntime takes all cores if 0, whatever the limit of a container
    threads = int(parameters.get(_THREADS, 0)) or (
        len(os.sched_getaffinity(0)) if is_onnx else None
    )
    groups = config.get("instance_group", ())
    return ModelSide(
        folder.name,
        ONNX_BACKEND if is_onnx else config.get("backend", ""),
        _onnx_dtype(folder) if is_onnx else None,
        threads,
        sum(int(group.get("count", 1)) for group in groups),
        lengths,
    )


def our_side(name: str, config: EngineConfig, lengths: Sequence[int]) -> ModelSide:
    """Return how a varlen model runs."""
    threads = config.threads or usable_cores()
    return ModelSide(name, "varlen", our_dtype(config), threads, 1, lengths)


def our_dtype(config: EngineConfig) -> DType:
    """Return the dtype in which a model runs on this machine."""
    if config.dtype != "auto":
        return config.dtype
    return short_dtype(str(choose_dtype("auto", choose_device(config.device))).split(".")[-1])


def _onnx_dtype(model: Path) -> DType | None:
    files = sorted(model.glob("[0-9]*/*.onnx"))
    return weights_dtype(files[-1].read_bytes()) if files else None


def weights_dtype(file: bytes) -> DType | None:
    """Return the dtype of most weights of an ONNX file; None if it has none."""
    model = read_message(_ONNX, "Model", file)
    counts: Counter[DType] = Counter()
    for tensor in model.graph.initializer:
        # other types are of shapes and indices
        if dtype := _ONNX_DTYPES.get(tensor.data_type):
            counts[dtype] += math.prod(tensor.dims)
    return counts.most_common(1)[0][0] if counts else None
