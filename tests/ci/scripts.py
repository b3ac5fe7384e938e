"""Import of the scripts in .ci as modules."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

PROJECT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    """Return the script `.ci/NAME.py` as a module."""
    # a script may import another one beside it
    sys.path.append(str(PROJECT / ".ci"))
    spec = spec_from_file_location(name, PROJECT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
