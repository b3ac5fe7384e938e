"""Compiled code is stored once, checked when it is read, and loaded without its compiler."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.checkpoints import save_checkpoint
from varlen_kernels import cpu
from varlen_kernels.cache_files import CacheError, CacheFolder
from varlen_kernels.cpu.calls import entries, machine_code
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.cpu.native.native import inlined
from varlen_kernels.cpu.native.target_cpu import LEVELS, target_cpu
from varlen_kernels.functions import ENTRIES

pytestmark = pytest.mark.skipif(not has_compiled_ops(), reason="ops are compiled")
_NAME = "run_alone"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Have code stored in an empty folder, and not loaded."""
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr(machine_code, "BESIDE", tmp_path / "package")
    monkeypatch.setattr(machine_code, "code_folder", lambda: own)
    monkeypatch.setattr(machine_code, "_load", lambda name, code: code)
    machine_code._warn.cache_clear()
    return own


@pytest.fixture
def compiled(monkeypatch):
    """Return the names of the functions that were compiled, which a few bytes stand for."""
    names = []

    def compile_code(name):
        names.append(name)
        return f"code of {name}".encode()

    monkeypatch.setattr(machine_code, "_compile", compile_code)
    return names


def file_name():
    return machine_code.file_name(_NAME, target_cpu().level)


def load(name=_NAME):
    """Return what another process loads."""
    return machine_code.address_of.__wrapped__(name)


def test_code_is_compiled_once_and_stored(folder, compiled):
    assert load() == load() == b"code of run_alone"
    assert compiled == [_NAME]


@pytest.mark.parametrize("place", [0, 5, 40])
def test_a_damaged_file_is_compiled_again(folder, compiled, place, caplog):
    load()
    file = folder / file_name()
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)

    assert load() == load() == b"code of run_alone"
    assert compiled == [_NAME] * 2
    assert "compiled code is damaged and is compiled again" in caplog.text


@pytest.mark.parametrize("size", [0, 10, 34])
def test_a_cut_file_is_compiled_again(folder, compiled, size):
    load()
    file = folder / file_name()
    file.write_bytes(file.read_bytes()[:size])

    assert load() == b"code of run_alone"
    assert compiled == [_NAME] * 2


def test_code_of_other_sources_is_not_used_and_is_removed_in_time(folder, compiled, monkeypatch):
    for number in range(10):
        monkeypatch.setattr(machine_code, "code_hash", lambda number=number: f"hash{number}")
        load()
        load()

    assert compiled == [_NAME] * 10
    assert len(list(folder.glob("*.o"))) <= 4
    assert (folder / file_name()).exists()


def test_code_that_came_with_the_package_is_used_first(folder, compiled):
    load()
    shipped = machine_code.BESIDE
    shipped.mkdir()
    (folder / file_name()).rename(shipped / file_name())

    assert load() == b"code of run_alone"
    assert compiled == [_NAME]
    # a damaged one is replaced where files can be written
    (shipped / file_name()).write_bytes(b"")
    assert load() == load() == b"code of run_alone"
    assert compiled == [_NAME] * 2
    assert (folder / file_name()).exists()


def test_levels_have_code_of_their_own(folder, compiled, monkeypatch):
    monkeypatch.setattr(machine_code, "features_here", lambda: LEVELS[0].features)
    for level in LEVELS:
        monkeypatch.setattr(machine_code, "target_cpu", lambda level=level: level)
        load()
        load()

    assert compiled == [_NAME] * len(LEVELS)
    assert len(list(folder.glob("*.o"))) == len(LEVELS)


def test_code_that_this_cpu_cannot_run_is_not_loaded(folder, compiled, monkeypatch):
    monkeypatch.setattr(machine_code, "features_here", frozenset)
    monkeypatch.setattr(machine_code, "target_cpu", lambda: LEVELS[0])

    with pytest.raises(RuntimeError, match="cannot run code of the level amx; unset"):
        load()

    assert not compiled


def test_code_is_not_compiled_where_numba_knows_another_cpu(monkeypatch):
    other = next(level for level in LEVELS if level != target_cpu())
    monkeypatch.setattr(machine_code, "target_cpu", lambda: other)

    with pytest.raises(RuntimeError, match="has used numba before"):
        machine_code._compile(_NAME)


def test_code_of_the_package_needs_no_other_folder(folder, compiled, monkeypatch):
    load()
    folder.rename(machine_code.BESIDE)

    def fail():
        raise CacheError("a user without a home")

    monkeypatch.setattr(machine_code, "code_folder", fail)

    assert load() == b"code of run_alone"


def test_a_process_waits_for_the_one_that_compiles(folder, compiled):
    found = []
    with CacheFolder(folder).lock(f"{_NAME}.lock", 0):
        thread = threading.Thread(target=lambda: found.append(load()))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        assert not compiled
        machine_code._store(CacheFolder(folder), _NAME, b"of the other one")
    thread.join()

    assert found == [b"of the other one"]
    assert not compiled


def test_a_lock_that_is_never_released_costs_a_warning(folder, compiled, monkeypatch, caplog):
    monkeypatch.setattr(machine_code, "_LOCK_SECONDS", 0.1)
    with CacheFolder(folder).lock(f"{_NAME}.lock", 0):
        assert load() == b"code of run_alone"

    assert f"{_NAME}.lock is locked by process {os.getpid()} " in caplog.text


@pytest.mark.parametrize("place", ["absent", "unknown"])
def test_without_a_folder_each_start_compiles_and_says_so_once(
    folder, compiled, place, monkeypatch, caplog
):
    def code_folder():
        if place == "absent":
            return Path("/proc/absent/code")
        raise CacheError("user 12345 has no home; set XDG_CACHE_HOME")

    monkeypatch.setattr(machine_code, "code_folder", code_folder)

    assert load() == load() == b"code of run_alone"
    assert compiled == [_NAME] * 2
    assert caplog.text.count("each start compiles") == 1
    assert "XDG_CACHE_HOME" in caplog.text


@pytest.mark.parametrize("how", ["of another user", "writable by all", "a link", "a pipe"])
def test_code_that_others_can_write_is_not_loaded(folder, compiled, how, caplog):
    load()
    file = folder / file_name()
    if how == "of another user":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(file, 65534, 65534)
    elif how == "writable by all":
        file.chmod(0o666)
    else:
        moved = folder / "elsewhere"
        file.rename(moved)
        file.symlink_to(moved) if how == "a link" else os.mkfifo(file)

    assert load() == b"code of run_alone"

    assert compiled == [_NAME] * 2
    assert "stored code is not used" in caplog.text


def test_code_under_the_name_of_another_function_is_not_loaded(folder, compiled):
    load()
    other = machine_code.file_name("multiply", target_cpu().level)
    (folder / file_name()).rename(folder / other)

    assert load("multiply") == b"code of multiply"


def test_code_that_cannot_be_stored_runs_all_the_same(folder, compiled, monkeypatch, caplog):
    def fail(folder, name, code):
        raise OSError("No space left on device")

    monkeypatch.setattr(machine_code, "_store", fail)

    assert load() == load() == b"code of run_alone"
    assert compiled == [_NAME] * 2
    assert caplog.text.count("compiled code is not stored") == 1


def test_what_an_ended_process_left_is_removed(folder, compiled):
    (folder / f".{_NAME}-hash.o.abc").write_bytes(b"half")

    load()

    assert sorted(path.name for path in folder.iterdir()) == sorted([f"{_NAME}.lock", file_name()])


def test_sources_that_changed_meanwhile_are_not_stored_under_the_old_hash(monkeypatch):
    def changed():
        return "of older sources"

    changed.__wrapped__ = machine_code.code_hash.__wrapped__
    monkeypatch.setattr(machine_code, "code_hash", changed)

    with pytest.raises(RuntimeError, match="sources of compiled code have changed"):
        machine_code._compile(_NAME)


def test_code_that_needs_its_compiler_is_refused(monkeypatch):
    @inlined
    def raises(arguments, first, last):
        return (first, last)[arguments]

    monkeypatch.setattr(entries, "entry_of", lambda _: raises)

    with pytest.raises(RuntimeError, match="calls functions of the compiler"):
        machine_code._compile("raises")


@pytest.mark.parametrize(
    "name, changes",
    [
        ("cpu/calls/entries.py", True),
        ("cpu/native/lanes.py", True),
        ("reference/beam.py", True),
        ("functions.py", True),
        ("op_table.py", True),
        # the command that compiles ahead
        ("cpu/compile_all.py", False),
    ],
)
def test_a_change_of_a_source_has_another_hash(tmp_path, monkeypatch, name, changes):
    package, expected = Path(cpu.__path__[0]).parent, machine_code.code_hash()
    ignored = shutil.ignore_patterns("__pycache__", "*.o")
    copy = shutil.copytree(package, tmp_path / "varlen_kernels", ignore=ignored)
    monkeypatch.setattr(machine_code, "_FOLDER", copy / "cpu")
    # the hash is cached
    found = machine_code.code_hash.__wrapped__

    assert found() == expected
    with (copy / name).open("a") as file:
        file.write("# changed\n")
    assert (found() != expected) is changes


_SERVE = """
import sys
sys.modules["numba"] = None
from varlen import Encoder, Generator
for dtype in ("fp32", "bf16", "int8"):
    with Encoder.from_pretrained({encoder!r}, device="cpu", dtype=dtype) as model:
        model.embed([[1, 2, 3], [4]])
for dtype in ("fp32", "bf16", "int8"):
    with Generator.from_pretrained({decoder!r}, device="cpu", dtype=dtype) as model:
        model.generate([[1, 2, 3]], max_tokens=2, temperature=0.5)
"""


def test_models_run_stored_code_without_numba(tmp_path):
    """Every function was compiled before, by `make setup` or by this test."""
    for name in ENTRIES:
        machine_code.address_of(name)
    encoder = save_checkpoint(tmp_path / "bert")
    decoder = save_checkpoint(tmp_path / "gpt2", "GPT2LMHeadModel")
    program = _SERVE.format(encoder=str(encoder), decoder=str(decoder))

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "not compiled" not in done.stderr
