"""How peers are made: plain torch, torch.compile, liger-kernel, and torch's attention over packed tokens.

A peer that is not installed, or lacks the function, raises Unavailable, and its rows say so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from varlen_bench.kernels.case import Call, Compile, Inputs, Peer, Unavailable

# To compile one op and to try its configurations takes less.
_COMPILE_SECONDS = 30.0

Read = Callable[[object, Inputs], Tensor]


def torch_peer(
    function: Callable[..., object],
    *names: str,
    name: str = "torch",
    read: Read | None = None,
) -> Peer:
    """Return a peer that calls `function` on the inputs of these names."""

    def build(_: Compile) -> Call:
        return lambda inputs: function(*(inputs[n] for n in names))

    return Peer(name, build, read)


def compiled_peer(
    function: Callable[..., object], *names: str, name: str = "compile", read: Read | None = None
) -> Peer:
    """Return a peer that calls `function`, compiled for these shapes alone."""

    def build(compile_: Compile) -> Call:
        compiled = compile_(function)
        return lambda inputs: compiled(*(inputs[n] for n in names))

    return Peer(name, build, read, compile_seconds=_COMPILE_SECONDS)


def liger_peer(
    name: str, call: Callable[[Any, Inputs], object], *, read: Read | None = None
) -> Peer:
    """Return a peer that calls a function of liger-kernel.

    Args:
        name: its name in `liger_kernel.transformers.functional`.
        call: applies it to inputs.
    """

    def build(_: Compile) -> Call:
        function = attribute("liger_kernel.transformers.functional", name)
        return lambda inputs: call(function, inputs)

    return Peer("liger", build, read)


def varlen_attention_peer(num_heads: int, longest: int) -> Peer:
    """Return torch's own attention over packed tokens; its scale is head_dim ** -0.5."""

    def build(_: Compile) -> Call:
        function = attribute("torch.nn.attention.varlen", "varlen_attn")

        def call(inputs: Inputs) -> object:
            qkv, bounds = inputs["qkv"], inputs["cu_seqlens"]
            q, k, v = qkv.view(len(qkv), 3, num_heads, -1).unbind(1)
            return function(q, k, v, bounds, bounds, longest, longest)

        return call

    def read(result: object, inputs: Inputs) -> Tensor:
        # with the logarithms of the sums, in versions that return them
        context = result[0] if isinstance(result, tuple) else result
        assert isinstance(context, Tensor)
        return context.reshape(len(inputs["qkv"]), -1)

    return Peer("varlen_attn", build, read)


def attribute(module: str, name: str) -> Any:
    """Return what a module that may be missing calls `name`.

    Raises:
        Unavailable: there is none.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from error
