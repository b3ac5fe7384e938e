"""The Dockerfiles install what the backend imports, copy files that exist, and drop root."""

import fnmatch
import re
from pathlib import Path

import pytest

from tests.ci.scripts import PROJECT
from varlen_tools.install_backend import NEEDED

pytestmark = pytest.mark.full

DOCKERFILES = sorted((PROJECT / "deploy").glob("Dockerfile*"))
# Patterns of .dockerignore that bring something back.
KEPT = [
    line[1:] for line in (PROJECT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
]


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def instructions(request):
    """The instructions of a Dockerfile, each in one line."""
    path: Path = request.param
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [line for line in text.splitlines() if line]


def test_the_server_gets_every_package_that_the_backend_imports():
    text = (PROJECT / "deploy/Dockerfile").read_text()
    installed = text.partition("--constraint /tmp/constraints.txt")[2].partition("\n#")[0]

    assert set(NEEDED) == set(installed.replace("\\", "").split())


def test_files_that_are_copied_exist_and_reach_the_builder(instructions):
    copied = [line.split()[1] for line in instructions if re.match("COPY (?!--from)", line)]

    assert copied
    for name in copied:
        assert (PROJECT / name).exists()
        assert name == "." or any(fnmatch.fnmatch(name, pattern) for pattern in KEPT)


def test_what_the_builder_gets_exists():
    assert [name for name in KEPT if not (PROJECT / name).exists()] == []


def test_a_container_is_not_root_and_is_watched(instructions):
    begin = max(at for at, line in enumerate(instructions) if line.startswith("FROM "))
    last_stage = instructions[begin:]

    assert "USER 1000:1000" in last_stage
    assert any(line.startswith("HEALTHCHECK ") for line in last_stage)
    # versions of base images are arguments with a default, and no stage has the tag latest
    assert all("${" in line for line in instructions if line.startswith("FROM "))


def test_images_and_pages_name_the_release_that_the_page_of_versions_says_to_take():
    [advised] = re.findall(r"\*\*Take (\S+) or newer\*\*", page("docs/operating/versions.md"))

    dockerfile = page("deploy/Dockerfile")
    installation = page("docs/start/install.md")
    tags = re.findall(r"tritonserver:(\d\d\.\d\d)", dockerfile + installation)
    stated = re.findall(r"TRITON_VERSION` is (\S+)", installation)
    [default] = re.findall(r"^ARG TRITON_VERSION=(\S+)", dockerfile, re.MULTILINE)

    assert tags
    assert stated
    assert {default, *tags, *stated} == {advised}


def page(name: str) -> str:
    """Return a file of the project."""
    return (PROJECT / name).read_text()
