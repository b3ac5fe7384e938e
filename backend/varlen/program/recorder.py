"""The recorder: a model calls it like torch, and gets a `Program`.

Each call appends one `Op` and returns a symbolic `Value`. A dimension is any name that batches give a size to:
tokens, sequences, blocks, logit_rows, ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from varlen.memory.usage import Size
from varlen.program.program import Attribute, Op, Operand, Program, Shape, State, Value
from varlen_kernels import Activation, Pooling, TermPooling
from varlen_kernels.reference import IN_EPILOGUE, IN_PLACE
from varlen_kernels.vocabulary_reference import SLICE_TERMS

# Axes as a model writes them: a dimension by its name, `Size(1, sequences=1)`, or a fixed length.
Axes: TypeAlias = Sequence[int | str | Size]

_NO_ATTRIBUTES: Mapping[str, Attribute] = {}
_Declared = TypeVar("_Declared", Value, State)


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The heads of an attention layer, side by side in each row.

    Attributes:
        queries: number of query heads; a multiple of `keys`. 0 for rows of keys and values alone.
        keys: number of key heads, and of value heads.
        dim: features of a head.
    """

    queries: int
    keys: int
    dim: int

    @property
    def counts(self) -> dict[str, int]:
        """The attributes of ops on heads."""
        return {"num_heads": self.queries, "num_kv_heads": self.keys}

    @property
    def width(self) -> int:
        """Features of the queries of one token."""
        return self.queries * self.dim


@dataclass(frozen=True, slots=True)
class DistanceTables:
    """Keys and queries of distances, whose products `attention_varlen` adds to those of tokens.

    Attributes:
        rows: `[2 * reach + 1]` int32, the row of each distance in the tables; None without tables.
        keys, queries: `[rows, heads.width]`, one of them at least.
    """

    rows: Tensor | None
    keys: Tensor | None
    queries: Tensor | None


_NO_DISTANCES = DistanceTables(None, None, None)


class Recorder:
    """The ops that a model may call. Each returns the values that it writes.

    The meaning, shapes and precision of an op are those of the function of the same name in
    `varlen_kernels.reference`.
    """

    def __init__(
        self,
        *,
        for_gpu: bool = False,
        approximate_gelu: bool = False,
        has_key_lengths: bool = False,
    ) -> None:
        """Start a recording.

        Args:
            for_gpu: whether the program runs on a GPU. There, sequences are assigned to tiles once for all layers, and
                the matrix product computes an activation if it can.
            approximate_gelu: whether a GPU computes the exact GELU by its tanh form, in the matrix product.
            has_key_lengths: whether sequences may end with tokens that no token reads. If so, each batch brings the
                input `key_lengths`.
        """
        self._for_gpu = for_gpu
        self._approximate_gelu = approximate_gelu and for_gpu
        self._has_key_lengths = has_key_lengths
        # the tiles of attention, by all that they depend on
        self._tiles: dict[tuple[object, ...], Value] = {}
        self._ops: list[Op] = []
        self._declared: dict[str, Value | State] = {}

    def input(self, name: str, shape: Axes, dtype: torch.dtype) -> Value:
        """Declare a tensor that each batch brings; the same declaration again returns the same value.

        Raises:
            ValueError: the name was declared as something else.
        """
        return self._declare(Value(name, _symbolic(shape), dtype))

    def state(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> State:
        """Declare a tensor that outlives runs; the same declaration again returns the same state.

        Raises:
            ValueError: the name was declared as something else.
        """
        return self._declare(State(name, shape, dtype))

    def call(
        self,
        kernel: str,
        operands: Sequence[Operand],
        results: Sequence[tuple[Axes, torch.dtype]],
        *,
        writes: Sequence[State] = (),
        in_place: Sequence[int] | None = None,
        attributes: Mapping[str, Attribute] = _NO_ATTRIBUTES,
    ) -> tuple[Value, ...]:
        """Append one op and return its results.

        Args:
            kernel: name of the function that it calls.
            operands: its positional arguments.
            results: shape and dtype of each.
            writes: the states among the operands that it changes.
            in_place: see `Op`; None takes the declaration in `varlen_kernels.reference`.
            attributes: its keyword arguments.

        Raises:
            ValueError: an operand was not recorded here, or `writes` or `in_place` do not fit the operands.
        """
        in_place = IN_PLACE.get(kernel, ()) if in_place is None else tuple(in_place)
        self._check(kernel, operands, writes, in_place)
        names = [f"{len(self._ops)}:{kernel}"]
        if len(results) > 1:
            names = [f"{names[0]}.{position}" for position in range(len(results))]
        made = tuple(
            Value(name, _symbolic(shape), dtype)
            for name, (shape, dtype) in zip(names, results, strict=False)
        )
        self._declared.update((value.name, value) for value in made)
        self._ops.append(
            Op(kernel, tuple(operands), attributes, made, tuple(writes), tuple(in_place))
        )
        return made

    def finish(self, *outputs: Value) -> Program:
        """Return the program that computes `outputs`, results of its ops.

        Raises:
            ValueError: an output is not the result of an op.
        """
        results = {result for op in self._ops for result in op.results}
        for value in outputs:
            if value not in results:
                raise ValueError(f'the output "{value.name}" is not the result of an op')
        return Program(self._ops, outputs)

    def embed_layer_norm(
        self,
        token_ids: Value,
        position_ids: Value,
        type_ids: Value,
        token_table: Tensor,
        position_table: Tensor,
        type_table: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        eps: float,
    ) -> Value:
        operands = (
            token_ids,
            position_ids,
            type_ids,
            token_table,
            position_table,
            type_table,
            weight,
            bias,
        )
        shape = (*token_ids.shape, token_table.shape[1])
        return self._call("embed_layer_norm", operands, shape, token_table.dtype, eps=eps)

    def embed(
        self,
        token_ids: Value,
        token_table: Tensor,
        position_ids: Value | None = None,
        position_table: Tensor | None = None,
        *,
        scale: float = 1.0,
    ) -> Value:
        operands: tuple[Operand, ...] = (token_ids, token_table, position_ids, position_table)
        shape = (*token_ids.shape, token_table.shape[1])
        return self._call("embed", operands, shape, token_table.dtype, scale=scale)

    def linear(self, x: Value, weight: Tensor, bias: Tensor | None) -> Value:
        return self._call("linear", (x, weight, bias), (x.shape[0], weight.shape[1]), x.dtype)

    def activate(self, x: Value, *, kind: Activation) -> Value:
        return self._call("activate", (x,), x.shape, x.dtype, kind=kind)

    def linear_activate(
        self, x: Value, weight: Tensor, bias: Tensor | None, *, kind: Activation
    ) -> Value:
        """Record one op if the matrix product of the device computes the activation, else two."""
        if kind == "gelu" and self._approximate_gelu:
            kind = "gelu_tanh"
        if not self._for_gpu or bias is None or kind not in IN_EPILOGUE:
            return self.activate(self.linear(x, weight, bias), kind=kind)
        shape = (x.shape[0], weight.shape[1])
        return self._call("linear_activate", (x, weight, bias), shape, x.dtype, kind=kind)

    def tanh(self, x: Value) -> Value:
        return self._call("tanh", (x,), x.shape, x.dtype)

    def add_layer_norm(
        self, x: Value, residual: Value, weight: Tensor, bias: Tensor | None, *, eps: float
    ) -> Value:
        operands = (x, residual, weight, bias)
        return self._call("add_layer_norm", operands, x.shape, x.dtype, eps=eps)

    def layer_norm(self, x: Value, weight: Tensor, bias: Tensor | None, *, eps: float) -> Value:
        return self._call("layer_norm", (x, weight, bias), x.shape, x.dtype, eps=eps)

    def residual_layer_norm(
        self, x: Value, residual: Value, weight: Tensor, bias: Tensor | None, *, eps: float
    ) -> tuple[Value, Value]:
        operands, result = (x, residual, weight, bias), (x.shape, x.dtype)
        total, normed = self.call(
            "residual_layer_norm", operands, [result, result], attributes={"eps": eps}
        )
        return total, normed

    def rms_norm(self, x: Value, weight: Tensor, *, eps: float) -> Value:
        return self._call("rms_norm", (x, weight), x.shape, x.dtype, eps=eps)

    def residual_rms_norm(
        self, x: Value, residual: Value, weight: Tensor, *, eps: float
    ) -> tuple[Value, Value]:
        operands, result = (x, residual, weight), (x.shape, x.dtype)
        total, normed = self.call(
            "residual_rms_norm", operands, [result, result], attributes={"eps": eps}
        )
        return total, normed

    def activate_gate(self, x: Value, *, kind: Activation) -> Value:
        rows, width = x.shape
        assert isinstance(width, int)
        return self._call("activate_gate", (x,), (rows, width // 2), x.dtype, kind=kind)

    def norm_heads(
        self,
        qkv: Value,
        query_weight: Tensor,
        key_weight: Tensor,
        heads: AttentionHeads,
        *,
        eps: float,
    ) -> Value:
        operands = (qkv, query_weight, key_weight)
        return self._call("norm_heads", operands, qkv.shape, qkv.dtype, **heads.counts, eps=eps)

    def rotary(
        self, qkv: Value, position_ids: Value, cos_sin: Tensor, heads: AttentionHeads
    ) -> Value:
        operands = (qkv, position_ids, cos_sin)
        return self._call("rotary", operands, qkv.shape, qkv.dtype, **heads.counts)

    def append_kv(
        self, qkv: Value, slots: Value, key_cache: State, value_cache: State, heads: AttentionHeads
    ) -> None:
        operands, caches = (qkv, slots, key_cache, value_cache), (key_cache, value_cache)
        self.call("append_kv", operands, [], writes=caches, attributes=heads.counts)

    def attention_varlen(
        self,
        qkv: Value,
        cu_seqlens: Value,
        heads: AttentionHeads,
        bias: Tensor | None = None,
        distances: DistanceTables | None = None,
        *,
        scale: float,
        causal: bool = False,
        window: int = 0,
    ) -> Value:
        tiles = key_lengths = None
        if self._has_key_lengths:
            key_lengths = self.input("key_lengths", ("sequences",), torch.int32)
        tables = distances or _NO_DISTANCES
        if self._for_gpu:
            forms = bias, tables.rows, key_lengths
            tiles = self._attention_tiles(qkv, cu_seqlens, heads, forms, causal=causal)
        distance_operands = tables.rows, tables.keys, tables.queries
        operands = (qkv, cu_seqlens, bias, tiles, *distance_operands, key_lengths)
        shape = (qkv.shape[0], heads.width)
        attributes = {**heads.counts, "scale": scale, "causal": causal, "window": window}
        return self._call("attention_varlen", operands, shape, qkv.dtype, **attributes)

    def _attention_tiles(
        self,
        qkv: Value,
        cu_seqlens: Value,
        heads: AttentionHeads,
        forms: tuple[Operand, Operand, Operand],
        *,
        causal: bool,
    ) -> Value:
        """Return the tiles of `attention_varlen`, recorded once for all layers that share them.

        Args:
            forms: the bias, the rows of distances and the key lengths, where there are any.
        """
        has_key_lengths = forms[2] is not None
        key = (cu_seqlens.name, heads, qkv.dtype, causal, *(each is not None for each in forms))
        if key not in self._tiles:
            tokens, bounds = qkv.shape[0], cu_seqlens.shape[0]
            assert isinstance(tokens, Size)
            assert isinstance(bounds, Size)
            self._tiles[key] = self._call(
                "attention_tiles",
                (qkv, cu_seqlens, *forms),
                (tokens + bounds, 3 + has_key_lengths),
                torch.int32,
                **heads.counts,
                causal=causal,
            )
        return self._tiles[key]

    def attention_paged(
        self,
        qkv: Value,
        key_cache: State,
        value_cache: State,
        tables: Sequence[Value],
        heads: AttentionHeads,
        bias: Tensor | None = None,
        *,
        scale: float,
        window: int = 0,
    ) -> Value:
        operands: tuple[Operand, ...] = (qkv, key_cache, value_cache, *tables, bias)
        if self._for_gpu:
            operands += (self._paged_tiles(qkv, key_cache, tables, heads, window=window),)
        shape = (qkv.shape[0], heads.width)
        attributes = {**heads.counts, "scale": scale, "window": window}
        return self._call("attention_paged", operands, shape, qkv.dtype, **attributes)

    def _paged_tiles(
        self,
        qkv: Value,
        key_cache: State,
        tables: Sequence[Value],
        heads: AttentionHeads,
        *,
        window: int,
    ) -> Value:
        """Return the tiles of `attention_paged`, recorded once for all layers that share them."""
        cu_seqlens, context_lens, _, cu_blocks = tables
        key = (cu_seqlens.name, heads, qkv.shape, qkv.dtype, key_cache.dtype, window)
        if key not in self._tiles:
            tokens, bounds = qkv.shape[0], cu_seqlens.shape[0]
            assert isinstance(tokens, Size)
            assert isinstance(bounds, Size)
            self._tiles[key] = self._call(
                "paged_tiles",
                (qkv, key_cache, cu_seqlens, context_lens, cu_blocks),
                (tokens + bounds + bounds, 5),
                torch.int32,
                **heads.counts,
                window=window,
            )
        return self._tiles[key]

    def select_rows(self, x: Value, rows: Value) -> Value:
        return self._call("select_rows", (x, rows), (*rows.shape, *x.shape[1:]), x.dtype)

    def pool(
        self,
        x: Value,
        cu_seqlens: Value,
        normalize: Value | None,
        unpooled_lengths: Value | None = None,
        *,
        mode: Pooling,
    ) -> Value:
        operands = (x, cu_seqlens, normalize, unpooled_lengths)
        shape = ("sequences", x.shape[1])
        return self._call("pool", operands, shape, torch.float32, mode=mode)

    def term_weights(
        self,
        x: Value,
        weight: Tensor,
        bias: Tensor | None,
        cu_seqlens: Value,
        *,
        mode: TermPooling,
        logs: int,
    ) -> Value:
        terms = weight.shape[1]
        results: list[tuple[Axes, torch.dtype]] = [
            (("sequences", terms), torch.float32),
            ((x.shape[0], min(terms, SLICE_TERMS)), x.dtype),
        ]
        weights, _ = self.call(
            "term_weights",
            (x, weight, bias, cu_seqlens),
            results,
            attributes={"mode": mode, "logs": logs},
        )
        return weights

    def top_terms(self, x: Value, weight: Tensor, bias: Tensor | None, *, count: int) -> Value:
        operands, shape = (x, weight, bias), (x.shape[0], 2, count)
        return self._call("top_terms", operands, shape, torch.float32, count=count)

    def concat(self, left: Value, right: Value) -> Value:
        (rows, width), (_, more) = left.shape, right.shape
        assert isinstance(width, int)
        assert isinstance(more, int)
        return self._call("concat", (left, right), (rows, width + more), left.dtype)

    def normalize_rows(self, x: Value, normalize: Value) -> Value:
        return self._call("normalize_rows", (x, normalize), x.shape, x.dtype)

    def first_tokens(self, x: Value, cu_seqlens: Value) -> Value:
        return self._call("first_tokens", (x, cu_seqlens), ("sequences", x.shape[1]), x.dtype)

    def to_fp32(self, x: Value) -> Value:
        return self._call("to_fp32", (x,), x.shape, torch.float32)

    def _call(
        self,
        kernel: str,
        operands: Sequence[Operand],
        shape: Axes,
        dtype: torch.dtype,
        **attributes: Attribute,
    ) -> Value:
        (result,) = self.call(kernel, operands, [(shape, dtype)], attributes=attributes)
        return result

    def _declare(self, declared: _Declared) -> _Declared:
        if self._declared.setdefault(declared.name, declared) != declared:
            raise ValueError(f'"{declared.name}" is declared twice, with different meanings')
        return declared

    def _check(
        self,
        kernel: str,
        operands: Sequence[Operand],
        writes: Sequence[State],
        in_place: Sequence[int],
    ) -> None:
        for operand in operands:
            if isinstance(operand, Value | State) and self._declared.get(operand.name) != operand:
                raise ValueError(f'{kernel} reads "{operand.name}", which another recorder made')
        states = {operand for operand in operands if isinstance(operand, State)}
        for state in writes:
            if state not in states:
                raise ValueError(f'{kernel} writes "{state.name}", which is not among its operands')
        if len(set(in_place)) < len(in_place) or not set(in_place) <= set(range(len(operands))):
            raise ValueError(f"{kernel} has in_place {in_place}; allowed: one operand per result")


def _symbolic(shape: Axes) -> Shape:
    return tuple(Size(**{axis: 1}) if isinstance(axis, str) else axis for axis in shape)
