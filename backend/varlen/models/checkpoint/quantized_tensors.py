"""Quantized weights of a checkpoint: their parts, and their values in fp32.

The headers of all parts are checked against each other before a byte of them is read, so what is allocated has the size
that the files have. A weight is (code - zero point) · scale, and in nf4 and fp4 an entry of a table · scale.
Sources: see `quantization`; the layouts are of the writers that it names. No code of theirs is used.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from varlen.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from varlen.models.checkpoint.config_fields import Quantization
    from varlen.models.checkpoint.weights import TensorHeader

    # Both return the values of a tensor.
    Read: TypeAlias = Callable[[TensorHeader], Tensor]
    Values: TypeAlias = Callable[[TensorHeader], np.ndarray[Any, Any]]

# Layout of the codes: words along inputs with outputs beside each other, the same with the order of AWQ, words along
# inputs in rows of outputs, codes as they are, and entries of a table.
Layout: TypeAlias = Literal["gptq", "awq", "packed", "plain", "table"]

_WORD = 32
# dtypes of weights: others mean nothing without their scales.
FLOATS = ("F64", "F32", "F16", "BF16")
_FP8 = ("F8_E4M3", "F8_E5M2")
# Bytes of a value, by dtype.
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "I8": 1}
BYTES |= dict.fromkeys(_FP8, 1)
# Place of each of eight outputs in a word of AWQ.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
# Largest quant_state, in bytes, and the numbers of weights that share a scale in bitsandbytes.
_MOST_STATE = 4096
_BLOCK_SIZES = tuple(1 << power for power in range(5, 14))
# Weights that are widened at once: bounds what is allocated beside codes and result.
_AT_ONCE = 1 << 22
_STATE = ".weight.quant_state.bitsandbytes__"
# Parts that only round activations, or keys and values of caches.
_OF_ACTIVATIONS = tuple(
    f".{name}_{what}"
    for name in ("input", "output", "q", "k", "v", "kv")
    for what in ("scale", "zero_point", "scale_ub")
)
_DAMAGED = "the checkpoint is damaged: download it again"
# What the inputs of blocks are a multiple of, whose codes products read.
BLOCK_STEP = 16


class CodeBlocks(NamedTuple):
    """A weight `[out, in]` whose neighbouring inputs share a scale, with the codes that it has.

    Attributes:
        codes: `[out, in]` uint8.
        scale: `[out, blocks]` fp32.
        offset: value of the middle code, of the shape of scales; None for 0.
        table: `[16]` fp32, the values of codes; None for whole numbers.
        order: `[in]`, the places of the inputs, which the codes have in this order; None where they are in order.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None
    bits: int
    table: Tensor | None = None
    order: Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What layers side by side have in common."""
        shared = (self.table, self.order)
        return self.bits, *(None if each is None else each.tolist() for each in shared)

    def part(
        self, outputs: Iterable[tuple[int, int]], inputs: tuple[int, int], size: int
    ) -> CodeBlocks:
        """Return some rows and columns.

        Args:
            size: inputs of a block of the result, a divisor of its own size and of both bounds.
        """
        import torch

        first, last = inputs
        repeats = self.codes.shape[1] // self.scale.shape[1] // size

        def cut(values: Tensor, per: int) -> Tensor:
            return torch.cat(
                [values[rows[0] : rows[1], first // per : last // per] for rows in outputs]
            )

        def of_blocks(values: Tensor) -> Tensor:
            return cut(values.repeat_interleave(repeats, 1), size)

        outputs = list(outputs)
        offset = None if self.offset is None else of_blocks(self.offset)
        return self._replace(codes=cut(self.codes, 1), scale=of_blocks(self.scale), offset=offset)


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight `[out, in]` in parts.

    Attributes:
        block: outputs and inputs that share a scale; weights that share one if the layout is "table".
        codes: see `Layout`.
        scale: `[out / block, in / block]`, transposed in "gptq" and "awq"; one axis in "table".
        zero: the zero points of scales; None for none.
        order: the group of each input, `[in]`; None where they are in order.
        offset: number that is added to a stored zero point, or is the zero point of all.
        table: the further parts of "table", by name.
        numbers: their `nested_offset` and `nested_blocksize`.
    """

    layout: Layout
    shape: tuple[int, int]
    bits: int
    block: tuple[int, int]
    codes: TensorHeader
    scale: TensorHeader
    zero: TensorHeader | None = None
    order: TensorHeader | None = None
    offset: int = 0
    divisor: float = 1.0
    table: Mapping[str, TensorHeader] | None = None
    numbers: tuple[float, int] = (0.0, 1)

    @property
    def parts(self) -> tuple[TensorHeader, ...]:
        """All tensors that it consists of."""
        more = (self.table or {}).values()
        return tuple(
            each for each in (self.codes, self.scale, self.zero, self.order, *more) if each
        )

    @property
    def shown(self) -> str:
        """Its bits and what shares a scale, such as "4 bits in groups of 128"."""
        rows, columns = self.block
        bits = "8-bit floats" if self.codes.dtype in _FP8 else f"{self.bits} bits"
        if rows > 1:
            blocks = f"blocks of {rows} x {columns}"
            return f"{bits} with {'one scale' if self.block == self.shape else blocks}"
        if columns < self.shape[1] or self.layout == "table":
            return f"{bits} in groups of {columns}"
        return f"{bits} with a scale for each output"

    @property
    def has_blocks(self) -> bool:
        """Whether its codes may stay, unless groups have different numbers of inputs."""
        rows, columns = self.block
        is_whole = self.codes.dtype not in _FP8 and rows == 1
        return is_whole and not (columns % BLOCK_STEP or self.shape[1] % columns)

    def blocks(self, read: Read) -> CodeBlocks | None:
        """Return its codes; None if groups have different numbers of inputs.

        It `has_blocks`.

        Raises:
            CheckpointError: a group of an input is out of range.
        """
        import torch

        (features, hidden), (_, size) = self.shape, self.block
        if self.table is not None:
            codes, table = self._indices(read).view(self.shape), read(self.table["quant_map"])
            return CodeBlocks(codes, self._factors(read).view(features, -1), None, 4, table)
        order = None if self.order is None else self._groups(read(self.order))
        if order is not None:
            groups, places = torch.arange(hidden) // size, order.argsort(stable=True)
            if not order[places].equal(groups):
                return None
            order = None if order.equal(groups) else places
        codes, scale = self._codes(read(self.codes)), self._by_output(read(self.scale)).float()
        scale, zero = scale / self.divisor, self._zero_points(read)
        middle = 1 << (self.bits - 1)
        if self.layout == "plain":
            codes, middle = codes.view(torch.uint8) ^ middle, 0
        offset = None if zero is None or bool((zero == middle).all()) else (middle - zero) * scale
        return CodeBlocks(
            codes if order is None else codes[:, order], scale, offset, self.bits, order=order
        )

    def widen(self, read: Read) -> Tensor:
        """Return the weight, `[out, in]` fp32.

        Raises:
            CheckpointError: a group of an input is out of range.
        """
        import torch

        out = torch.empty(self.shape, dtype=torch.float32)
        if self.layout == "table":
            self._look_up(read, out.view(-1))
            return out
        codes, scale = self._codes(read(self.codes)), self._by_output(read(self.scale)).float()
        scale = scale / self.divisor
        zero = self._zero_points(read)
        order = None if self.order is None else self._groups(read(self.order))
        rows, columns = self.block
        step = max(1, _AT_ONCE // self.shape[1])
        for first in range(0, self.shape[0], step):
            part = out[first : first + step]
            groups = torch.arange(first, first + len(part)) // rows

            def of_weights(values: Tensor, groups: Tensor = groups) -> Tensor:
                values = values[groups]
                if order is not None:
                    return values[:, order]
                return values.repeat_interleave(columns, 1)[:, : self.shape[1]]

            part.copy_(codes[first : first + step])
            if zero is not None:
                part -= of_weights(zero)
            elif self.offset:
                part -= self.offset
            part *= of_weights(scale)
        return out

    def _codes(self, stored: Tensor) -> Tensor:
        """Return the codes, `[out, in]`; without a sign where they come from words."""
        if self.layout == "plain":
            return stored
        codes = _unpack(stored, self.bits)
        if self.layout == "gptq":
            return codes.permute(1, 0, 2).flatten(1)
        if self.layout == "awq":
            return codes[..., _AWQ_PLACES].flatten(1).t()
        return codes.flatten(1)[:, : self.shape[1]]

    def _by_output(self, scale: Tensor) -> Tensor:
        if self.layout in ("gptq", "awq"):
            return scale.t()
        return scale.reshape(-(-self.shape[0] // self.block[0]), -1)

    def _zero_points(self, read: Read) -> Tensor | None:
        if self.zero is None:
            return None
        stored = read(self.zero)
        if self.layout == "plain" or stored.dtype.itemsize == 1:
            return self._by_output(stored).float() + self.offset
        if self.layout == "packed":
            zero = _unpack(stored, self.bits).permute(0, 2, 1).flatten(0, 1)
            return zero[: self.shape[0]].float()
        if self.layout == "awq":
            return _unpack(stored, self.bits)[..., _AWQ_PLACES].flatten(1).t().float()
        # writers subtract from whole words, which borrows from the next zero point
        ones = sum(self.offset << at for at in range(0, _WORD, self.bits))
        return _unpack(stored + ones, self.bits).flatten(1).t().float()

    def _groups(self, order: Tensor) -> Tensor | None:
        assert self.order is not None
        least, most = int(order.min()), int(order.max())
        count = -(-self.shape[1] // self.block[1])
        if self.layout == "packed" and least == -1:
            # the writer's sign for none
            return None
        if least < 0 or most >= count:
            raise CheckpointError(
                f'the tensor "{self.order.stored_name}" names groups from {least} to {most}; allowed: 0 to {count - 1};'
                f" {_DAMAGED}"
            )
        return order.long()

    def _indices(self, read: Read) -> Tensor:
        """Return the codes of a "table", one after another, perhaps with one more."""
        import torch

        packed = read(self.codes).flatten().view(torch.uint8)
        return torch.stack((packed >> 4, packed & 15), 1).flatten()[: prod(self.shape)]

    def _factors(self, read: Read) -> Tensor:
        """Return the scales of a "table", fp32."""
        assert self.table is not None
        (offset, nested), scale = self.numbers, read(self.scale)
        if "nested_absmax" not in self.table:
            return scale
        factors = read(self.table["nested_absmax"]).repeat_interleave(nested)[: len(scale)]
        entries = read(self.table["nested_quant_map"])
        return entries.index_select(0, scale.int()) * factors + offset

    def _look_up(self, read: Read, out: Tensor) -> None:
        assert self.table is not None
        scale, entries = self._factors(read), read(self.table["quant_map"])
        codes, size = self._indices(read), self.block[1]
        step = _AT_ONCE // size * size
        for first in range(0, len(out), step):
            part = out[first : first + step]
            part.copy_(entries.index_select(0, codes[first : first + step].int()))
            some_scales = scale[first // size : -(-(first + len(part)) // size)]
            part *= some_scales.repeat_interleave(size)[: len(part)]


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return codes of words `[a, b]`, the lowest bits first, `[a, b, 32 / bits]`."""
    import torch

    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(2)


def join(
    headers: Mapping[str, TensorHeader],
    quantization: Quantization,
    values: Values,
) -> dict[str, TensorHeader]:
    """Return headers in which a quantized weight is one, under its name.

    Args:
        values: returns the values of a small tensor.

    Raises:
        CheckpointError: a part is missing, or does not fit the others.
    """
    return _Joiner(dict(headers), quantization, values).run()


@dataclass
class _Joiner:
    """Joins the parts of weights; `left` has the headers that no weight has taken."""

    left: dict[str, TensorHeader]
    by: Quantization
    values: Values
    joined: dict[str, TensorHeader] = field(default_factory=dict)

    def run(self) -> dict[str, TensorHeader]:
        method = self.by.method
        ends: Mapping[str, Callable[[str], None]] = {
            "awq": {".qweight": self._words},
            "gptq": {".qweight": self._words},
            "compressed-tensors": {".weight_packed": self._packed, ".weight_scale": self._plain},
            "fp8": {".weight_scale_inv": self._plain, ".weight_scale": self._plain},
            "bitsandbytes": {".SCB": self._plain},
        }[method]
        for end, take in ends.items():
            for name in [each for each in self.left if each.endswith(end)]:
                if name in self.left:
                    take(name)
        if method == "bitsandbytes":
            for name in [each for each in self.left if _STATE in each]:
                self._table(name)
        if method not in ("awq", "gptq"):
            for name in [each for each in self.left if each.endswith(_OF_ACTIVATIONS)]:
                del self.left[name]
        return self.left | self.joined

    def _words(self, name: str) -> None:
        module, by = name.removesuffix(".qweight"), self.by
        is_awq, order = by.method == "awq", None
        codes = self._take(name, ("I32",), 2)
        scale = self._take(f"{module}.scales", FLOATS, 2)
        zero = self._take(f"{module}.qzeros", ("I32",), 2)
        (rows, columns), outputs = codes.shape, scale.shape[1]
        # layers may have bits of their own
        bits, left = divmod(zero.shape[1] * _WORD, outputs)
        if left or bits not in by.bits:
            allowed = " or ".join(map(str, by.bits))
            raise self._error(zero, f"words of {allowed} bits of {outputs} outputs")
        count = _WORD // bits
        shape = (columns * count, rows) if is_awq else (columns, rows * count)
        if not is_awq and (by.is_ordered or f"{module}.g_idx" in self.left):
            order = self._take(f"{module}.g_idx", ("I32", "I64"), 1)
            if 0 <= shape[1] - order.shape[0] < count:
                shape = shape[0], order.shape[0]
            self._check(order, (shape[1],))
        block = self._block(scale, shape, scale.shape[::-1])
        self._check(zero, (scale.shape[0], outputs // count))
        self._add(
            module,
            QuantizedTensor(
                "awq" if is_awq else "gptq",
                shape,
                bits,
                block,
                codes,
                scale,
                zero,
                order,
                by.zero_offset,
            ),
        )

    def _packed(self, name: str) -> None:
        module = name.removesuffix("_packed")
        codes = self._take(name, ("I32",), 2)
        sizes = self._take(f"{module}_shape", ("I64", "I32"), 1)
        self._check(sizes, (2,))
        rows, columns = map(int, self.values(sizes))
        bits = next(
            (bits for bits in (4, 8) if codes.shape == (rows, -(-columns * bits // _WORD))), None
        )
        if bits is None or columns < 1:
            raise self._error(codes, f"words of 4 or 8 bits of {[rows, columns]}")
        shape = rows, columns
        scale, block = self._scale(f"{module}_scale", shape)
        zero = self._take_optional(f"{module}_zero_point", ("I32", "I8"))
        if zero is not None:
            groups = -(-columns // block[1])
            words = (-(-rows * bits // _WORD), groups)
            self._check(zero, words if zero.dtype == "I32" else scale.shape)
        order = self._take_optional(f"{module}_g_idx", ("I32", "I64"))
        if order is not None:
            self._check(order, (columns,))
        self._add(
            module.removesuffix(".weight"),
            QuantizedTensor(
                "packed", shape, bits, block, codes, scale, zero, order, 1 << (bits - 1)
            ),
        )

    def _plain(self, name: str) -> None:
        module, _, _ = name.rpartition(".")
        is_integer = self.by.method == "bitsandbytes"
        kinds = ("I8",) if is_integer else ("I8", *_FP8)
        codes = self._take(f"{module}.weight", kinds, 2)
        shape = codes.shape[0], codes.shape[1]
        scale, block = self._scale(name, shape)
        zero = self._take_optional(f"{module}.weight_zero_point", (codes.dtype,))
        if zero is not None:
            self._check(zero, scale.shape)
        format_of = self._take_optional(f"{module}.weight_format", ("U8",)) if is_integer else None
        if format_of is not None and self.values(format_of).any():
            raise self._error(format_of, "0, rows")
        divisor = 127.0 if is_integer else 1.0
        self._add(
            module,
            QuantizedTensor("plain", shape, 8, block, codes, scale, zero, divisor=divisor),
        )

    def _table(self, name: str) -> None:
        module = name.partition(_STATE)[0]
        header = self._take(name, ("U8",), 1)
        if header.shape[0] > _MOST_STATE:
            raise self._error(header, f"at most {_MOST_STATE} bytes")
        try:
            state = json.loads(self.values(header).tobytes())
            rows, columns = map(int, state["shape"])
            size = int(state["blocksize"])
            nested, offset = (
                int(state.get("nested_blocksize", 256)),
                float(state.get("nested_offset", 0.0)),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            raise self._error(header, "JSON with shape and blocksize") from None
        if size not in _BLOCK_SIZES or nested not in _BLOCK_SIZES or min(rows, columns) < 1:
            raise self._error(header, "sizes of blocks that are powers of two from 32 to 8192")
        weights = rows * columns
        blocks = -(-weights // size)
        codes = self._take(f"{module}.weight", tuple(BYTES), 2)
        if prod(codes.shape) * BYTES[codes.dtype] != -(-weights // 2):
            raise self._error(codes, f"4 bits of each of {[rows, columns]}")
        scale = self._take(f"{module}.weight.absmax", ("F32", "U8"), 1)
        self._check(scale, (blocks,))
        table = {"quant_map": self._take(f"{module}.weight.quant_map", ("F32",), 1)}
        self._check(table["quant_map"], (16,))
        if scale.dtype == "U8":
            for part, count in (("nested_absmax", -(-blocks // nested)), ("nested_quant_map", 256)):
                table[part] = self._take(f"{module}.weight.{part}", ("F32",), 1)
                self._check(table[part], (count,))
        self._add(
            module,
            QuantizedTensor(
                "table",
                (rows, columns),
                4,
                (1, size),
                codes,
                scale,
                table=table,
                numbers=(offset, nested),
            ),
        )

    def _add(self, module: str, tensor: QuantizedTensor) -> None:
        name = f"{module}.weight"
        if name in self.left or name in self.joined:
            raise CheckpointError(f'the checkpoint has two tensors "{name}"')
        dtype = tensor.codes.dtype if tensor.codes.dtype in _FP8 else f"int{tensor.bits}"
        self.joined[name] = replace(tensor.codes, dtype=dtype, shape=tensor.shape, quantized=tensor)

    def _scale(self, name: str, shape: tuple[int, int]) -> tuple[TensorHeader, tuple[int, int]]:
        scale = self._take(name, FLOATS)
        of = scale.shape
        given = (1, 1) if prod(of) == 1 else (of[0], 1) if len(of) == 1 else of
        return scale, self._block(scale, shape, given)

    def _block(
        self, scale: TensorHeader, shape: tuple[int, int], given: tuple[int, ...]
    ) -> tuple[int, int]:
        """Return outputs and inputs that share a scale; `given` counts scales by both."""
        sizes = [
            tuple(min(size or of, of) for size, of in zip(block, shape, strict=True))
            for block in self.by.blocks
        ]
        wanted = {
            tuple(-(-of // size) for of, size in zip(shape, block, strict=True)): block
            for block in sizes
        }
        if given not in wanted:
            counts = " or ".join(str(list(each)) for each in sorted(wanted))
            raise self._error(
                scale, f"scales by output and input {counts} of a weight {list(shape)}"
            )
        rows, columns = wanted[given]
        return rows, columns

    def _take(self, name: str, dtypes: Iterable[str], axes: int | None = None) -> TensorHeader:
        header = self._take_optional(name, dtypes)
        if header is None:
            raise CheckpointError(
                f'the checkpoint has no tensor "{name}", which a weight quantized by {self.by.method} needs;'
                f" {_DAMAGED}"
            )
        if axes is not None and (len(header.shape) != axes or 0 in header.shape):
            raise self._error(header, f"{axes} {'axis' if axes == 1 else 'axes'}, none empty")
        return header

    def _take_optional(self, name: str, dtypes: Iterable[str]) -> TensorHeader | None:
        header = self.left.pop(name, None)
        if header is not None and header.dtype not in dtypes:
            raise self._error(header, ", ".join(dtypes))
        return header

    def _check(self, header: TensorHeader, shape: tuple[int, ...]) -> None:
        if header.shape != shape:
            raise self._error(header, str(list(shape)))

    @staticmethod
    def _error(header: TensorHeader, allowed: str) -> CheckpointError:
        return CheckpointError(
            f'the tensor "{header.stored_name}" is {header.dtype} {list(header.shape)}; allowed: {allowed}; {_DAMAGED}'
        )


def describe(
    headers: Iterable[TensorHeader], quantization: Quantization, *, keeps_codes: bool
) -> str:
    """Return a sentence about the quantized weights among headers."""
    found = [each.quantized for each in headers if each.quantized is not None]
    counts = Counter(each.shown for each in found)
    kinds = ", ".join(f"{count} of {shown}" for shown, count in counts.most_common())
    also = " and ".join(quantization.floats)
    is_kept = keeps_codes and any(each.has_blocks for each in found)
    kept = "a CPU keeps the codes of linear layers; others" if is_kept else "they"
    return (
        f"weights quantized by {quantization.method}: {kinds or 'none'}; {kept} are widened to the dtype of the model"
        f" as they are loaded{f'; {also} are not quantized' if also else ''}"
    )
