"""A model that answers with the names of `triton_python_backend_utils`.

In the form of `tests/backend/fakes/server_api.json`. It needs numpy only, so it runs in the python backend of any
server.
"""

import inspect
import json
import re
import sys
from types import ModuleType
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

_SIGNATURE = re.compile(r"\w+\((?:self: (?P<owner>[\w.]+)(?:, |(?=\))))?(?P<parameters>.*)\) -> ")
_PARAMETER = re.compile(r"(?:^|, )(\w+): [^=]*?(?= =|, \w+: |$)( = )?")
_CONSTRUCTED = ("__init__", "__dlpack__", "__dlpack_device__")


class TritonPythonModel:
    """Answers each request with the names, as JSON."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return a response for each request."""
        names = json.dumps(declared_names()).encode()
        answer = np.array([names], dtype=np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("names", answer)]) for _ in requests]


def declared_names() -> dict[str, Any]:
    """Return the declarations of the module and of its classes."""
    classes = vars(sys.modules["c_python_backend_utils"]) | vars(pb_utils)
    return {
        "module": [
            _declaration(name, value)
            for name, value in vars(pb_utils).items()
            if not name.startswith("__") and not isinstance(value, ModuleType)
        ],
        "classes": {
            name: _members(value)
            for name, value in classes.items()
            if isinstance(value, type) and not issubclass(value, Exception)
        },
    }


def _members(owner: type) -> list[str]:
    found = []
    for name in dir(owner):
        if name.startswith("_") and name not in _CONSTRUCTED:
            continue
        declaration = _declaration(name, getattr(owner, name), owner)
        if declaration is not None:
            found.append(declaration)
    return found


def _declaration(name: str, value: Any, owner: type | None = None) -> str | None:
    """Return the declaration of a name; None for a missing constructor."""
    if not callable(value) or isinstance(value, type):
        return name
    shown = owner.__name__ if owner and name == "__init__" else name
    if inspect.isfunction(value):
        parameters = [
            each.name + "=" * (each.default is not each.empty)
            for each in inspect.signature(value).parameters.values()
            if each.name != "self"
        ]
        return f"{shown}({', '.join(parameters)})"
    match = _SIGNATURE.match(value.__doc__ or "")
    if match is None:
        return None
    is_static = owner is not None and match["owner"] is None
    given = match["parameters"]
    if match["owner"] == "str":
        # a static function whose first parameter has no name
        is_static, given = True, f"arg0: str, {given.replace('arg0', 'arg1')}"
    parameters = [each + ("=" * bool(default)) for each, default in _PARAMETER.findall(given)]
    return f"{'static ' * is_static}{shown}({', '.join(parameters)})"
