"""The language Triton as its interpreter needs it, for a whole process.

The interpreter patches triton.language at each launch, and at each call of a function of a kernel, `tl.sum` among
them: half a millisecond and more, several times what such a function takes. For Triton 3.6 to 3.9.
"""

from types import FunctionType

import triton.language as tl
from triton.runtime import interpreter


def patch_once() -> None:
    """Patch the language for the rest of this process, where kernels are only interpreted."""
    patch = interpreter._patch_lang
    if patch is not _patch_nothing:
        # what a function sees of the language is patched: this one sees all
        patch(FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
        interpreter._patch_lang = _patch_nothing


def _patch_nothing(_: object) -> interpreter._LangPatchScope:
    return interpreter._LangPatchScope()
