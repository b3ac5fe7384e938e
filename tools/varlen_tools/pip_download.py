"""Download of one wheel by pip, without installing it or its dependencies.

pip uses the user's own index, proxy and certificates; it checks the hash if one is known.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from varlen_tools.messages import last_lines


class DownloadError(Exception):
    """pip did not download the wheel; the message ends with its last lines."""


def download_wheel(requirement: str, into: Path, *, sha256: str | None = None) -> Path:
    """Return the wheel of `requirement`, a `project==version`, as a file in `into`.

    Raises:
        DownloadError: there is none for this machine, or its hash is another one.
    """
    with tempfile.TemporaryDirectory(dir=into) as scratch:
        wanted = Path(scratch, "requirements.txt")
        wanted.write_text(requirement + (f" --hash=sha256:{sha256}\n" if sha256 else "\n"))
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", scratch, "--requirement", str(wanted)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        found = list(Path(scratch).glob("*.whl"))
        if run.returncode or len(found) != 1:
            raise DownloadError(f"pip cannot get {requirement}:\n  {last_lines(run.stderr)}")
        return Path(shutil.move(found[0], into))
