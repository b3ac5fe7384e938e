"""A bundle serves without a network; a damaged, foreign or unsafe one is refused."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.checkpoints import save_checkpoint
from varlen_tools import unbundle as program
from varlen_tools.unbundle import MANIFEST, PAYLOAD, BundleError, extract, unbundle

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


def entry(name: str, content: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.size = len(content)
    for field, value in fields.items():
        setattr(made, field, value)
    return made, content


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=kind, linkname=target)


def payload_of(*entries: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:xz") as archive:
        for info, content in entries:
            archive.addfile(info, io.BytesIO(content))
    made.seek(0)
    return made


def test_files_and_links_between_them_are_unpacked(tmp_path: Path) -> None:
    payload = payload_of(
        entry("bin/run", b"code", mode=0o755),
        entry("lib/data", b"text", mode=0o777),
        link("share/link", "../lib/data"),
    )

    extract(payload, tmp_path, files=3, size=8)

    assert (tmp_path / "share/link").read_bytes() == b"text"
    assert os.access(tmp_path / "bin/run", os.X_OK)
    # no bit of the archive but the one for programs is kept
    assert (tmp_path / "lib/data").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    "unsafe, message",
    [
        ([entry("/etc/passwd", b"x")], "leads out of the folder"),
        ([entry("a/../../b", b"x")], "leads out of the folder"),
        ([link("a", "/etc")], "leads out of the folder"),
        ([link("a/b", "../../c")], "leads out of the folder"),
        ([entry("d/a"), link("e", "d"), entry("e/b", b"x")], "is behind a link"),
        ([entry("d/a"), link("b", "d/a", tarfile.LNKTYPE)], "neither a regular file nor a link"),
        ([entry("a", type=tarfile.CHRTYPE)], "neither a regular file nor a link"),
        ([entry("a", type=tarfile.FIFOTYPE)], "neither a regular file nor a link"),
        ([entry("a", b"12345678901")], "larger than manifest.json says, at 'a'"),
        ([entry(str(i)) for i in range(9)], "larger than manifest.json says, at '8'"),
    ],
    ids=lambda value: value.replace(" ", "-")[:24] if isinstance(value, str) else None,
)
def test_nothing_is_written_outside_of_the_folder_or_beyond_a_limit(
    unsafe: list[tuple[tarfile.TarInfo, bytes]], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "made"
    folder.mkdir()

    with pytest.raises(BundleError, match=message):
        extract(payload_of(*unsafe), folder, files=8, size=10)

    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def write_bundle_of(path: Path, payload: bytes, **fields: object) -> Path:
    manifest = {
        "python": PYTHON,
        "files": 1,
        "bytes": 4,
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MANIFEST, json.dumps(manifest | fields))
        archive.writestr(PAYLOAD, payload)
    return path


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"python": "3.99"},
            r"this is Python 3\.\d+; the bundle is for 3\.99: run it with python3\.99",
        ),
        ({"files": 10**9}, "at most 20000 of 1073741824 are unpacked"),
        ({"bytes": 10**12}, "at most 20000 of 1073741824 are unpacked"),
        ({"bytes": "many"}, "manifest.json is not that of a bundle"),
        ({"sha256": "0"}, "payload.tar.xz has another hash than manifest.json says"),
        ({"files": 0}, "larger than manifest.json says"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_bundle_that_does_not_fit_leaves_nothing_behind(
    fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    payload = payload_of(entry("lib/data", b"text")).getvalue()
    bundle = write_bundle_of(tmp_path / "bundle.pyz", payload, **fields)

    with pytest.raises(BundleError, match=message):
        unbundle(bundle, tmp_path / "made")

    assert not (tmp_path / "made").exists()


def test_what_is_no_bundle_and_a_folder_with_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.pyz"
    other.write_bytes(b"text")
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    payload = payload_of(entry("lib/data", b"text")).getvalue()
    bundle = write_bundle_of(tmp_path / "bundle.pyz", payload)

    for path in (other, tmp_path / "empty.zip"):
        with pytest.raises(BundleError, match="is no bundle of this project, or damaged"):
            unbundle(path, tmp_path / "made")
    with pytest.raises(BundleError, match="exists and is not an empty folder; name another one"):
        unbundle(bundle, tmp_path)
    assert other.read_bytes() == b"text"


def test_a_python_without_torch_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(BundleError, match="has no torch, which a bundle does not bring along"):
        program.check_machine({"python": PYTHON})


# on a machine without a network

# What torch needs, and nothing else that `make setup` installs.
OF_MACHINE = (
    *("torch", "torchgen", "functorch", "typing_extensions.py", "sympy", "mpmath", "networkx"),
    *("jinja2", "markupsafe", "filelock", "fsspec"),
)
# Runs in the new environment: starts the server and asks each model once, over HTTP.
ASK = """
import json, sys, urllib.request
from pathlib import Path
from varlen_tools.local_server import LocalServer

def ask(server, path, **body):
    request = urllib.request.Request(f"{server.http_url}/v2/models/{path}", json.dumps(body).encode())
    return json.load(urllib.request.urlopen(request, timeout=60))

with LocalServer(sys.argv[1]) as server:
    server.wait_ready(200)
    text = {"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": ["a text"]}
    vectors = ask(server, "embed/infer", inputs=[text])
    names = [each["name"] for each in vectors["outputs"]]
    answer = ask(server, "generate/generate", text_input="a", max_tokens=4, ignore_eos=True)
    translation = ask(server, "translate/generate", text_input="a", max_tokens=4)
print(json.dumps({"outputs": names, "answer": answer, "translation": translation}))
"""
# Brings up loopback, which a new network namespace has and does not use yet; 0x8914 is SIOCSIFFLAGS.
LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 1))
os.execv(sys.argv[1], sys.argv[1:])
"""


def without_network() -> list[str]:
    """Return the beginning of a command without a network; nothing where that is not allowed."""
    for words in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        command = [*words, sys.executable, "-IS", "-c", LOOPBACK_UP]
        if shutil.which("unshare") is None:
            break
        done = subprocess.run([*command, "/bin/true"], capture_output=True, check=False)
        if done.returncode == 0:
            return command
    return []


@pytest.mark.full
@pytest.mark.server
# it compresses 200 MB, and starts a server
@pytest.mark.timeout(1800)
def test_a_machine_with_torch_and_no_network_serves_three_models(kit: Path, tmp_path: Path) -> None:
    from varlen_tools.bundle import write_bundle

    made = write_bundle(tmp_path / "dist")
    # without binutils the debug symbols stay
    assert made.stat().st_size <= 45_000_000 or shutil.which("strip") is None
    python = machine_python(tmp_path / "machine")
    repository = write_models(tmp_path / "models")
    bundle = shutil.move(made, tmp_path / "bundle.pyz")
    alone = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path / "home"), "LANG": "C.UTF-8"}
    before = without_network()

    def run(*command: object) -> str:
        words = [*before, *map(str, command)]
        done = subprocess.run(
            words,
            cwd=tmp_path / "machine",
            env=alone,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = run(python, bundle, tmp_path / "environment")
    found = json.loads(
        run(tmp_path / "environment/bin/python", "-c", ASK, repository).splitlines()[-1]
    )

    assert (
        said == f"unbundle: ready: {tmp_path}/environment/bin/tritonserver --model-repository DIR\n"
    )
    assert "sentence_embedding" in found["outputs"]
    assert "text_output" in found["answer"]
    assert "text_output" in found["translation"]
    if not before:
        pytest.skip(
            "it ran with a network: this machine allows no network namespace (unshare --net)"
        )


def machine_python(folder: Path) -> Path:
    """Return the Python of an environment that has torch only."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = folder / f"lib/python{PYTHON}/site-packages"
    ours = Path(sys.prefix, f"lib/python{PYTHON}/site-packages")
    for name in OF_MACHINE:
        if (ours / name).exists():
            (packages / name).symlink_to(ours / name)
    for info in ours.glob("torch-*.dist-info"):
        (packages / info.name).symlink_to(info)
    return folder / "bin/python"


def write_models(folder: Path) -> Path:
    """Write a repository of a small model for each of three tasks."""
    kinds = {
        "embed": "BertModel",
        "generate": "GPT2LMHeadModel",
        "translate": "T5ForConditionalGeneration",
    }
    for task, kind in kinds.items():
        save_checkpoint(folder / task / "1", kind)
        (folder / task / "config.pbtxt").write_text('backend: "varlen"\n')
    return folder
