"""Requests to the model `minilm` that must be refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .clients import Tensor, integers, strings, texts


@dataclass(frozen=True, slots=True)
class BadRequest:
    """A bad request.

    Attributes:
        description: mistake, for the test's id.
        word: part of the error's message. Ours are tested in tests/backend/intake and tests/backend/wire.
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


def _with(**parameters: Any) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    return {"text": HELLO}, parameters


# What our backend refuses; the server refuses the other ones before they reach us.
OURS = (
    BadRequest("empty text", "row 1", texts("fine", "")),
    BadRequest("only white space", "row 0", texts(" \t\n\u3000")),
    BadRequest("NUL in a text", "NUL", texts("a\0b")),
    BadRequest("invalid UTF-8", "UTF-8", {"text": strings("fine", b"caf\xe9")}),
    BadRequest("half a surrogate pair", "UTF-8", {"text": strings(b"\xed\xa0\x80")}),
    BadRequest("over-long text", "302 tokens", texts("fine", "word " * 300)),
    BadRequest("more bytes than max_text_bytes", "70000 bytes", texts("x" * 70_000)),
    BadRequest("zero tokens", "no tokens", _ids(np.zeros((1, 0)))),
    BadRequest("over-long token ids", "257 tokens", _ids(np.ones((2, 257)))),
    BadRequest("a negative id", "-1", _ids([[101, -1, 102]])),
    BadRequest("an id past the vocabulary", "30522", _ids([[101, 102], [101, 30522]])),
    BadRequest("an id that 32 bits cannot hold", "4294967301", _ids([[2**32 + 5, 102]])),
    BadRequest("the least 64-bit id", str(-(2**63)), _ids([[-(2**63), 2**63 - 1]])),
    BadRequest(
        "a token type out of range", "token_type_ids", _ids([[9, 9]], token_type_ids=[[0, 2]])
    ),
    BadRequest("mask with holes", "attention_mask", _ids([[9, 9, 9]], attention_mask=[[1, 0, 1]])),
    BadRequest("mask of zeros", "no tokens", _ids([[9, 9]], attention_mask=[[0, 0]])),
    BadRequest("mask of another length", "[1, 2]", _ids([[9, 9, 9]], attention_mask=[[1, 1]])),
    BadRequest("both text and ids", "both", {"text": HELLO, "input_ids": IDS}),
    BadRequest("text with a mask", "both", {"text": HELLO, "attention_mask": IDS}),
    BadRequest("mask alone", "attention_mask", {"attention_mask": IDS}),
    BadRequest("truncate is a word", "truncate", *_with(truncate="yes")),
    BadRequest("normalize is a number", "normalize", *_with(normalize=1)),
    BadRequest("a parameter larger than an error may be", "20002", *_with(truncate="x" * 20_000)),
    BadRequest("a misspelt parameter", "normalise", *_with(normalise=True)),
    BadRequest("a timeout in seconds", "microseconds", *_with(timeout=30)),
)
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
