"""Imports torch without packages of it that a CPU does not use.

They are for export, quantization and others. `import torch` runs them all: a third of its time, and 24 MB. Here each is
a placeholder, which is loaded when something reads a name of it.
"""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

# Releases whose `import torch` reads no name of these packages. In another one, a cycle of imports could fail.
_RELEASES = ("2.13.",)
_POSTPONED = frozenset(
    {
        "torch._meta_registrations",
        "torch._native",
        "torch.ao",
        "torch.compiler",
        "torch.distributed._meta_registrations",
        "torch.distributions",
        "torch.export",
        "torch.masked",
        "torch.nn.intrinsic",
        "torch.nn.qat",
        "torch.nn.quantizable",
        "torch.nn.quantized",
        "torch.quantization",
        "torch.utils.data",
    }
)


def import_torch() -> None:
    """Import torch, without these packages if its release is known."""
    if "torch" in sys.modules or not metadata.version("torch").startswith(_RELEASES):
        import torch

        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        import torch  # noqa: F401
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds the postponed packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a package, with a loader that makes a placeholder."""
        if fullname not in _POSTPONED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Postponed(spec.loader)
        return spec


class _Postponed(Loader):
    """Makes a placeholder of a module, which loads it."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the placeholder."""
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the placeholder loads the module."""


class _Placeholder(ModuleType):
    """A module that is loaded when a name of it is read."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        # tools that list modules read such names
        if name.startswith("__") or spec is None or not isinstance(spec.loader, _Postponed):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        spec.loader = spec.loader.loader
        spec.loader.exec_module(self)
        return getattr(self, name)
