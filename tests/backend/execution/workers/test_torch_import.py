"""torch without packages of it: they load when they are used."""

import subprocess
import sys

import pytest
import torch

from varlen.execution.workers.torch_import import _RELEASES

_CODE = """
import sys
from varlen.execution.workers.torch_import import _POSTPONED, _Placeholder, import_torch
import_torch()
import torch
def postponed():
    return {name for name in _POSTPONED if type(sys.modules.get(name)) is _Placeholder}
from varlen.execution.runner import Runner
from varlen.execution.step_runner import StepRunner
"""


def run(code: str) -> str:
    command = [sys.executable, "-c", _CODE + code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not torch.__version__.startswith(_RELEASES), reason="another release of torch")
def test_packages_of_torch_load_when_a_name_of_them_is_read():
    code = """
print(postponed() == _POSTPONED, "DataLoader" in vars(torch.utils.data))
print(torch.utils.data.DataLoader.__name__, "DataLoader" in vars(torch.utils.data))
from torch.export import export
print(export.__name__, torch.compiler.is_compiling(), torch.zeros(2, device="meta").add(1).shape)
try:
    torch.utils.data.nothing
except AttributeError as error:
    print(error)
"""

    assert run(code).splitlines() == [
        "True False",
        "DataLoader True",
        "export False torch.Size([2])",
        "module 'torch.utils.data' has no attribute 'nothing'",
    ]


def test_another_release_is_imported_whole():
    code = "print(postponed(), torch.utils.data.DataLoader.__name__)"
    other = _CODE.replace(
        "import_torch()\n",
        "import varlen.execution.workers.torch_import as module\nmodule._RELEASES = ()\nimport_torch()\n",
        1,
    )

    command = [sys.executable, "-c", other + code]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert shown == "set() DataLoader\n"


@pytest.mark.parametrize("module", ["host", "steps", "start"])
def test_processes_of_models_start_without_torch(module):
    code = f"import sys, varlen.execution.workers.{module}; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]

    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
