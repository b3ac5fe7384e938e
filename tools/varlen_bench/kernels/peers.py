"""Kinds of peers: plain torch, torch.compile and liger-kernel.

A peer whose package or function is missing raises Unavailable, and its rows give the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, TypeAlias

from varlen_bench.ops.call import Inputs, Read, as_tensor

Call: TypeAlias = Callable[[Inputs], object]
Function: TypeAlias = Callable[..., Any]
Compile: TypeAlias = Callable[[Function], Function]
Prepare: TypeAlias = Callable[[Inputs], Inputs]

# Longest time to compile one op and to try its configurations.
COMPILE_SECONDS = 30.0


class Unavailable(Exception):  # noqa: N818  # not an error of this program
    """A system that cannot run on this machine; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another implementation of an op.

    Attributes:
        build: returns the call; its argument compiles a function. May raise Unavailable.
        read: converts a result to the form of the exact one.
        compile_seconds: time that must be left of the budget before `build`.
        no_graph: reason why a CUDA graph cannot capture the call; empty if it can.
    """

    name: str
    build: Callable[[Compile], Call]
    read: Read = as_tensor
    compile_seconds: float = 0.0
    no_graph: str = ""


def nothing(_: Inputs) -> Inputs:
    """Return no additional inputs."""
    return {}


@dataclass(frozen=True, slots=True)
class Peers:
    """The peers of a call, and a function that returns their additional inputs."""

    systems: tuple[Peer, ...] = ()
    prepare: Prepare = nothing

    def without_compile(self) -> Peers:
        """Return the peers that torch.compile does not make."""
        kept = tuple(peer for peer in self.systems if not peer.compile_seconds)
        return Peers(kept, self.prepare)


def torch_peer(function: Function, *, name: str = "torch", read: Read = as_tensor) -> Peer:
    """Return a peer that calls `function` with inputs by parameter name, see `_call_by_name`."""
    return Peer(name, lambda _: _call_by_name(function, function), read)


def compiled_peer(function: Function, *, name: str = "compile", read: Read = as_tensor) -> Peer:
    """Return a peer that calls `function` compiled for the shapes of the call."""
    return Peer(
        name,
        lambda compile_: _call_by_name(function, compile_(function)),
        read,
        compile_seconds=COMPILE_SECONDS,
    )


def liger_peer(
    name: str, call: Callable[[Function, Inputs], object], read: Read = as_tensor
) -> Peer:
    """Return a peer that calls a function of liger-kernel.

    Args:
        name: the function in `liger_kernel.transformers.functional`.
    """

    def build(_: Compile) -> Call:
        function = attribute("liger_kernel.transformers.functional", name)
        return lambda inputs: call(function, inputs)

    return Peer("liger", build, read)


def attribute(module: str, name: str) -> Any:
    """Return a member of a module that may be missing.

    Raises:
        Unavailable: the module or the member is missing.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from error


def _call_by_name(named: Function, function: Function) -> Call:
    """Return a call of `function` with the inputs that the required parameters of `named` name."""
    parameters = signature(named).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.default is Parameter.empty]
    return lambda inputs: function(*(inputs[name] for name in names))
