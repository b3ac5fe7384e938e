"""Compiled code that is damaged on disk is compiled again."""

import importlib.util
import pickle

import pytest

from varlen_kernels.cpu import compiled_files
from varlen_kernels.cpu.compile_lock import compile_lock

INDEX = pickle.dumps("0.1") + pickle.dumps(("stamp", {}))
CODE = pickle.dumps(bytes(range(256)))


@pytest.fixture
def folder(tmp_path):
    """A folder with an index file and a file of code, as numba stores them."""
    (tmp_path / "add.nbi").write_bytes(INDEX)
    (tmp_path / "add.1.nbc").write_bytes(CODE)
    return tmp_path


def compiled(folder):
    """Return the names of the files of compiled code that are there."""
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".nbi", ".nbc"))


def replace(path, content):
    """Put a new file in the place of a file, as numba does."""
    new = path.with_suffix(".tmp")
    new.write_bytes(content)
    new.replace(path)


@pytest.mark.parametrize("content", [b"", INDEX[:3], INDEX[:-4], b"garbage"], ids=repr)
def test_an_unrecorded_file_that_numba_cannot_read_is_removed(folder, caplog, content):
    (folder / "cut.nbi").write_bytes(content)
    (folder / "cut.1.nbc").write_bytes(content[:5])

    compiled_files.remove_damaged(folder)

    assert compiled(folder) == ["add.1.nbc", "add.nbi"]
    assert "compiled code is damaged and is compiled again: cut.nbi" in caplog.text


def test_a_recorded_file_whose_bytes_have_changed_is_removed(folder, caplog):
    with compile_lock(folder):
        compiled_files.remove_damaged(folder)
    # numba can read it, and would run other code
    (folder / "add.1.nbc").write_bytes(CODE.replace(b"\x40\x41", b"\x41\x40"))

    # a lock that is held meanwhile does not make it sound
    with compile_lock(folder):
        pass
    compiled_files.remove_damaged(folder)

    assert compiled(folder) == ["add.nbi"]
    assert "add.1.nbc: its content has changed" in caplog.text


def test_a_file_that_numba_has_replaced_is_sound(folder, caplog):
    with compile_lock(folder):
        pass
    replace(folder / "add.nbi", INDEX[:-1] + b".")
    replace(folder / "add.1.nbc", pickle.dumps(b"other code"))

    compiled_files.remove_damaged(folder)

    assert compiled(folder) == ["add.1.nbc", "add.nbi"]
    assert not caplog.text


def test_a_file_in_the_place_of_a_removed_one_is_new(folder):
    with compile_lock(folder):
        pass
    code = folder / "add.1.nbc"
    code.write_bytes(b"damaged")
    with compile_lock(folder):
        compiled_files.remove_damaged(folder)
        # compiled again; some file systems give it the inode of the removed file
        code.write_bytes(pickle.dumps(b"other code"))

    compiled_files.remove_damaged(folder)

    assert "add.1.nbc" in compiled(folder)


@pytest.mark.parametrize(
    "record", [b"", b"{", b"[1]", b'{"add.nbi": 5}', b'{"add.nbi": [1, 2, 3]}']
)
def test_a_damaged_record_costs_nothing(folder, record):
    (folder / "varlen.sums").write_bytes(record)

    compiled_files.remove_damaged(folder)

    assert compiled(folder) == ["add.1.nbc", "add.nbi"]


def test_a_damaged_file_that_cannot_be_removed_is_an_error(folder, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError

    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    compiled_files.remove_damaged(folder)
    compiled_files.record(folder)
    (folder / "add.1.nbc").write_bytes(b"")

    with pytest.raises(PermissionError):
        compiled_files.remove_damaged(folder)


def test_numba_compiles_a_removed_file_again(tmp_path):
    source = tmp_path / "doubling.py"
    source.write_text("import numba\n@numba.njit(cache=True)\ndef double(x):\n    return 2 * x\n")

    def double():
        """Return the result in a fresh process, and whether its code was stored."""
        spec = importlib.util.spec_from_file_location("doubling", source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        folder = source.with_name("__pycache__")
        with compile_lock(folder):
            compiled_files.remove_damaged(folder)
            result = module.double(21)
        return result, bool(module.double.stats.cache_hits)

    assert double() == (42, False)
    assert double() == (42, True)
    for suffix in (".nbi", ".nbc"):
        [file] = source.with_name("__pycache__").glob(f"*{suffix}")
        content = bytearray(file.read_bytes())
        # in the middle of machine code, or of a name
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)
        assert double() == (42, False)
    assert double() == (42, True)
