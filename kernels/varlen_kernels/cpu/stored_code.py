"""Functions that numba compiles once for a machine and stores.

By itself numba stores a function under the content of its own file, though its code has what other files define. These
are stored under the content of all files that they come from: after a change or an upgrade they are compiled again.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import caching

_FOLDER = Path(__file__).parent
# The rest of what compiled code is made of: constants of the specifications.
_REFERENCE = _FOLDER.parent / "reference"


def stored(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator: numba compiles and stores the function, which runs without the GIL.

    Args:
        options: more options of `numba.njit`.
    """
    decorator: Callable[[Callable[..., Any]], Any] = numba.njit(nogil=True, cache=True, **options)
    return decorator


def stored_entry(function: Callable[..., None], signature: Any) -> Any:
    """Return numba's `cfunc` of a function, whose code it compiles and stores.

    Args:
        signature: types of its arguments and result.
    """
    return numba.cfunc(signature, cache=True, error_model="numpy")(function)


@cache
def source_hash() -> bytes:
    """Return the hash of all files that compiled code comes from."""
    digest = hashlib.sha256()
    for folder in (_FOLDER, _REFERENCE):
        for path in sorted(folder.glob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode())
            digest.update(content)
    return digest.digest()


class _OfThisPackage:
    """Where numba stores a function of this package, and under what."""

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        if Path(py_file).parent != _FOLDER:
            return None
        return super().from_function(py_func, py_file)  # type: ignore[misc]

    def get_source_stamp(self) -> bytes:
        return source_hash()


def _store_by_all_sources() -> None:
    """Have numba store the functions of this package under the content of all its files."""
    # of older releases the name is private
    kind = getattr(caching, "CacheImpl", None) or caching._CacheImpl
    own = [type(each.__name__, (_OfThisPackage, each), {}) for each in kind._locator_classes]
    kind._locator_classes[:0] = own


_store_by_all_sources()
