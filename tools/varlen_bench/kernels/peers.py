"""The kinds of peers: plain torch, torch.compile and liger-kernel.

A peer that is not installed, or has no such function, raises Unavailable, and its rows give the reason.
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

# More than the compilation of one op and the trial of its configurations take.
COMPILE_SECONDS = 30.0


class Unavailable(Exception):  # noqa: N818  # nothing went wrong
    """A system cannot run here; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another implementation of an op.

    Attributes:
        build: returns the call, given a function that compiles; may raise Unavailable.
        read: brings a result of the call into the form of the exact one.
        compile_seconds: what must be left of a run's time before `build` and the first call may start.
        no_graph: why a CUDA graph cannot hold the call; empty if it can.
    """

    name: str
    build: Callable[[Compile], Call]
    read: Read = as_tensor
    compile_seconds: float = 0.0
    no_graph: str = ""


@dataclass(frozen=True, slots=True)
class Peers:
    """The peers of a call, and the inputs that they need beside those of our op."""

    systems: tuple[Peer, ...] = ()
    prepare: Callable[[Inputs], Inputs] = lambda inputs: {}  # noqa: ARG005


def torch_peer(function: Function, *, name: str = "torch", read: Read = as_tensor) -> Peer:
    """Return a peer that calls `function` on the inputs that its parameters without default name."""
    return Peer(name, lambda _: _on_named(function, function), read)


def compiled_peer(function: Function, *, name: str = "compile", read: Read = as_tensor) -> Peer:
    """Return a peer that calls `function`, compiled for these shapes alone."""
    return Peer(
        name,
        lambda compile_: _on_named(function, compile_(function)),
        read,
        compile_seconds=COMPILE_SECONDS,
    )


def liger_peer(
    name: str, call: Callable[[Function, Inputs], object], read: Read = as_tensor
) -> Peer:
    """Return a peer whose `call` applies a function of liger-kernel to inputs."""

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


def _on_named(named: Function, function: Function) -> Call:
    """Return a call of `function` on the inputs that the parameters of `named` name."""
    parameters = signature(named).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.default is Parameter.empty]
    return lambda inputs: function(*(inputs[name] for name in names))
