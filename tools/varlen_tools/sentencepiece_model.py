"""Reads a SentencePiece model file: its pieces, and how it normalizes text.

The file is one message in protobuf's wire format; only the fields that matter are read.
Source: sentencepiece_model.proto of SentencePiece, arXiv:1808.06226.
"""

import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import read_bytes

# Types of a piece, and the type of a model; numbers of the file format.
NORMAL, UNKNOWN, CONTROL, USER, _UNUSED = 1, 2, 3, 4, 5
_KINDS = (NORMAL, UNKNOWN, CONTROL, _UNUSED)
_UNIGRAM = 1
# Wire types of protobuf, and the sizes of two of them.
_VARINT, _BYTES = 0, 2
_FIXED_SIZES = {1: 8, 5: 4}


class SentencePieceError(Exception):
    """The file is damaged, or its model is of a kind that is not converted."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a model.

    Attributes:
        kind: its type, such as `NORMAL`.
    """

    text: str
    score: float
    kind: int


@dataclass(frozen=True, slots=True)
class UnigramModel:
    """A unigram model.

    Attributes:
        charsmap: compiled rules that normalize characters; empty without rules.
        splits_words: whether no piece spans a space.
    """

    pieces: tuple[Piece, ...]
    charsmap: bytes
    splits_words: bool

    @property
    def scores(self) -> dict[str, float]:
        """Log probability of each piece that texts are split into."""
        return {each.text: each.score for each in self.pieces if each.kind == NORMAL}


def read_unigram_model(path: Path, kinds: Collection[int] = _KINDS) -> UnigramModel:
    """Return the model in a file.

    Args:
        kinds: types of pieces that the caller converts.

    Raises:
        SentencePieceError: it is damaged, or a model of another kind.
    """
    try:
        fields = _read_fields(read_bytes(path.parent, path.name))
        trainer, normalizer = (_read_fields(_last_bytes(fields, field)) for field in (2, 3))
        pieces = tuple(_read_piece(data) for field, data in fields if field == 1)
    except CheckpointError as error:
        raise SentencePieceError(str(error)) from None
    except (IndexError, TypeError, UnicodeDecodeError, struct.error) as error:
        raise SentencePieceError(f"{path.name} is damaged: {error}") from None
    if _last_int(trainer, 3, _UNIGRAM) != _UNIGRAM:
        raise SentencePieceError(f"{path.name} is not a unigram model; no other kind is converted")
    has_others = any(each.kind not in kinds for each in pieces)
    # a space before the text; no double spaces; ▁ for a space
    flags = [_last_int(normalizer, field, 1) for field in (3, 4, 5)]
    if has_others or _last_int(trainer, 24, 0) or not all(flags):
        raise SentencePieceError(
            f"{path.name} has pieces of bytes or of users, or keeps spaces; such models are not converted"
        )
    return UnigramModel(
        pieces=pieces,
        charsmap=_last_bytes(normalizer, 2),
        splits_words=bool(_last_int(trainer, 22, 1)),
    )


def _read_piece(data: int | bytes) -> Piece:
    if isinstance(data, int):
        raise TypeError("a piece is no message")
    fields = _read_fields(data)
    (score,) = struct.unpack("<f", _last_bytes(fields, 2) or bytes(4))
    return Piece(_last_bytes(fields, 1).decode(), score, _last_int(fields, 3, NORMAL))


def _read_fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """Return number and value of each field of a message: an integer, or bytes."""
    fields: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, at = _read_varint(data, at)
            fields.append((number, value))
            continue
        if wire_type == _BYTES:
            size, at = _read_varint(data, at)
        elif wire_type in _FIXED_SIZES:
            size = _FIXED_SIZES[wire_type]
        else:
            raise TypeError(f"wire type {wire_type}")
        if at + size > len(data):
            raise IndexError("it ends inside a field")
        fields.append((number, data[at : at + size]))
        at += size
    return fields


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer of variable length, and the place after it."""
    value, shift = 0, 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _last_int(fields: list[tuple[int, int | bytes]], number: int, default: int) -> int:
    values = [each for field, each in fields if field == number and isinstance(each, int)]
    return values[-1] if values else default


def _last_bytes(fields: list[tuple[int, int | bytes]], number: int) -> bytes:
    values = [each for field, each in fields if field == number and isinstance(each, bytes)]
    return values[-1] if values else b""
