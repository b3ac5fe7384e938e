"""The table of layers in docs/concepts/architecture.md, from the import contract and the docstrings.

The rest of that page is written by hand.
"""

import ast
import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
_PACKAGE = PROJECT / "backend/varlen"
_HEAD = "| `backend/varlen/`, top to bottom | contents |\n|---|---|\n"
_TABLE = re.compile(re.escape(_HEAD) + r"(?:\|.*\n)+")
_LAYERS = re.compile(
    r'^containers = \["varlen"\]\n.*?^layers = \[\n(.*?)^\]', re.MULTILINE | re.DOTALL
)


def architecture_page(page: Path) -> str:
    """Return the text of a page with a new table of layers."""
    text, count = _TABLE.subn(_HEAD + "".join(_rows()), page.read_text())
    assert count == 1, f"{page} has {count} tables of layers"
    return text


def _rows() -> list[str]:
    """Return a line for each layer, from top to bottom."""
    contract = _LAYERS.search((PROJECT / "pyproject.toml").read_text())
    assert contract, "pyproject.toml has no layers of varlen"
    layers = [re.findall(r"\w+", line) for line in re.findall('"(.*)"', contract[1])]
    return [
        f"| {', '.join(f'`{name}`' for name in names)} | {' '.join(map(_summary, names))} |\n"
        for names in layers
    ]


def _summary(name: str) -> str:
    """Return the first line of a module's docstring."""
    folder = _PACKAGE / name
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(file.read_text()))
    assert docstring, f"{file} has no docstring"
    return docstring.partition("\n")[0]
