"""A server that was not set up here finds the backend by one folder."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest

from tests.server.serving import add_model
from varlen_client import Client
from varlen_tools.install_backend import InstallError, install, main
from varlen_tools.local_server import LocalServer
from varlen_tools.run_server import library_path

from .commands import run_varlen


@pytest.fixture
def backends(tmp_path):
    """A backends folder with a python backend in it, as a server's image has one."""
    folder = tmp_path / "opt/backends"
    (folder / "python").mkdir(parents=True)
    return folder


def test_another_user_can_read_the_packages_and_no_caches_are_copied(backends):
    before = os.umask(0o022)
    try:
        target = install(backends)
    finally:
        os.umask(before)

    assert target == backends / "varlen"
    names = sorted(path.name for path in target.iterdir())
    assert names == ["model.py", "varlen", "varlen_kernels"]
    assert (target / "varlen/server/entry.py").is_file()
    assert (target / "varlen_kernels/reference/__init__.py").is_file()
    assert sorted(backends.iterdir()) == [backends / "python", target]
    for path in (target, *target.rglob("*")):
        assert path.stat().st_mode & 0o004, path
        assert path.is_file() or path.stat().st_mode & 0o001, path
    assert not list(target.rglob("__pycache__"))


def test_an_older_copy_is_replaced_as_a_whole(backends):
    install(backends)
    (backends / "varlen/varlen/removed_since.py").touch()

    install(backends)

    assert not (backends / "varlen/varlen/removed_since.py").exists()


def test_a_link_is_replaced_and_what_it_led_to_stays(backends, tmp_path):
    elsewhere = tmp_path / "checkout"
    elsewhere.mkdir()
    (elsewhere / "model.py").touch()
    (backends / "varlen").symlink_to(elsewhere)

    install(backends)

    assert not (backends / "varlen").is_symlink()
    assert (elsewhere / "model.py").exists()


def test_someone_elses_backend_of_this_name_is_left_alone(backends):
    (backends / "varlen").mkdir()
    (backends / "varlen/libtriton_varlen.so").touch()

    with pytest.raises(InstallError, match="was not made by this command; move it away first"):
        install(backends)

    assert (backends / "varlen/libtriton_varlen.so").exists()


def test_a_folder_without_a_python_backend_is_not_a_backends_folder(tmp_path, capsys):
    for folder, message in [
        (tmp_path, "has no python backend"),
        (tmp_path / "absent", "there is no folder"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main([str(folder)])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
        refused = run_varlen("install-backend", folder)
        assert refused.exit_code == 2
        assert message in refused.stderr


def test_the_command_makes_the_folder_of_the_backend(backends):
    made = run_varlen("install-backend", backends)

    assert made.stdout.startswith(f"install-backend: {backends}/varlen is ready\n")
    assert (backends / "varlen/varlen_kernels").is_dir()


@pytest.mark.full
@pytest.mark.server
def test_a_server_whose_python_does_not_know_varlen_serves_with_it(
    backends, encoder, kit, tmp_path
):
    (backends / "python").rmdir()
    (backends / "python").symlink_to(kit / "backends/python")
    install(backends)
    python = python_without_varlen(tmp_path / "venv")
    command = [python, "-I", "-c", "import torch, varlen"]
    imported = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    assert b"No module named 'varlen'" in imported.stderr
    environment = {
        "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
        "LD_LIBRARY_PATH": library_path(kit),
        "PYTHONPATH": "",
    }

    add_model(tmp_path / "models", "tiny", encoder)

    with LocalServer(
        tmp_path / "models",
        arguments=[
            f"--backend-directory={backends}",
            "--http-address=127.0.0.1",
            "--grpc-address=127.0.0.1",
            "--metrics-address=127.0.0.1",
        ],
        environment=environment,
        command=kit / "bin/tritonserver",
    ) as server:
        server.wait_ready()
        with Client(server.grpc_url, model="tiny") as client:
            vectors = client.embed(["one text", "another one"])

    assert vectors.shape == (2, 16)
    assert np.isfinite(vectors).all()


def python_without_varlen(folder: Path) -> Path:
    """Make an environment with this one's packages, but without its editable installs."""
    venv.create(folder, with_pip=False)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    # The .pth files of a folder that is added by a .pth file are not read.
    (folder / "lib" / version / "site-packages/shared.pth").write_text(packages + "\n")
    return folder / "bin/python"
