"""Requests to the model `minilm` that must be refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.refusals import Model, Refusal, refusals

from .clients import Tensor, integers, strings, texts


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A bad request.

    Attributes:
        description: mistake, for the test's id.
        word: part of the error's message; of ours, the whole message.
        inputs: arrays by name, as on the wire.
        parameters: parameters of the request.
    """

    description: str
    word: str
    inputs: Mapping[str, Tensor]
    parameters: Mapping[str, Any] = field(default_factory=dict)


HELLO = strings("hello")
IDS = integers([[101, 7592, 102]])


def _ids(rows: npt.ArrayLike, **others: npt.ArrayLike) -> dict[str, Tensor]:
    others = {"input_ids": rows, **others}
    return {name: integers(value) for name, value in others.items()}


def _bytes(shape: tuple[int, ...], data: bytes) -> dict[str, Tensor]:
    return {"text": Tensor("BYTES", shape, data)}


MINILM = Model(tokens=256, text_bytes=65_536, vocabulary=30_522, features=384)


def _sent(refusal: Refusal) -> BadRequest:
    """Return a refused request as clients send it."""
    inputs = {
        name: strings(*array[:, 0]) if array.dtype == object else integers(array)
        for name, array in refusal.inputs.items()
    }
    timeout = {"timeout": refusal.timeout} if refusal.timeout else {}
    return BadRequest(
        refusal.description, refusal.message, inputs, {**refusal.parameters, **timeout}
    )


# What our backend refuses; the server refuses the other ones before they reach us.
OURS = tuple(_sent(each) for each in refusals(MINILM) if each.fits_a_protocol)
THEIRS = (
    BadRequest("no inputs", "0 inputs", {}),
    BadRequest("wrong tensor name", "sentence", {"sentence": HELLO}),
    BadRequest(
        "text_pair where the task takes none", "text_pair", {"text": HELLO, "text_pair": HELLO}
    ),
    BadRequest("text as integers", "INT64", {"text": Tensor("INT64", (1, 1), bytes(8))}),
    BadRequest("ids as INT32", "INT32", {"input_ids": Tensor("INT32", (1, 3), bytes(12))}),
    BadRequest("ids as FP32", "FP32", {"input_ids": Tensor("FP32", (1, 3), bytes(12))}),
    BadRequest("text of rank 1", "got [1]", _bytes((1,), HELLO.data)),
    BadRequest("ids of rank 1", "got [2]", _ids([101, 102])),
    BadRequest("ids of rank 3", "got [1,1,2]", _ids([[[101, 102]]])),
    BadRequest("two texts in a row", "got [1,2]", _bytes((1, 2), HELLO.data * 2)),
    BadRequest("10,000 rows of text", "batch-size", texts(*["row"] * 10_000)),
    BadRequest("10,000 rows of ids", "batch-size", _ids(np.full((10_000, 8), 101))),
    BadRequest("no rows", "text", _bytes((0, 1), b"")),
    BadRequest("a prefix that promises too much", "500", _bytes((1, 1), b"\xf4\x01\0\0hello")),
    BadRequest("the largest length prefix", "4294967295", _bytes((1, 1), b"\xff\xff\xff\xffhello")),
    BadRequest("half a length prefix", "incomplete", _bytes((1, 1), b"\x05\x00")),
    BadRequest("fewer strings than rows", "expected 2", _bytes((2, 1), HELLO.data)),
    BadRequest("more strings than rows", "expecting 1", _bytes((1, 1), HELLO.data * 2)),
    BadRequest("fewer bytes than ids", "got 10", {"input_ids": Tensor("INT64", (1, 3), bytes(10))}),
)
CASES = (*OURS, *THEIRS)
