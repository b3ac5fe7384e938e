"""Runs every example against `varlen serve` on small models: `python -m examples.run_all`, or `make examples`.

The reranker has random weights, so its order of documents means nothing: no trained one of this size comes in a
package. The model of the chat page is tiny_gpt2 with a chat template, and writes nonsense.
"""

import contextlib
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.checkpoints import save_checkpoint, set_fields
from varlen_tools.local_server import free_port
from varlen_tools.run_server import is_taken

EXAMPLES = Path(__file__).parent
PROJECT = EXAMPLES.parent
DEMO_MODELS = [
    PROJECT / "model_repository" / name for name in ("minilm", "tiny_gpt2", "tiny_dates")
]
VARLEN = (sys.executable, "-m", "varlen_client.cli.main")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_SECONDS = 300
QUERY = "how do I reset my password"
LINES = [
    "Trains to the airport run every hour.",
    "You can change a forgotten password in the settings of your account.",
    "The cafeteria opens at eleven.",
    "Invoices are sent on the first day of a month.",
]


class MissingProgramError(Exception):
    """An example needs a program that is not on this machine."""


class Pages(SimpleHTTPRequestHandler):
    """Serves files, without a log."""

    def log_message(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """What examples need.

    Attributes:
        grpc: address of the server, with its scheme.
        folder: scratch folder.
    """

    grpc: str
    folder: Path

    def run(self, *words: str | Path, **variables: str) -> str:
        """Return what a command prints; it has to succeed."""
        environment = os.environ | {"VARLEN_URL": self.grpc} | variables
        # perf_analyzer and varlen are beside this Python
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        run = subprocess.run(
            words,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        if run.returncode:
            raise AssertionError(f"exit code {run.returncode}: {(run.stderr or run.stdout)[:500]}")
        return run.stdout

    def python(self, name: str, *words: str | Path) -> str:
        """Return what an example prints."""
        return self.run(sys.executable, EXAMPLES / name, *words)


def semantic_search(at: Place) -> None:
    """Index pages of the documentation, and find the one that answers a question."""
    index = at.folder / "index.npz"
    said = at.python("semantic_search.py", "index", PROJECT / "docs/start", index)
    assert re.fullmatch(r"\d+ paragraphs in .*\n", said), said
    question = "Which languages of Python and which operating system do I need?"
    best, *others = at.python("semantic_search.py", "query", index, question).splitlines()
    assert "install.md" in best, best
    assert len(others) == 4


def rerank_pipeline(at: Place) -> None:
    """Find the line that answers a question among the nearest two."""
    file = at.folder / "faq.txt"
    file.write_text("\n".join(LINES))
    said = at.python("rerank_pipeline.py", file, QUERY, "--retrieve", "2", "--top", "2")
    scores = [float(line.split()[0]) for line in said.splitlines()]
    assert scores == sorted(scores, reverse=True)
    # the embedder finds it; the random reranker puts it anywhere among the two
    assert LINES[1] in said, said


def bls_search(at: Place) -> None:
    """Ask the model that asks two models; every document comes back, the best first."""
    said = at.python("bls_search.py", QUERY, *LINES).splitlines()
    assert sorted(line.split(maxsplit=1)[1] for line in said) == sorted(LINES), said
    scores = [float(line.split()[0]) for line in said]
    assert scores == sorted(scores, reverse=True)


def load_test(at: Place) -> None:
    """Load both models at three concurrencies, in short windows."""
    address = at.grpc.removeprefix("grpc://")
    said = at.run(EXAMPLES / "load_test.sh", ADDRESS=address, WINDOW_MS="500")
    assert said.count(" Throughput: ") == 6, said
    assert " Throughput: 0 " not in said, said


def tour(at: Place) -> None:
    """Run the cells of the notebook in a kernel of their own."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    os.environ["VARLEN_URL"] = at.grpc
    NotebookClient(notebook, timeout=TIMEOUT_SECONDS).execute()
    outputs = [len(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    assert sum(outputs) >= 4, outputs


def chat(at: Place) -> None:
    """Open the page in a browser, and wait for the answer to a first message."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise MissingProgramError("there is no Chromium")
    handler = partial(Pages, directory=str(EXAMPLES))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        origin, port = f"http://127.0.0.1:{pages.server_port}", str(free_port())
        # tiny_gpt2 takes 256 tokens: a gateway with shorter answers
        options = ["--url", at.grpc, "--port", port, "--cors-origin", origin]
        options += ["--chat-max-tokens", "100"]
        with process(*VARLEN, "serve-http", *options) as gateway:
            wait_for(gateway, "running on")
            page = f"{origin}/chat.html?gateway=http://127.0.0.1:{port}&model=chat&ask=hello"
            words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=30000"]
            words += [f"--user-data-dir={at.folder / 'browser'}", "--window-size=800,600"]
            shown = at.run(browser, *words, "--dump-dom", page)
            if picture := os.environ.get("CHAT_PICTURE"):
                at.run(browser, *words, f"--screenshot={picture}", page)
        pages.shutdown()
    said = re.findall(r'<p class="(\w+)">(.*?)</p>', shown, re.DOTALL)
    assert [role for role, _ in said] == ["user", "assistant"], said
    assert html.unescape(said[1][1]).strip(), said


CHECKS: dict[str, Callable[[Place], None]] = {
    "semantic_search.py": semantic_search,
    "rerank_pipeline.py": rerank_pipeline,
    "bls_search.py": bls_search,
    "load_test.sh": load_test,
    "tour.ipynb": tour,
    "chat.html": chat,
}


def make_models(folder: Path) -> list[Path]:
    """Return the checkpoints that `make setup` does not make."""
    reranker = save_checkpoint(
        folder / "reranker",
        "BertForSequenceClassification",
        num_labels=1,
        max_position_embeddings=512,
    )
    chat_model = Path(shutil.copytree(PROJECT / "model_repository/tiny_gpt2/1", folder / "chat"))
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    set_fields(chat_model, "tokenizer_config.json", chat_template=template)
    return [reranker, chat_model]


@contextlib.contextmanager
def process(*words: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Run a command, and end it."""
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield run
    finally:
        run.terminate()
        run.communicate(timeout=TIMEOUT_SECONDS)


def wait_for(run: subprocess.Popen[str], text: str) -> str:
    """Return what a process prints until it has printed this text.

    Raises:
        RuntimeError: it has ended before.
    """
    said = ""
    for line in run.stdout or ():
        said += line
        if text in line:
            return said
    raise RuntimeError(f"a server has ended:\n{said}")


def three_free_ports() -> int:
    """Return the first of three ports that are free now."""
    while True:
        first = free_port()
        if not any(is_taken("127.0.0.1", port) for port in (first + 1, first + 2)):
            return first


def main() -> None:
    """Start the servers, run the examples that are named, or all, and count them."""
    chosen = sys.argv[1:] or list(CHECKS)
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    with tempfile.TemporaryDirectory(prefix="varlen-examples-") as name:
        folder = Path(name)
        sources = [*DEMO_MODELS, *make_models(folder), EXAMPLES / "model_repository"]
        options = ["--port", str(free_port()), "--server-port", str(three_free_ports())]
        os.environ["XDG_CACHE_HOME"] = str(folder)
        with process(*VARLEN, "serve", *sources, *options) as server:
            said = wait_for(server, "Ctrl-C")
            address = re.search(r"grpc://[\d.:]+", said)
            assert address, said
            for example in chosen:
                began = time.monotonic()
                try:
                    CHECKS[example](Place(address[0], folder))
                    result = "passed"
                except MissingProgramError as reason:
                    result = f"skipped: {reason}"
                except Exception as error:
                    result = f"failed: {error!r}"
                counts[result.split(":")[0]] += 1
                print(f"{example}: {result} ({time.monotonic() - began:.1f} s)", flush=True)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
