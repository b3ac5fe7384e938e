"""The recorder: a model calls its ops like torch, and gets a `Program`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from varlen.memory.usage import Size
from varlen.program.heads import AttentionHeads
from varlen.program.program import Attribute, Operand, State, Value
from varlen.program.rank import ALONE, RANKS, Rank
from varlen.program.recording import Axes, Recording
from varlen_kernels import IN_EPILOGUE, Activation, Pooling, TermPooling
from varlen_kernels.reference.attention import Distances
from varlen_kernels.reference.rank_memory import rank_words
from varlen_kernels.reference.vocabulary import SLICE_TERMS


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
        rank: Rank = ALONE,
    ) -> None:
        """Start a recording.

        Args:
            for_gpu: whether the program runs on a GPU. There, sequences are assigned to tiles once for all layers, and
                the matrix product computes an activation if it can.
            approximate_gelu: whether a GPU computes the exact GELU by its tanh form, in the matrix product.
            has_key_lengths: whether sequences may end with tokens that no token reads. If so, each batch brings the
                input `key_lengths`.
            rank: the rank whose part of a model is recorded.
        """
        super().__init__()
        self._rank = rank
        self._for_gpu = for_gpu
        self._approximate_gelu = approximate_gelu and for_gpu
        self._has_key_lengths = has_key_lengths
        # the tiles of attention, by all that they depend on
        self._made_tiles: dict[tuple[object, ...], Value] = {}

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

    def all_reduce(self, x: Value) -> Value:
        """Record the sum over all ranks; nothing where there is one."""
        if self._rank == ALONE:
            return x
        return self._meet("all_reduce", x, x.shape)

    def gather_columns(self, x: Value, width: int) -> Value:
        """Record the columns of all ranks on rank 0; nothing where there is one."""
        if self._rank == ALONE:
            return x
        return self._meet("gather_columns", x, (x.shape[0], width), width=width)

    def local_ids(self, token_ids: Value, *, first: int, count: int) -> Value:
        """Record the rows of tokens in this rank's table; nothing where there is one rank."""
        if self._rank == ALONE:
            return token_ids
        return self._call(
            "local_ids", (token_ids,), token_ids.shape, token_ids.dtype, first=first, count=count
        )

    def _meet(self, kernel: str, x: Value, shape: Axes, **attributes: Attribute) -> Value:
        """Record an op in which all ranks meet."""
        ranks = self.state(RANKS, (rank_words(self._rank.size),), torch.int64)
        attributes |= {"rank": self._rank.number, "size": self._rank.size}
        (result,) = self.call(
            kernel, (x, ranks), [(shape, x.dtype)], writes=(ranks,), attributes=attributes
        )
        return result

    def activate(self, x: Value, *, kind: Activation) -> Value:
        return self._call("activate", (x, None), x.shape, x.dtype, kind=kind)

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
        return self._call("add_layer_norm", operands, x.shape, weight.dtype, eps=eps)

    def layer_norm(self, x: Value, weight: Tensor, bias: Tensor | None, *, eps: float) -> Value:
        return self._call("layer_norm", (x, weight, bias), x.shape, weight.dtype, eps=eps)

    def residual_layer_norm(
        self, x: Value, residual: Value, weight: Tensor, bias: Tensor | None, *, eps: float
    ) -> tuple[Value, Value]:
        operands = (x, residual, weight, bias)
        results = [(x.shape, x.dtype), (x.shape, weight.dtype)]
        total, normed = self.call("residual_layer_norm", operands, results, attributes={"eps": eps})
        return total, normed

    def rms_norm(self, x: Value, weight: Tensor, *, eps: float) -> Value:
        return self._call("rms_norm", (x, weight), x.shape, weight.dtype, eps=eps)

    def residual_rms_norm(
        self, x: Value, residual: Value, weight: Tensor, *, eps: float
    ) -> tuple[Value, Value]:
        operands = (x, residual, weight)
        results = [(x.shape, x.dtype), (x.shape, weight.dtype)]
        total, normed = self.call("residual_rms_norm", operands, results, attributes={"eps": eps})
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
        # without positions, queries stay as they are
        results = [] if cos_sin is None else [(qkv.shape, qkv.dtype)]
        changed = self.call(
            "append_kv",
            (qkv, slots, *caches, position_ids, cos_sin, *norms),
            results,
            writes=caches,
            attributes={**heads.counts, "eps": eps},
        )
        return changed[0] if changed else qkv

    def attention_varlen(
        self,
        qkv: Value,
        cu_seqlens: Value,
        heads: AttentionHeads,
        bias: Tensor | None = None,
        distances: Distances | None = None,
        *,
        scale: float,
        causal: bool = False,
        window: int = 0,
    ) -> Value:
        tiles = key_lengths = None
        if self._has_key_lengths:
            key_lengths = self.input("key_lengths", ("sequences",), torch.int32)
        if self._for_gpu:
            tiles = self._tiles(
                "attention_tiles",
                (qkv, cu_seqlens, bias, distances, key_lengths),
                cu_seqlens,
                (1, 3 if key_lengths is None else 4),
                **heads.counts,
                causal=causal,
            )
        operands = (qkv, cu_seqlens, bias, tiles, distances, key_lengths)
        shape = (qkv.shape[0], heads.width)
        attributes = {**heads.counts, "scale": scale, "causal": causal, "window": window}
        return self._call("attention_varlen", operands, shape, qkv.dtype, **attributes)

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
            cu_seqlens, context_lens, _, cu_blocks = tables
            tiles = self._tiles(
                "paged_tiles",
                (qkv, key_cache, cu_seqlens, context_lens, cu_blocks),
                cu_seqlens,
                (2, 5),
                **heads.counts,
                window=window,
            )
            operands += (tiles,)
        shape = (qkv.shape[0], heads.width)
        attributes = {**heads.counts, "scale": scale, "window": window}
        return self._call("attention_paged", operands, shape, qkv.dtype, **attributes)

    def _tiles(
        self,
        kernel: str,
        operands: tuple[Operand, ...],
        cu_seqlens: Value,
        size: tuple[int, int],
        **attributes: Attribute,
    ) -> Value:
        """Return the tiles of an attention op, recorded once for all layers that share them.

        Args:
            kernel: name of the function that makes them.
            operands: its arguments, qkv first. It reads no values of operands that differ from layer to layer.
            cu_seqlens: bounds of the sequences.
            size: rows for each bound, beside one for each token; and number of columns.
            attributes: its keyword arguments.
        """
        qkv = operands[0]
        assert isinstance(qkv, Value)
        # of tables only their presence counts
        dtypes = [getattr(each, "dtype", each is not None) for each in operands]
        key = (kernel, cu_seqlens.name, qkv.shape, *dtypes, *attributes.values())
        if key not in self._made_tiles:
            tokens, bounds = qkv.shape[0], cu_seqlens.shape[0]
            assert isinstance(tokens, Size)
            assert isinstance(bounds, Size)
            shape = (sum([bounds] * size[0], tokens), size[1])
            self._made_tiles[key] = self._call(kernel, operands, shape, torch.int32, **attributes)
        return self._made_tiles[key]

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
