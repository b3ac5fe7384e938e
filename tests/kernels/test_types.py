"""Every function of the kernels package is typed, except those that are compiled."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import varlen_kernels

FILES = sorted(Path(varlen_kernels.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_functions_outside_kernels_are_typed(path: Path) -> None:
    tree = ast.parse(path.read_text())
    untyped = [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and not any(is_compiler(decorator) for decorator in function.decorator_list)
        and not (function.returns and all(argument.annotation for argument in arguments(function)))
    ]

    assert untyped == []


def is_compiler(decorator: ast.expr) -> bool:
    """Return whether a decorator is Triton's or numba's, or one of `cpu.native`."""
    return ast.unparse(decorator).startswith(("triton.", "numba.", "inlined"))


def arguments(function: ast.FunctionDef) -> Iterator[ast.arg]:
    """Yield the arguments that need an annotation."""
    spec = function.args
    for argument in [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]:
        if argument is not None and argument.arg not in {"self", "cls"}:
            yield argument
