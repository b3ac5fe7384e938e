"""Files of the hub that are complete are not downloaded again after an interruption."""

import json
import os
import subprocess
import sys
import threading
import time
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.checkpoints import save_checkpoint

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """A hub with one model, which holds back half of one file.

    Attributes:
        folder: the checkpoint.
        held: name of that file.
        asked: names of files that were asked for.
        is_held: set while the client waits for the rest of the file.
        is_released: set once whole files are sent.
    """

    daemon_threads = True

    def __init__(self, folder, held):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.folder, self.held, self.asked = folder, held, []
        self.is_held, self.is_released = threading.Event(), threading.Event()


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Print nothing."""

    def do_HEAD(self):
        self._send_file(is_asked_for=False)

    def do_GET(self):
        files = list(self.server.folder.iterdir())
        if self.path.startswith("/api/models/org/tiny/tree/"):
            self._send_json(
                [
                    {
                        "type": "file",
                        "path": each.name,
                        "size": each.stat().st_size,
                        "oid": each.name,
                    }
                    for each in files
                ]
            )
        elif self.path.startswith("/api/models/org/tiny"):
            names = [{"rfilename": each.name} for each in files]
            self._send_json({"id": "org/tiny", "sha": _COMMIT, "siblings": names})
        else:
            self._send_file(is_asked_for=True)

    def _send_file(self, *, is_asked_for):
        path = self.server.folder / self.path.rpartition("/")[2]
        if not path.exists():
            self._begin(404, 0, {"X-Error-Code": "EntryNotFound"})
            return
        content = path.read_bytes()
        tag = f'"{sha256(content).hexdigest()}"'
        self._begin(200, len(content), {"ETag": tag, "X-Repo-Commit": _COMMIT})
        if not is_asked_for:
            return
        self.server.asked.append(path.name)
        if path.name == self.server.held and not self.server.is_released.is_set():
            self.wfile.write(content[: len(content) // 2])
            self.server.is_held.set()
            self.server.is_released.wait()
            self.close_connection = True
        else:
            self.wfile.write(content)

    def _send_json(self, value):
        content = json.dumps(value).encode()
        self._begin(200, len(content), {"Content-Type": "application/json"})
        self.wfile.write(content)

    def _begin(self, status, size, headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(size), **headers}.items():
            self.send_header(name, value)
        self.end_headers()


@pytest.fixture
def checkpoint(tmp_path):
    return save_checkpoint(tmp_path / "tiny", save={"max_shard_size": "30KB"})


@pytest.fixture
def hub(checkpoint):
    shards = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    assert len(shards) > 1
    with Hub(checkpoint, shards[-1]) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        yield hub
        hub.is_released.set()
        hub.shutdown()
        thread.join()


@pytest.mark.full
def test_a_killed_download_goes_on(hub, checkpoint, tmp_path):
    repository = tmp_path / "served/models"
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(tmp_path / "hub"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_DOWNLOAD_TIMEOUT": "100",
        "NO_PROXY": "*",
    }
    command = [sys.executable, "-m", "varlen_tools.fetch", "org/tiny", "--repository", repository]
    files = {path.name for path in checkpoint.iterdir()}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as first:
        assert hub.is_held.wait(100)
        found = tmp_path.glob("cache/varlen/downloads/*")
        (downloads,) = (path for path in found if path.is_dir())
        while not files - {hub.held} <= {path.name for path in downloads.iterdir()}:
            time.sleep(0.01)
        first.kill()

    away = {**environment, "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert subprocess.run(command, env=away, capture_output=True, check=False).returncode == 2
    assert not (repository / "tiny").exists()
    hub.is_released.set()
    hub.asked.clear()

    second = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert second.returncode == 0, second.stderr
    assert hub.asked == [hub.held]
    served = repository / "tiny/1"
    assert {path.name for path in served.iterdir()} == files
    assert all((served / name).read_bytes() == (checkpoint / name).read_bytes() for name in files)
    assert not downloads.exists()
