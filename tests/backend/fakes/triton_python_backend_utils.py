"""A stand-in for the module that the server provides to its stub process.

A call that would crash the real server raises `Crash` here and is recorded in `crashes`.
"""

import json
from threading import Lock
from typing import ClassVar

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
RESPONSE_DTYPES = (
    np.float32,
    np.float16,
    np.int8,
    np.uint8,
    np.int32,
    np.int64,
    np.uint32,
    np.object_,
)

crashes: list[str] = []
logged: list[tuple[str, str]] = []
model_dir = ""
metrics_enabled = True
# as a backend built before numpy 2 does under it
corrupts_arrays = False


class Crash(BaseException):
    """A call that would crash the real server."""


def crash(what):
    crashes.append(what)
    raise Crash(what)


class TritonModelException(Exception):  # noqa: N818 - the server's name
    pass


class TritonError:
    (
        UNKNOWN,
        INTERNAL,
        NOT_FOUND,
        INVALID_ARG,
        UNAVAILABLE,
        UNSUPPORTED,
        ALREADY_EXISTS,
        CANCELLED,
    ) = range(8)

    def __init__(self, message, code=INTERNAL):
        assert isinstance(message, str)
        # the real one is a C++ string
        message.encode()
        self._message, self._code = message, code

    def message(self):
        return self._message

    def code(self):
        return self._code


class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    @staticmethod
    def from_dlpack(name, tensor):
        array = np.from_dlpack(tensor)
        return Tensor(name, array * 3 if corrupts_arrays else array)

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors=(), error=None):
        self._tensors, self._error = list(output_tensors), error
        for tensor in self._tensors:
            assert tensor.as_numpy().flags.c_contiguous
            assert tensor.as_numpy().dtype in RESPONSE_DTYPES

    def output_tensors(self):
        return self._tensors

    def error(self):
        return self._error


class InferenceResponseSender:
    """Accepts one final response, and parts before it if the model is decoupled.

    Any call after the final response crashes the server.
    """

    def __init__(self, request):
        self._request = request
        self._lock = Lock()
        self._closed = False

    def is_cancelled(self):
        with self._lock:
            if self._closed:
                crash("is_cancelled after the final response")
            self._request.asked += 1
            if self._request.cancel_check_fails:
                raise TritonModelException("cannot ask")
            return self._request.cancelled

    def send(self, response=None, flags=0):
        is_final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        with self._lock:
            if self._closed:
                crash("a response after the final one")
            if not is_final and not self._request.decoupled:
                crash("a part of an answer of a model that is not decoupled")
            self._closed = is_final
            self._request.sends += 1
        self._request.on_send()
        if self._request.send_fails or (self._request.part_fails and not is_final):
            # the server has closed the sender by now, if this was the final response
            if is_final:
                self._request.done()
            raise TritonModelException("failed to allocate shared memory region 'x_shm_1'")
        self._request.responses.append(response)
        if is_final:
            self._request.response = response
            self._request.done()


class InferenceTrace:
    def __init__(self, request):
        self._request = request

    def get_context(self):
        return self._request.trace_context


class InferenceRequest:
    def __init__(
        self,
        inputs=(),
        parameters="",
        *,
        outputs=("sentence_embedding", "last_hidden_state", "logits"),
        timeout=0,
        decoupled=False,
        on_done=lambda: None,
    ):
        self._outputs = outputs
        self._inputs, self._parameters, self._timeout = inputs, parameters, timeout
        self.decoupled = decoupled
        self.done = on_done
        self.on_send = lambda: None
        self.response = None
        self.responses = []
        self.cancelled = self.cancel_check_fails = self.send_fails = self.part_fails = False
        self.sender_fails = self.inputs_fail = False
        self.asked = self.sends = self.senders = 0
        self.trace_context = None
        self.id = ""

    def request_id(self):
        return self.id

    def trace(self):
        return InferenceTrace(self)

    def inputs(self):
        if self.inputs_fail:
            raise TritonModelException("inputs")
        return self._inputs

    def parameters(self):
        if isinstance(self._parameters, bytes):
            # the real one decodes what the client sent
            return self._parameters.decode()
        return self._parameters

    def timeout(self):
        return self._timeout

    def requested_output_names(self):
        return set(self._outputs)

    def get_response_sender(self):
        if self.sender_fails:
            raise TritonModelException("no sender")
        self.senders += 1
        if self.senders > 1:
            crash("a second response sender")
        return InferenceResponseSender(self)


class Metric:
    def __init__(self, labels, buckets):
        self.labels, self.buckets = labels, buckets
        self.value = 0.0
        self.observed = []

    def increment(self, value):
        self.value += value

    def set(self, value):
        self.value = value

    def observe(self, value):
        self.observed.append(value)


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = range(3)
    made: ClassVar[list["MetricFamily"]] = []

    def __init__(self, *, name, description, kind):
        if not metrics_enabled:
            raise TritonModelException("metrics not supported")
        assert description
        if any(family.name == name for family in self.made):
            raise TritonModelException(f"{name} was made twice")
        self.name, self.kind, self.series = name, kind, []
        self.made.append(self)

    def Metric(self, *, labels, buckets=None):  # noqa: N802 - the server's name
        assert (buckets is not None) == (self.kind == self.HISTOGRAM)
        self.series.append(Metric(labels, buckets))
        return self.series[-1]


class Logger:
    @staticmethod
    def log_info(message):
        logged.append(("info", message))

    @staticmethod
    def log_warn(message):
        logged.append(("warn", message))

    @staticmethod
    def log_error(message):
        logged.append(("error", message))


class ModelConfig:
    def __init__(self, config):
        self._config = json.loads(config)

    def as_dict(self):
        return self._config

    def add_input(self, entry):
        assert set(entry) <= {"name", "data_type", "dims", "optional"}
        self._config["input"].append(entry)

    def add_output(self, entry):
        assert set(entry) <= {"name", "data_type", "dims"}
        self._config["output"].append(entry)

    def set_max_batch_size(self, size):
        if self._config["max_batch_size"] > size:
            raise ValueError("max_batch_size may not shrink")
        self._config["max_batch_size"] = size

    def set_model_transaction_policy(self, policy):
        assert set(policy) == {"decoupled"}
        self._config.setdefault("model_transaction_policy", {}).update(policy)


def get_model_dir():
    return model_dir
