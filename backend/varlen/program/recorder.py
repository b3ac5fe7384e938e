"""Records a forward pass: ops that are appended one by one to a `Program`.

Each op returns symbolic values. A dimension is any name that batches give a size to: tokens, sequences, blocks,
logit_rows, ...
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from varlen.memory.planner import Shape, Size
from varlen.program.adapters import (
    AdaptedLayer,
    AdaptedRows,
    AdapterTables,
    LayerParts,
    whole_steps,
    width_of,
)
from varlen.program.program import Attribute, Op, Operand, Program, State, Value, Weights
from varlen.program.rank import ALONE, RANKS, AttentionHeads, Rank
from varlen_kernels import IN_EPILOGUE, Activation, Pooling, TermPooling
from varlen_kernels.functions import RANK_STEP
from varlen_kernels.op_table import OPS
from varlen_kernels.reference.attention import Distances
from varlen_kernels.reference.rank_memory import rank_words

# Axes as a model writes them: a dimension by its name, `Size(1, sequences=1)`, or a fixed length.
Axes: TypeAlias = Sequence[int | str | Size]

_NO_ATTRIBUTES: Mapping[str, Attribute] = {}
_Declared = TypeVar("_Declared", Value, State)


class Recording:
    """The ops of a program so far, and the tensors that they may read."""

    def __init__(self) -> None:
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
            writes: the states among the operands that it changes.
            in_place: see `Op`; None takes the one of the table of ops.

        Raises:
            ValueError: an operand was not recorded here, or `writes` or `in_place` do not fit the operands.
        """
        if in_place is None:
            in_place = OPS[kernel].in_place if kernel in OPS else ()
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

    def record(self, op: str, *operands: Operand, **attributes: Attribute) -> Value:
        """Append an op with one result; see `record_all`."""
        (result,) = self.record_all(op, operands, attributes)
        return result

    def record_all(
        self,
        op: str,
        operands: Sequence[Operand],
        attributes: Mapping[str, Attribute],
        *,
        writes: Sequence[State] = (),
    ) -> tuple[Value, ...]:
        """Append an op; its row in `op_table` declares its arguments and results; see `call`.

        Raises:
            TypeError: an argument is missing, or the op takes no such argument.
            ValueError: see `call`.
        """
        row = OPS[op]
        arguments = row.named(operands, attributes)
        results = row.result(arguments) if row.result else ()
        return self.call(op, operands, results, writes=writes, attributes=attributes)

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


def _of_scores(
    heads: AttentionHeads, scale: float | None, window: int, soft_cap: float
) -> dict[str, Attribute]:
    """Return attributes of an attention; without a `scale`, it is heads.dim ** -0.5."""
    scale = heads.dim**-0.5 if scale is None else scale
    return {**heads.counts, "scale": scale, "window": window, "soft_cap": soft_cap}


def _symbolic(shape: Axes) -> Shape:
    return tuple(Size(**{axis: 1}) if isinstance(axis, str) else axis for axis in shape)


class Routes(NamedTuple):
    """The experts of each token, see `reference.route_tokens`."""

    weights: Value
    places: Value
    tokens: Value
    cu_groups: Value


class Recorder(Recording):
    """The ops that a model may call. Each returns the values that it writes.

    An op has the meaning, shapes and precision of the function of the same name in
    `varlen_kernels.reference`.
    """

    def __init__(
        self,
        *,
        for_gpu: bool = False,
        approximate_gelu: bool = False,
        has_key_lengths: bool = False,
        is_padded: bool = False,
        rank: Rank = ALONE,
        adapters: AdapterTables | None = None,
    ) -> None:
        """Start a recording.

        Args:
            for_gpu: whether the program runs on a GPU. There, sequences are assigned to tiles once for all layers, and
                the matrix product computes an activation if it can.
            approximate_gelu: whether a GPU computes the exact GELU by its tanh form, in the matrix product.
            has_key_lengths: whether sequences may end with tokens that no token reads. If so, each batch brings the
                input `key_lengths`.
            is_padded: whether batches are padded, see `attention_padded`; their dimension `scores` is the number of
                scores of a head.
            adapters: tables for adapters, which get the layers that are recorded; None without adapters.
        """
        super().__init__()
        self._rank = rank
        self._adapters = adapters
        self._for_gpu = for_gpu
        self._approximate_gelu = approximate_gelu and for_gpu
        self._has_key_lengths = has_key_lengths
        self._is_padded = is_padded
        # the tiles of attention, by all that they depend on
        self._made_tiles: dict[tuple[object, ...], Value] = {}
        self._layer_weights: Sequence[float] | None = None
        self._num_layer_outputs = 0
        self._mixed: Value | None = None

    @property
    def pools_spans(self) -> bool:
        """Whether batches may pool parts of sequences, which graphs of a GPU do not."""
        return not self._for_gpu

    def mix_layers(self, weights: Sequence[float]) -> None:
        """Add the outputs of all layers, each times its weight; see `mixed_layers`."""
        self._layer_weights = weights

    def layer_output(self, x: Value) -> None:
        """Say that `x` is what the first layer reads, or what a layer returns, `[tokens, hidden]`.

        It records nothing, unless layers are mixed.
        """
        if self._layer_weights is None:
            return
        weight = self._layer_weights[self._num_layer_outputs]
        self._num_layer_outputs += 1
        if weight:
            self._mixed = self.record("add_scaled", x, self._mixed, factor=weight)

    @property
    def mixed_layers(self) -> Value:
        """The sum of the outputs of all layers times their weights, `[tokens, hidden]` fp32."""
        assert self._mixed is not None
        return self._mixed

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
        ids, tables = (
            (token_ids, position_ids, type_ids),
            (token_table, position_table, type_table),
        )
        return self.record("embed_layer_norm", *ids, *tables, weight, bias, eps=eps)

    def embed(
        self,
        token_ids: Value,
        token_table: Tensor,
        position_ids: Value | None = None,
        position_table: Tensor | None = None,
        *,
        scale: float = 1.0,
    ) -> Value:
        tables = token_table, position_ids, position_table
        return self.record("embed", token_ids, *tables, scale=scale)

    def linear(self, x: Value, weight: Weights, bias: Tensor | None) -> Value:
        """Record a linear layer of a tensor, or of codes in blocks."""
        kernel = "linear" if isinstance(weight, Tensor) else "linear_blocks"
        return self.record(kernel, x, weight, bias)

    def adapts(self, parts: LayerParts, weight: Tensor, bias: Tensor | None) -> bool:
        """Return whether an adapter changes one of these layers, which have this weight."""
        tables = self._adapters
        if tables is None:
            return False
        for name, width, cut in parts:
            tables.seen[name] = (weight.shape[0], width) if cut is None else cut.shape
            if cut is not None:
                tables.cut.add(name)
            if bias is not None:
                tables.biased.add(name)
        return tables.columns(parts)[-1] > 0 or tables.replaces(parts)

    def add_adapters(
        self, y: Value, x: Value, parts: LayerParts, weight: Tensor, bias: Tensor | None
    ) -> Value:
        """Record what adapters add to a linear layer; nothing where none changes it.

        Args:
            y: `[rows, out]`, the result of the layer.
            x: `[rows, in]`, what it reads.
            parts: layers of the checkpoint that it has.
            weight, bias: its weights, which an adapter may replace.
        """
        tables = self._adapters
        if tables is None or not self.adapts(parts, weight, bias):
            return y
        fan_in, fan_out = weight.shape
        (dimension, _) = x.shape[0].per[0] if isinstance(x.shape[0], Size) else ("", 0)
        names, name, slots = AdaptedRows(dimension), parts[0].name, tables.slots
        rows = self.input(names.rows, (names.rows,), torch.int32)
        bounds = self.input(names.bounds, (slots + 1,), torch.int32)
        spans = self.state(f"{name}.spans", (slots, len(parts), 4), torch.int32)
        second = of_bias = base = None
        if tables.replaces(parts):
            shape, base = (slots, fan_in, whole_steps(fan_out, RANK_STEP)), (weight, bias)
            if bias is not None:
                of_bias = self.state(f"{name}.bias", (slots, fan_out), x.dtype)
        else:
            ranks = tables.columns(parts)[-1]
            shape = slots, fan_in, ranks
            second = self.state(f"{name}.lora_B", (slots, ranks, width_of(parts)), x.dtype)
        first = self.state(f"{name}.lora_A", shape, x.dtype)
        tables.layers[name] = AdaptedLayer(parts, first, second, spans, of_bias, base)
        return self.record("add_adapters", y, x, rows, bounds, first, second, spans, of_bias)

    def linear_groups(self, x: Value, weight: Tensor, cu_groups: Value) -> Value:
        return self.record("linear_groups", x, weight, cu_groups)

    def route_tokens(self, logits: Value, *, count: int, normalize: bool) -> Routes:
        attributes = {"count": count, "normalize": int(normalize)}
        return Routes(*self.record_all("route_tokens", (logits,), attributes))

    def sum_experts(self, x: Value, weights: Value, places: Value, bias: Tensor | None) -> Value:
        return self.record("sum_experts", x, weights, places, bias)

    def all_reduce(self, x: Value) -> Value:
        """Record the sum over all ranks; nothing where there is one."""
        if self._rank == ALONE:
            return x
        return self._meet("all_reduce", x)

    def gather_columns(self, x: Value, width: int) -> Value:
        """Record the columns of all ranks on rank 0; nothing where there is one."""
        if self._rank == ALONE:
            return x
        return self._meet("gather_columns", x, width=width)

    def local_ids(self, token_ids: Value, *, first: int, count: int) -> Value:
        """Record the rows of tokens in this rank's table; nothing where there is one rank."""
        if self._rank == ALONE:
            return token_ids
        return self.record("local_ids", token_ids, first=first, count=count)

    def _meet(self, kernel: str, x: Value, **attributes: Attribute) -> Value:
        """Record an op in which all ranks meet."""
        ranks = self.state(RANKS, (rank_words(self._rank.size),), torch.int64)
        attributes |= {"rank": self._rank.number, "size": self._rank.size}
        (result,) = self.record_all(kernel, (x, ranks), attributes, writes=(ranks,))
        return result

    def activate(self, x: Value, *, kind: Activation) -> Value:
        return self.record("activate", x, None, kind=kind)

    def linear_activate(
        self, x: Value, weight: Tensor, bias: Tensor | None, *, kind: Activation
    ) -> Value:
        """Record one op if the matrix product of the device computes the activation, else two."""
        if kind == "gelu" and self._approximate_gelu:
            kind = "gelu_tanh"
        if not self._for_gpu or bias is None or kind not in IN_EPILOGUE:
            return self.activate(self.linear(x, weight, bias), kind=kind)
        return self.record("linear_activate", x, weight, bias, kind=kind)

    def tanh(self, x: Value, *, limit: float = 1.0) -> Value:
        return self.record("tanh", x, limit=limit)

    def add_layer_norm(
        self, x: Value, residual: Value, weight: Tensor, bias: Tensor | None, *, eps: float
    ) -> Value:
        return self.record("add_layer_norm", x, residual, weight, bias, eps=eps)

    def layer_norm(self, x: Value, weight: Tensor, bias: Tensor | None, *, eps: float) -> Value:
        return self.record("layer_norm", x, weight, bias, eps=eps)

    def residual_layer_norm(
        self, x: Value, residual: Value, weight: Tensor, bias: Tensor | None, *, eps: float
    ) -> tuple[Value, Value]:
        operands = (x, residual, weight, bias)
        total, normed = self.record_all("residual_layer_norm", operands, {"eps": eps})
        return total, normed

    def rms_norm(self, x: Value, weight: Tensor, *, eps: float) -> Value:
        return self.record("rms_norm", x, weight, eps=eps)

    def residual_rms_norm(
        self, x: Value, residual: Value, weight: Tensor, *, eps: float
    ) -> tuple[Value, Value]:
        operands = (x, residual, weight)
        total, normed = self.record_all("residual_rms_norm", operands, {"eps": eps})
        return total, normed

    def activate_gate(self, x: Value, *, kind: Activation) -> Value:
        return self.record("activate_gate", x, kind=kind)

    def norm_heads(
        self,
        qkv: Value,
        query_weight: Tensor,
        key_weight: Tensor,
        heads: AttentionHeads,
        *,
        eps: float,
    ) -> Value:
        return self.record("norm_heads", qkv, query_weight, key_weight, **heads.counts, eps=eps)

    def rotary(
        self, qkv: Value, position_ids: Value, cos_sin: Tensor, heads: AttentionHeads
    ) -> Value:
        return self.record("rotary", qkv, position_ids, cos_sin, **heads.counts)

    def append_kv(
        self,
        qkv: Value,
        slots: Value,
        key_cache: State,
        value_cache: State,
        heads: AttentionHeads,
        position_ids: Value | None = None,
        cos_sin: Tensor | None = None,
        head_norms: tuple[Tensor, Tensor] | None = None,
        *,
        eps: float = 0.0,
    ) -> Value:
        caches = key_cache, value_cache
        norms = (None, None) if head_norms is None else head_norms
        operands = (qkv, slots, *caches, position_ids, cos_sin, *norms)
        attributes = {**heads.counts, "eps": eps}
        changed = self.record_all("append_kv", operands, attributes, writes=caches)
        # without positions, queries stay as they are
        return changed[0] if changed else qkv

    def attention_varlen(
        self,
        qkv: Value,
        cu_seqlens: Value,
        heads: AttentionHeads,
        bias: Tensor | None = None,
        distances: Distances | None = None,
        *,
        scale: float | None = None,
        causal: bool = False,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Value:
        tiles = key_lengths = None
        if self._has_key_lengths:
            key_lengths = self.input("key_lengths", ("sequences",), torch.int32)
        attributes = _of_scores(heads, scale, window, soft_cap) | {"causal": causal}
        # labels of texts have no padding
        if self._is_padded and qkv.shape[0] == Size(tokens=1):
            context, _, _ = self.call(
                "attention_padded",
                (qkv, cu_seqlens, bias, distances, key_lengths),
                [
                    ((qkv.shape[0], heads.width), qkv.dtype),
                    (("scores", heads.queries), qkv.dtype),
                    (qkv.shape, qkv.dtype),
                ],
                attributes=attributes,
            )
            return context
        if self._for_gpu:
            tiles = self._tiles(
                "attention_tiles",
                (qkv, cu_seqlens, bias, distances, key_lengths),
                cu_seqlens,
                **heads.counts,
                causal=causal,
            )
        operands = (qkv, cu_seqlens, bias, tiles, distances, key_lengths)
        return self.record("attention_varlen", *operands, **attributes)

    def attention_paged(
        self,
        qkv: Value,
        key_cache: State,
        value_cache: State,
        tables: Sequence[Value],
        heads: AttentionHeads,
        bias: Tensor | None = None,
        *,
        scale: float | None = None,
        window: int = 0,
        soft_cap: float = 0.0,
    ) -> Value:
        operands: tuple[Operand, ...] = (qkv, key_cache, value_cache, *tables, bias)
        if self._for_gpu:
            cu_seqlens, context_lens, _, cu_blocks = tables
            tiles = self._tiles(
                "paged_tiles",
                (qkv, key_cache, cu_seqlens, context_lens, cu_blocks),
                cu_seqlens,
                **heads.counts,
                window=window,
            )
            operands += (tiles,)
        attributes = _of_scores(heads, scale, window, soft_cap)
        return self.record("attention_paged", *operands, **attributes)

    def _tiles(
        self,
        kernel: str,
        operands: tuple[Operand, ...],
        cu_seqlens: Value,
        **attributes: Attribute,
    ) -> Value:
        """Return the tiles of an attention op, recorded once for all layers that share them.

        Args:
            kernel: name of the function that makes them.
            operands: its arguments, qkv first. It reads no values of operands that differ from layer to layer.
            cu_seqlens: bounds of the sequences.
            attributes: its keyword arguments.
        """
        qkv = operands[0]
        assert isinstance(qkv, Value)
        # of tables only their presence counts
        dtypes = [getattr(each, "dtype", each is not None) for each in operands]
        key = (kernel, cu_seqlens.name, qkv.shape, *dtypes, *attributes.values())
        if key not in self._made_tiles:
            self._made_tiles[key] = self.record(kernel, *operands, **attributes)
        return self._made_tiles[key]

    def select_rows(self, x: Value, rows: Value) -> Value:
        return self.record("select_rows", x, rows)

    def pool(
        self,
        x: Value,
        cu_seqlens: Value,
        normalize: Value | None,
        unpooled_lengths: Value | None = None,
        rows: Value | None = None,
        *,
        mode: Pooling,
    ) -> Value:
        return self.record("pool", x, cu_seqlens, normalize, unpooled_lengths, rows, mode=mode)

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
        operands = (x, weight, bias, cu_seqlens)
        weights, _ = self.record_all("term_weights", operands, {"mode": mode, "logs": logs})
        return weights

    def top_terms(self, x: Value, weight: Tensor, bias: Tensor | None, *, count: int) -> Value:
        return self.record("top_terms", x, weight, bias, count=count)

    def concat(self, left: Value, right: Value) -> Value:
        return self.record("concat", left, right)

    def normalize_rows(self, x: Value, normalize: Value) -> Value:
        return self.record("normalize_rows", x, normalize)

    def first_tokens(self, x: Value, cu_seqlens: Value) -> Value:
        return self.record("first_tokens", x, cu_seqlens)

    def window_rows(self, x: Value, cu_seqlens: Value, *, size: int) -> Value:
        return self.record("window_rows", x, cu_seqlens, size=size)

    def to_fp32(self, x: Value) -> Value:
        return self.record("to_fp32", x)
