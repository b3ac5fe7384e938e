"""The fastest op for each linear layer on this CPU, by measurement.

A path is an op that multiplies, with the layout of its weights. Which one is fastest depends on the processor, the
dtype and the layer's shape. docs/decisions/0022-linear-layers-by-measurement.md has measurements.
Some ops also run the activation behind a layer. Packed weights are in large pages;
docs/decisions/0054-compiled-steps.md has the reasons.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from varlen.config import EngineConfig
from varlen.costs.store import CostKey, CostStore, find_cache
from varlen.execution.rank_link import NO_OTHERS, RankLink
from varlen.memory.planner import huge_pages
from varlen.program.program import Op, Operand, Program, Value, Weights
from varlen_kernels.cpu.calls.run_calls import has_compiled_ops
from varlen_kernels.cpu.products import can_pack, pack_weight

# For each op of a layer: the op that runs it and an activation.
_FUSED: Mapping[str, str] = {
    "linear_panels": "linear_panels_activate",
    "linear_int8_panels": "linear_int8_panels_activate",
    "linear_int4_panels": "linear_int4_panels_activate",
}


def fuse_layers(program: Program) -> Program:
    """Return the program with layers and their activations as one op, where possible."""
    readers: defaultdict[Value, list[Op]] = defaultdict(list)
    for op in program.ops:
        for value in op.reads:
            readers[value].append(op)
    layers: dict[object, Op] = {}
    ops: list[Op] = []
    for op in program.ops:
        layer = layers.get(op.operands[0])
        if layer is not None:
            # the activation adds no bias: the layer has
            results = (*op.results, *layer.results[1:])
            ops.append(
                replace(
                    layer, kernel=_FUSED[layer.kernel], results=results, attributes=op.attributes
                )
            )
        elif _is_fused(op, readers, program.outputs):
            layers[op.results[0]] = op
        else:
            ops.append(op)
    return Program(ops, program.outputs)


def _is_fused(op: Op, readers: Mapping[Value, Sequence[Op]], outputs: Sequence[Value]) -> bool:
    """Return whether one op runs this op and the activation behind it."""
    if op.kernel not in _FUSED or op.results[0] in outputs or len(readers[op.results[0]]) != 1:
        return False
    (reader,) = readers[op.results[0]]
    # by itself an activation of 16-bit rows reads numbers that were rounded, and takes as long where tiles multiply
    is_exact = op.kernel != "linear_panels" or op.results[0].dtype == torch.float32
    return reader.kernel == "activate" and is_exact


# The norm is the last result: some write the sum first.
_NORMS = {"layer_norm", "add_layer_norm", "residual_layer_norm", "rms_norm", "residual_rms_norm"}


def _widened_norms(program: Program) -> Iterator[Op]:
    """Yield the ops, with rows widened before a norm that writes fp32.

    Norms are compiled for rows and results of one dtype.
    """
    read = {*program.outputs, *(value for op in program.ops for value in op.reads)}
    for op in program.ops:
        is_wide = op.kernel in _NORMS and op.results[-1].dtype == torch.float32
        narrow = [each for each in op.reads if each.dtype != torch.float32]
        if not is_wide or not narrow or not read.isdisjoint(op.results[:-1]):
            yield op
            continue
        wide = {
            each: Value(f"{each.name} of {op.results[-1].name}", each.shape, torch.float32)
            for each in narrow
        }
        for value, made in wide.items():
            yield Op("to_fp32", (value,), {}, (made,))
        operands = [
            wide.get(each, each) if isinstance(each, Value) else each for each in op.operands
        ]
        results = [replace(each, dtype=torch.float32) for each in op.results]
        yield replace(op, operands=tuple(operands), results=tuple(results))


_ALIGNMENT = 64


def in_large_pages(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Return programs whose packed weights lie in one piece of memory.

    Its pages are large where the system has such pages.

    A packed weight is a tensor in a named tuple.
    """
    found = {
        id(part): part
        for program in programs
        for op in program.ops
        for operand in op.operands
        if isinstance(operand, tuple)
        for part in operand
        # a layout of oneDNN cannot be copied
        if isinstance(part, Tensor) and not part.is_mkldnn
    }
    if not found:
        return tuple(programs)
    pages = huge_pages(sum(_aligned(part.nbytes) for part in found.values()))
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    moved, begin = dict[int, Tensor](), 0
    for key, part in found.items():
        place = memory[begin : begin + part.nbytes].view(part.dtype).view(part.shape)
        moved[key] = place.copy_(part)
        begin += _aligned(part.nbytes)

    def changed(operand: Operand) -> Operand:
        if not isinstance(operand, tuple):
            return operand
        # a named tuple
        make: Callable[..., Operand] = type(operand)
        return make(*[moved.get(id(part), part) for part in operand])

    return tuple(
        Program(
            [replace(op, operands=tuple(map(changed, op.operands))) for op in program.ops],
            program.outputs,
        )
        for program in programs
    )


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


_log = logging.getLogger(__name__)

# Name of the op for each layer shape, such as {"384x1536": "linear_packed"}.
LinearPaths: TypeAlias = Mapping[str, str]
Clock: TypeAlias = Callable[[], float]

# The path that needs no packing; every kernel module has it.
PLAIN = "linear"
PACKED = "linear_packed"
PANELS = "linear_panels"
GROUPS, GROUP_PANELS = "linear_groups", "linear_groups_panels"


def _pack_panels(weight: Tensor) -> Weights:
    # its layout asks LLVM for the CPU, which a machine with a GPU may lack
    from varlen_kernels.cpu.bodies.panel_layout import pack_panels

    return pack_panels(weight)


def _pack_groups(weight: Tensor) -> Weights:
    from varlen_kernels.cpu.bodies.panel_layout import pack_groups

    return pack_groups(weight)


# What makes the weight of each path from `[hidden, features]`.
LAYOUTS: Mapping[str, Callable[[Tensor], Weights]] = {
    PLAIN: lambda weight: weight,
    PACKED: pack_weight,
    PANELS: _pack_panels,
}

# To be increased when paths are measured in another way.
_PLAN_VERSION = "6"
# Most seconds of a measurement.
_LONGEST = 3.0
_ROUNDS = 9
# With fewer rounds a layer keeps its default.
_FEWEST_ROUNDS = 3
# Seconds to wait while another model is measured.
_LOCK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class LayerUse:
    """How linear layers are used.

    Attributes:
        rows: typical numbers of rows, which count equally.
        margin: least ratio of speeds at which another path replaces the default one.
    """

    rows: tuple[int, ...]
    margin: float


# A layer by torch costs a worker 150 MiB.
BATCHES = LayerUse((32, 96, 384), 1.15)
# In steps, threads of another library spin beside ours (decision 0060).
STEPS = LayerUse((1, 8, 32, 128), 1.5)


class _Linear(Protocol):
    def __call__(self, x: Tensor, weight: Weights, *, out: Tensor) -> Tensor: ...


def paths_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the paths that multiply weights of this dtype on this CPU, the default last."""
    packed = (PACKED,) if can_pack(dtype) else ()
    has_panels = dtype in (torch.float32, torch.bfloat16) and has_compiled_ops()
    return (PLAIN, *packed, *((PANELS,) if has_panels else ()))


def choose_paths(
    program: Program,
    kernels: object,
    config: EngineConfig,
    key: CostKey,
    *,
    use: LayerUse,
    threads: int,
    seconds: float,
    link: RankLink[Any] = NO_OTHERS,
) -> Program:
    """Return the program with the fastest path for each linear layer.

    Args:
        program, kernels, use: arguments of `measure_paths`.
        config: says where measurements are stored.
        key: cost key of whatever else decides which path is fastest.
        seconds: 0 if every layer gets the default path.
        link: the ranks of the model: rank 0 measures while the others multiply too, and all get its choice.
    """
    shapes = _weights_by_shape(program)
    if not shapes or not hasattr(kernels, PANELS):
        return program
    if not seconds:
        return use_paths(program, {})
    # classifiers are fp32 in every program
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in shapes.values()})
    # the time of one thread does not count other work on its core
    clock = time.thread_time if threads == 1 else time.perf_counter
    more = {
        "layers": " ".join(sorted(shapes)),
        "dtype": " ".join(dtypes),
        "threads": str(threads),
        "rows": " ".join(map(str, use.rows)),
        "plan": _PLAN_VERSION,
    }

    def measure() -> LinearPaths:
        with torch_threads(threads):
            return measure_paths(program, kernels, use=use, seconds=_LONGEST, clock=clock)

    store = CostStore(find_cache(config.cache_folder))
    return use_paths(
        program,
        link.agree(
            lambda: dict(stored_paths(store, {**key, **more}, measure)),
            partial(_multiply, shapes.values(), kernels, use.rows),
        ),
    )


def use_paths(program: Program, paths: LinearPaths, default: str = "") -> Program:
    """Return the program with the ops that `paths` names.

    Layers of other shapes get `default`, or the default of their dtype; products of groups get panels. An op that can
    follow a layer becomes a part of its op, and rows of norms are widened where only so they are compiled. The program
    holds no reference to weights that only layers of other layouts read.
    """
    packed: dict[int, Weights] = {}

    def in_panels(op: Op) -> Op:
        """Return a product of groups with its weight in panels."""
        x, weight, *others = op.operands
        assert isinstance(weight, Tensor)
        if PANELS not in paths_of(weight.dtype):
            return op
        if id(weight) not in packed:
            packed[id(weight)] = _pack_groups(weight)
        return replace(op, kernel=GROUP_PANELS, operands=(x, packed[id(weight)], *others))

    def changed(op: Op) -> Op:
        if op.kernel == GROUPS:
            return in_panels(op)
        if op.kernel != PLAIN:
            return op
        x, weight, bias = op.operands
        assert isinstance(weight, Tensor)
        allowed = paths_of(weight.dtype)
        path = paths.get(_shape(weight), default)
        if path not in allowed:
            path = allowed[-1]
        if path == PLAIN:
            return op
        if id(weight) not in packed:
            packed[id(weight)] = LAYOUTS[path](weight)
        return replace(op, kernel=path, operands=(x, packed[id(weight)], bias))

    ops = [changed(op) for op in _widened_norms(program)]
    return fuse_layers(Program(ops, program.outputs))


def stored_paths(
    store: CostStore,
    key: CostKey,
    measure: Callable[[], LinearPaths],
    what: str = "linear layers",
) -> LinearPaths:
    """Return the stored paths, or measure and store them.

    Args:
        key: everything that decides which path is fastest.
        what: their name in the log.
    """
    stored = store.load_texts(key)
    if stored is None:
        with store.measuring(timeout=_LOCK_SECONDS):
            # while this one waited, another server may have measured the same
            stored = store.load_texts(key)
            if stored is None:
                measured = measure()
                store.save_texts(key, measured)
                return measured
    _log.info("%s, from the cache: %s", what, _described(stored))
    return stored


@torch.inference_mode()
def measure_paths(
    program: Program,
    kernels: object,
    *,
    use: LayerUse,
    seconds: float,
    clock: Clock,
) -> LinearPaths:
    """Return the fastest path of each layer shape.

    Shapes, paths and numbers of rows take turns, so that weights come from memory as they do in a forward pass.

    Args:
        program: has the layers, as ops named `linear`.
        kernels: has the paths, in the threads that will use them.
        seconds: most time to spend.
    """
    plain = _weights_by_shape(program)
    layers = {
        shape: {path: LAYOUTS[path](weight) for path in paths_of(weight.dtype)}
        for shape, weight in plain.items()
    }
    times: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    began, deadline = clock(), clock() + seconds
    for number in range(_ROUNDS + 1):
        for shape, weights in layers.items():
            for count in use.rows:
                x, out = operands_of(plain[shape], count)
                for path, weight in weights.items():
                    multiply: _Linear = getattr(kernels, path)
                    start = clock()
                    multiply(x, weight, out=out)
                    taken = clock() - start
                    if path == PANELS:
                        # a step of compiled ops has none of what a call by Python takes
                        start = clock()
                        multiply(x[:0], weight, out=out[:0])
                        taken -= clock() - start
                    # the first round compiles and warms up
                    if number:
                        times[shape, path, count].append(taken)
        if clock() > deadline:
            break
    paths, lines = {}, []
    for shape, weights in layers.items():
        best, gain = _fastest(
            {path: [times[shape, path, count] for count in use.rows] for path in weights},
            use.margin,
        )
        paths[shape] = best
        lines.append(f"{shape} {best} ({gain:.2f}x)")
    _log.info("linear layers, measured in %.1f s: %s", clock() - began, ", ".join(lines))
    return paths


def _fastest(times: Mapping[str, Sequence[Sequence[float]]], margin: float) -> tuple[str, float]:
    """Return a path, and how many times as fast as the slowest it is.

    Args:
        times: seconds of each round, per path and number of rows. The last path is the default: the result unless
            another one is clearly faster, and if there are too few rounds.
        margin: see `LayerUse`.
    """
    default = [*times][-1]
    if len(next(iter(times.values()))[0]) < _FEWEST_ROUNDS:
        return default, 1.0
    # the geometric mean over numbers of rows: few rows count as much as many
    means = {
        path: statistics.geometric_mean(max(statistics.median(each), 1e-9) for each in rounds)
        for path, rounds in times.items()
    }
    best = min(means, key=lambda path: means[path] * (1.0 if path == default else margin))
    return best, max(means.values()) / means[best]


def compiles_products(program: Program) -> bool:
    """Return whether oneDNN runs linear layers: it compiles a product for each number of rows."""
    return any(op.kernel == PACKED for op in program.ops) or any(
        weight.dtype == torch.bfloat16 and can_pack(weight.dtype)
        for weight in _linear_weights(program)
    )


@torch.inference_mode()
def compile_products(program: Program, kernels: object, rows: Iterable[int]) -> None:
    """Compile the products of all linear layers for these numbers of rows."""
    layers = {}
    for op in program.ops:
        if op.kernel in (PLAIN, PACKED):
            weight, bias = op.operands[1:]
            assert isinstance(weight, Tensor)
            key = op.kernel, tuple(weight.shape), weight.dtype, bias is None
            layers[key] = op, weight, bias
    for count in rows:
        for op, weight, bias in layers.values():
            fan_out, fan_in = weight.shape if op.kernel == PACKED else reversed(weight.shape)
            x, out = (torch.zeros(count, size, dtype=weight.dtype) for size in (fan_in, fan_out))
            getattr(kernels, op.kernel)(x, weight, bias, out=out)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use a number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _weights_by_shape(program: Program) -> dict[str, Tensor]:
    """Return the first weight of each shape that has several paths."""
    weights = [weight for weight in _linear_weights(program) if len(paths_of(weight.dtype)) > 1]
    # the last one of equal keys counts
    return {_shape(weight): weight for weight in reversed(weights)}


def _linear_weights(program: Program) -> list[Tensor]:
    weights = [op.operands[1] for op in program.ops if op.kernel == PLAIN]
    return [weight for weight in weights if isinstance(weight, Tensor)]


def operands_of(weight: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return random rows and memory for their product with a weight."""
    fan_in, fan_out = weight.shape
    # zeros: the pages are mapped before anything is timed
    return torch.rand(rows, fan_in).to(weight.dtype), torch.zeros(rows, fan_out, dtype=weight.dtype)


@torch.inference_mode()
def _multiply(weights: Iterable[Tensor], kernels: object, counts: Sequence[int]) -> None:
    multiply: _Linear = getattr(kernels, PLAIN)
    for weight in weights:
        for count in counts:
            x, out = operands_of(weight, count)
            multiply(x, weight, out=out)


def _shape(weight: Tensor) -> str:
    return "x".join(map(str, weight.shape))


def _described(paths: LinearPaths) -> str:
    return ", ".join(f"{shape} {path}" for shape, path in paths.items())
