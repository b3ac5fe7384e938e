"""Every example is listed, run by `make examples`, short, and can be compiled."""

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.ci.scripts import PROJECT

pytestmark = pytest.mark.full

EXAMPLES = PROJECT / "examples"
README = (EXAMPLES / "README.md").read_text()
# Files of a model are one example, and the runner is none.
FILES = sorted(
    path.relative_to(EXAMPLES).as_posix()
    for path in EXAMPLES.rglob("*.*")
    if path.is_file() and path.name not in ("README.md", "run_all.py", "config.pbtxt")
    if path.suffix != ".pyc"
)
MOST_LINES = 60


@pytest.mark.parametrize("name", FILES)
def test_an_example_is_listed_run_and_short(name):
    assert f"]({name})" in README
    lines = (EXAMPLES / name).read_text().splitlines()
    # a model is asked by the example bls_search.py, and a notebook is JSON
    if not name.startswith("model_repository/"):
        assert f'    "{name}": ' in (EXAMPLES / "run_all.py").read_text()
    if not name.endswith(".ipynb"):
        assert len(lines) <= MOST_LINES


def test_links_of_the_readme_lead_to_files():
    links = re.findall(r"\]\(([^)#:]+)[^)]*\)", README)

    assert len(links) > len(FILES)
    assert [link for link in links if not (EXAMPLES / link).is_file()] == []


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".py")])
def test_python_can_be_compiled(name):
    compile((EXAMPLES / name).read_text(), name, "exec")


def test_cells_of_the_notebook_can_be_compiled_and_hold_no_outputs():
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]

    assert len(code) >= 4
    for cell in code:
        ast.parse("".join(cell["source"]))
        assert cell["outputs"] == []


def test_the_page_loads_nothing():
    page = (EXAMPLES / "chat.html").read_text()

    assert re.findall(r"""(?:src|href)\s*=|import\s*\(|@import|url\(""", page) == []


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".sh")])
def test_a_script_can_be_parsed(name):
    script = Path(EXAMPLES, name)

    assert script.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
