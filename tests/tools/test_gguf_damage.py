"""A damaged GGUF file is refused, and nothing is read or allocated beyond it."""

import struct
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from varlen.errors import CheckpointError
from varlen_tools import gguf_checkpoint
from varlen_tools.gguf_checkpoint import _MOST_HEADER_BYTES, read_gguf

from .gguf_files import entry, field, gguf_bytes, text

gguf = pytest.importorskip("gguf")

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
VALUES = np.arange(6, dtype="<f4").tobytes()
FIELDS = [
    field("general.architecture", STRING, text("llama")),
    field("a.count", U32, struct.pack("<I", 7)),
    field("a.flag", BOOL, b"\1"),
    field("a.names", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("é")),
    field("a.scores", ARRAY, struct.pack("<IQ2f", F32, 2, 0.5, -1.0)),
]
WHOLE = gguf_bytes(FIELDS, [entry("w", (2, 3), 0, 0)], VALUES)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m-q4.gguf"


def refused(path, content):
    """Return the message about a file, with what was allocated for it, in bytes."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as error:
            read_gguf(path)
        return str(error.value), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("version", [2, 3])
def test_reads_metadata_and_tensors(path, version):
    path.write_bytes(gguf_bytes(FIELDS, [entry("w", (2, 3), 0, 0)], VALUES, version=version))

    file = read_gguf(path)

    scores = file.metadata.pop("a.scores")
    assert file.metadata == {
        "general.architecture": "llama",
        "a.count": 7,
        "a.flag": True,
        "a.names": ["x", "é"],
    }
    assert scores.tolist() == [0.5, -1.0]
    tensor = file.tensors["w"]
    assert (tensor.shape, tensor.dtype) == ([2, 3], "F32")
    assert np.concatenate([*tensor.widened()]).ravel().tolist() == [0, 1, 2, 3, 4, 5]


HUGE = 1 << 62
DAMAGED = {
    "empty": (b"", "m-q4.gguf cannot be read (cannot mmap an empty file)"),
    "another form": (
        b"version https://git-lfs.github.com/spec/v1\n",
        "(it begins with b'vers' and ",
    ),
    "version 1": (
        gguf_bytes([], [], version=1),
        "begins with b'GGUF' and 1; allowed: b'GGUF' and 2 or 3",
    ),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "and 50331648; allowed"),
    "cut in a header": (
        WHOLE[:60],
        "m-q4.gguf cannot be read (60 bytes end within the metadata, or they",
    ),
    "cut in a tensor": (
        WHOLE[:-1],
        f"(w of [2, 3] F32 is not in {len(WHOLE) - 1} bytes): download it again",
    ),
    "fields beyond the file": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE),
        "bytes end within the metadata",
    ),
    "tensors beyond the file": (
        b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0),
        "bytes end within the metadata",
    ),
    "a text beyond the file": (
        gguf_bytes([struct.pack("<Q", HUGE)], []),
        "bytes end within the metadata",
    ),
    "an array beyond the file": (
        gguf_bytes([field("a", ARRAY, struct.pack("<IQ", F32, HUGE))], []),
        "bytes end within the metadata",
    ),
    "texts beyond the file": (
        gguf_bytes([field("a", ARRAY, struct.pack("<IQ", STRING, HUGE))], []),
        "bytes end within the metadata",
    ),
    "an array of arrays": (
        gguf_bytes([field("a", ARRAY, struct.pack("<IQ", ARRAY, 1))], []),
        "cannot be read (9)",
    ),
    "no text": (gguf_bytes([struct.pack("<Q", 1) + b"\xff"], []), "codec can't decode"),
    "an unknown field": (gguf_bytes([field("a", 77, b"")], []), "cannot be read (77)"),
    "many dimensions": (
        gguf_bytes([], [entry("w", (1,) * 5, 0, 0)], bytes(4)),
        "w has 5 dimensions",
    ),
    "no values": (gguf_bytes([], [entry("w", (0, 3), 0, 0)]), "w of [0, 3] F32"),
    "half a block": (gguf_bytes([], [entry("w", (1, 33), 8, 0)], bytes(99)), "[1, 33] Q8_0"),
    "a huge tensor": (gguf_bytes([], [entry("w", (HUGE, HUGE), 0, 0)]), "F32 is not in "),
    "a far tensor": (gguf_bytes([], [entry("w", (1,), 0, HUGE)], bytes(4)), "F32 is not in "),
    "shared bytes": (
        gguf_bytes([], [entry("v", (2,), 0, 0), entry("w", (2,), 0, 0)], bytes(12)),
        "w of [2] F32 is not in",
    ),
    "alignment": (
        gguf_bytes([field("general.alignment", U32, struct.pack("<I", 0))], []),
        "cannot be read (",
    ),
    "whole numbers": (
        gguf_bytes([], [entry("w", (1, 4), 26, 0)], bytes(16)),
        "cannot be read (Dequantization for I32 is not",
    ),
    "a new type": (
        gguf_bytes([], [entry("w", (1, 256), 999, 0)], bytes(136)),
        "(999 is not a valid GGMLQuantizationType)",
    ),
}


@pytest.mark.parametrize("content, message", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named_and_allocates_little(path, content, message):
    found, allocated = refused(path, content)

    assert message in found
    assert allocated < 1 << 20


def test_metadata_have_a_limit(path):
    content = gguf_bytes([struct.pack("<Q", _MOST_HEADER_BYTES)], [])
    path.write_bytes(content)
    with path.open("r+b") as file:
        # a hole, not bytes of the disk
        file.truncate(_MOST_HEADER_BYTES + len(content))

    with pytest.raises(CheckpointError, match="within the metadata, or they are too many"):
        read_gguf(path)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(
        st.integers(0, len(WHOLE) - 1), st.integers(0, 255), min_size=1, max_size=6
    ),
    kept=st.integers(0, len(WHOLE)),
)
def test_any_damage_is_read_or_refused_within_the_file(path, changes, kept):
    content = bytearray(WHOLE)
    for place, value in changes.items():
        content[place] = value
    path.write_bytes(content[:kept])

    try:
        tensors = read_gguf(path).tensors
    except CheckpointError:
        return

    assert sum(each.data.nbytes for each in tensors.values()) <= kept


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q5_1", "Q8_0", "IQ4_XS", "Q4_K"])
@pytest.mark.parametrize("part", [1, 1000, 1 << 20])
def test_parts_of_a_tensor_are_its_rows(path, monkeypatch, kind, part):
    monkeypatch.setattr(gguf_checkpoint, "_PART", part)
    dtype = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[dtype]
    # small numbers in every place are finite scales
    data = np.random.default_rng(0).integers(0, 60, (7, 3 * size), dtype=np.uint8)
    path.write_bytes(gguf_bytes([], [entry("w", (7, 3 * values), dtype, 0)], data.tobytes()))

    tensor = read_gguf(path).tensors["w"]

    widened = np.concatenate([*tensor.widened()])
    assert widened.dtype == np.float32
    np.testing.assert_array_equal(widened, gguf.quants.dequantize(data, dtype))
    assert tensor.dtype == (kind if kind in ("F32", "F16") else "BF16")


def test_the_package_that_is_missing_is_named(path, monkeypatch):
    path.write_bytes(WHOLE)
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(CheckpointError, match="m-q4.gguf can be read with gguf: pip install"):
        read_gguf(path)
