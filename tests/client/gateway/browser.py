"""Drives a headless Chromium by its debugging pipe, where the machine has one."""

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Longer than anything here takes.
SECONDS = 60.0
# `--no-sandbox`: the sandbox does not start as root. The pages are ours.
_OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
    " --disable-background-networking --disable-component-update --disable-sync"
    " --remote-debugging-pipe --hide-scrollbars"
).split()
# Chromium reads commands from descriptor 3, and writes to 4.
_START = """
import fcntl, os, sys
incoming, outgoing = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3])
os.dup2(incoming, 3)
os.dup2(outgoing, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def executable():
    """Return the path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def browser():
    """Start a browser, and yield a function that opens a page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        reads, writes = os.pipe(), os.pipe()
        command = [executable(), *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(reads[0]), str(writes[1]), *command],
            pass_fds=(reads[0], writes[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads[0])
        os.close(writes[1])
        pipe = _Pipe(writes[0], reads[1])
        try:
            yield lambda url, **options: Page(pipe, url, **options)
            pipe.call("Browser.close")
            process.wait(SECONDS)
        finally:
            process.kill()
            process.wait()
            pipe.close()


class _Pipe:
    """Commands and events of the browser, in JSON that ends with a zero byte."""

    def __init__(self, incoming, outgoing):
        self._incoming, self._outgoing = incoming, outgoing
        self._read, self._id = b"", 0
        self.events = []

    def call(self, method, session=None, **params):
        """Run a command, and return its result."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._outgoing, data) :]
        end = time.monotonic() + SECONDS
        while True:
            found = self._next(end)
            if found.get("id") == self._id:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self.events.append(found)

    def wait(self, method, session, since):
        """Wait until an event of a session is among the events from `since` on."""
        end = time.monotonic() + SECONDS
        while not any(
            each["method"] == method and each.get("sessionId") == session
            for each in self.events[since:]
        ):
            self.events.append(self._next(end))

    def _next(self, end):
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._incoming], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._incoming, 1 << 20) if ready else b""
            assert part, "the browser does not answer"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def close(self):
        os.close(self._incoming)
        os.close(self._outgoing)


class Page:
    """A page of the browser.

    Args:
        width: width of the window in pixels.
        scheme: "light" or "dark".
    """

    def __init__(self, pipe, url, *, width=1280, scheme="light"):
        self._pipe = pipe
        target = pipe.call("Target.createTarget", url="about:blank")["targetId"]
        attached = pipe.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)
        self.load(url)

    def load(self, url):
        """Load an address, and wait until all that its page names is there."""
        before = len(self._pipe.events)
        self.call("Page.navigate", url=url)
        self._pipe.wait("Page.loadEventFired", self._session, before)

    def call(self, method, **params):
        """Run a command of the page's session."""
        return self._pipe.call(method, self._session, **params)

    def run(self, script):
        """Return the value of an expression; a promise is awaited."""
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        found = self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script):
        """Wait until an expression is true."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if self.run(f"Boolean({script})"):
                return
            time.sleep(0.05)
        raise AssertionError(f"{script} is not true; the page: {self.text()}")

    def text(self):
        """Return the visible text."""
        return self.run("document.body.innerText")

    def press(self, key, code):
        """Press a key of the keyboard."""
        names = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **names, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **names)

    def requests(self):
        """Return the addresses that the page has loaded."""
        return [each["request"]["url"] for each in self._events("Network.requestWillBeSent")]

    def complaints(self):
        """Return the warnings and errors in the page's console, also about its policy."""
        logged = [each["entry"] for each in self._events("Log.entryAdded")]
        found = [each["text"] for each in logged if each["level"] in ("error", "warning")]
        thrown = self._events("Runtime.exceptionThrown")
        return found + [each["exceptionDetails"]["text"] for each in thrown]

    def _events(self, method):
        self.run("0")
        return [
            each["params"]
            for each in self._pipe.events
            if each["method"] == method and each.get("sessionId") == self._session
        ]
