"""Encoders that transformers does not have, as papers and checkpoints state them.

They are the oracle of tests: plain torch, one sequence at a time. Tensors have the names of the checkpoints. The
classes save and load checkpoints as transformers' own do.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("geglu", "gelu"), nn.functional.gelu),
    **dict.fromkeys(("reglu", "relu"), nn.functional.relu),
}


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head.

    Source: Press et al. 2021, arXiv:2108.12409, section 3; numbers that are no power of 2 as its authors' code has
    them.
    """
    power = math.floor(math.log2(heads))
    if 2**power == heads:
        start = 2.0 ** (-(2.0 ** -(power - 3)))
        return [start**place for place in range(1, heads + 1)]
    return alibi_slopes(2**power) + alibi_slopes(2 ** (power + 1))[0::2][: heads - 2**power]


class _Named(nn.Module):
    """Modules under the names of a checkpoint."""

    def __init__(self, /, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def _activation(config: Any) -> Callable[[Tensor], Tensor]:
    return _ACTIVATIONS[getattr(config, "feed_forward_type", config.hidden_act)]


class _JinaBertLayer(nn.Module):
    """A layer of jina-bert-implementation, or with `qk_norm` of jina-bert-v2-qk-post-norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, inner, self.heads = (
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
        )
        self.qk_norm, self.activation = config.qk_norm, _activation(config)

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(size, eps=config.layer_norm_eps)

        parts = {name: nn.Linear(size, size) for name in ("query", "key", "value")}
        norms = {"layer_norm_q": norm(), "layer_norm_k": norm()} if self.qk_norm else {}
        self.attention = _Named(
            self=_Named(**parts, **norms),
            output=_Named(dense=nn.Linear(size, size), LayerNorm=norm()),
        )
        gates, down = nn.Linear(size, 2 * inner, bias=False), nn.Linear(inner, size)
        if self.qk_norm:
            self.mlp = _Named(up_gated_layer=gates, down_layer=down)
            self.layer_norm_1, self.layer_norm_2 = norm(), norm()
        else:
            self.mlp = _Named(gated_layers=gates, wo=down, layernorm=norm())

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for one sequence, `[tokens, hidden]`."""
        own, output, mlp = self.attention.self, self.attention.output, self.mlp
        q, k, v = own.query(x), own.key(x), own.value(x)
        if self.qk_norm:
            q, k = own.layer_norm_q(q), own.layer_norm_k(k)
        q, k, v = (each.view(len(x), self.heads, -1).transpose(0, 1) for each in (q, k, v))
        place = torch.arange(len(x))
        distance = (place[:, None] - place).abs()
        slopes = torch.tensor(alibi_slopes(self.heads), dtype=x.dtype)
        scores = q @ k.mT / math.sqrt(q.shape[-1]) - slopes[:, None, None] * distance
        context = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1)
        attended = output.LayerNorm(output.dense(context) + x)
        if self.qk_norm:
            attended = self.layer_norm_1(x + attended)
            values, gate = mlp.up_gated_layer(attended).chunk(2, -1)
            return self.layer_norm_2(attended + mlp.down_layer(values * self.activation(gate)))
        gate, values = mlp.gated_layers(attended).chunk(2, -1)
        return mlp.layernorm(mlp.wo(self.activation(gate) * values) + attended)


class _Stated(transformers.PreTrainedModel):
    """A model whose tensors have the names of a checkpoint."""

    config_class = transformers.BertConfig
    base_model_prefix = "bert"

    def _init_weights(self, module: nn.Module) -> None:
        """Leave torch's own."""


class JinaBertModel(_Stated):
    """JinaBERT without a head.

    Source: Günther et al. 2023, arXiv:2310.19923, and the checkpoints' own files, which were read and not run.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = config.hidden_size
        # a saved model has another name
        config.qk_norm = getattr(config, "qk_norm", "qk-post-norm" in config._name_or_path)
        self.embeddings = _Named(
            word_embeddings=nn.Embedding(config.vocab_size, size),
            token_type_embeddings=nn.Embedding(config.type_vocab_size, size),
            LayerNorm=nn.LayerNorm(size, eps=config.layer_norm_eps),
        )
        layers = nn.ModuleList(_JinaBertLayer(config) for _ in range(config.num_hidden_layers))
        self.encoder = _Named(layer=layers)
        self.pooler = _Named(dense=nn.Linear(size, size))
        self.post_init()

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> SimpleNamespace:
        """Return `last_hidden_state` and `pooler_output` of one sequence, `[1, tokens, hidden]`."""
        (ids,) = input_ids
        types = torch.zeros_like(ids) if token_type_ids is None else token_type_ids[0]
        at = self.embeddings
        x = at.LayerNorm(at.word_embeddings(ids) + at.token_type_embeddings(types))
        for layer in self.encoder.layer:
            x = layer(x)
        pooled = self.pooler.dense(x[:1]).tanh()
        return SimpleNamespace(last_hidden_state=x[None], pooler_output=pooled)


class JinaBertForSequenceClassification(_Stated):
    """The classifier of BERT on it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = JinaBertModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> SimpleNamespace:
        """Return the logits of one sequence, `[1, labels]`."""
        return SimpleNamespace(
            logits=self.classifier(self.bert(input_ids, token_type_ids).pooler_output)
        )


class JinaBertForMaskedLM(_Stated):
    """The head of masked language models of BERT on it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.bert = JinaBertModel(config)
        transform = _Named(
            dense=nn.Linear(size, size), LayerNorm=nn.LayerNorm(size, eps=config.layer_norm_eps)
        )
        decoder = nn.Linear(size, config.vocab_size)
        self.cls = _Named(predictions=_Named(transform=transform, decoder=decoder))
        self.post_init()

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """Return the logits of one sequence, `[1, tokens, terms]`."""
        head = self.cls.predictions
        x = head.transform.dense(self.bert(input_ids).last_hidden_state)
        x = head.transform.LayerNorm(_activation(self.config)(x))
        return SimpleNamespace(logits=head.decoder(x))


class _NomicExperts(nn.Module):
    """Experts of nomic-bert-2048's code, in a loop; one bias is added to their sum."""

    def __init__(self, hidden: int, inner: int, experts: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.router = _Named(layer=nn.Linear(hidden, experts, bias=False))
        self.experts = _Named(mlp=nn.Module())
        for name in ("w1", "w2"):
            weight = nn.Parameter(torch.empty(experts * inner, hidden))
            self.experts.mlp.register_parameter(name, weight)
        self.experts.register_parameter("bias", nn.Parameter(torch.zeros(hidden)))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router.layer(x).softmax(1)
        experts = weights.shape[1]
        first, second = (each.chunk(experts) for each in (self.experts.mlp.w1, self.experts.mlp.w2))
        rows = []
        for token, of_token in zip(x, weights, strict=True):
            best = of_token.argsort(descending=True)[: self.count].tolist()
            given = [nn.functional.gelu(token @ first[i].T) @ second[i] for i in best]
            rows.append(sum(of_token[i] * each for i, each in zip(best, given, strict=True)))
        return torch.stack(rows) + self.experts.bias


class NomicBertMoeModel(_Stated):
    """NomicBERT with experts in every second layer, as nomic-embed-text-v2-moe has it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size, inner, self.heads = config.n_embd, config.n_inner, config.n_head
        self.theta = config.rotary_emb_base

        def norm() -> nn.LayerNorm:
            return nn.LayerNorm(size, eps=config.layer_norm_epsilon)

        def layer(number: int) -> nn.Module:
            has_experts = number % config.moe_every_n_layers == 1
            return _Named(
                attn=_Named(Wqkv=nn.Linear(size, 3 * size), out_proj=nn.Linear(size, size)),
                norm1=norm(),
                mlp=_NomicExperts(size, inner, config.num_experts, config.moe_top_k)
                if has_experts
                else _Named(fc1=nn.Linear(size, inner), fc2=nn.Linear(inner, size)),
                norm2=norm(),
            )

        self.embeddings = _Named(
            word_embeddings=nn.Embedding(config.vocab_size, size),
            token_type_embeddings=nn.Embedding(config.type_vocab_size, size),
        )
        self.emb_ln = norm()
        self.encoder = _Named(layers=nn.ModuleList(map(layer, range(config.n_layer))))
        self.post_init()

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """Return the hidden states of one sequence."""
        (ids,) = input_ids
        types = self.embeddings.token_type_embeddings.weight[0]
        x = self.emb_ln(self.embeddings.word_embeddings(ids) + types)
        for layer in self.encoder.layers:
            x = layer.norm1(x + self._attention(layer.attn, x))
            mlp = layer.mlp
            is_dense = hasattr(mlp, "fc1")
            given = mlp.fc2(nn.functional.gelu(mlp.fc1(x))) if is_dense else mlp(x)
            x = layer.norm2(x + given)
        return SimpleNamespace(last_hidden_state=x[None])

    def _attention(self, attn: Any, x: Tensor) -> Tensor:
        tokens, size = x.shape
        dim = size // self.heads
        queries, keys, values = (
            each.view(tokens, self.heads, dim).transpose(0, 1) for each in attn.Wqkv(x).chunk(3, 1)
        )
        powers = torch.arange(0, dim, 2, dtype=x.dtype) / dim
        angles = torch.arange(tokens, dtype=x.dtype)[:, None] / self.theta**powers
        cos, sin = angles.cos(), angles.sin()

        def rotated(heads: Tensor) -> Tensor:
            first, second = heads.chunk(2, 2)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), 2)

        scores = rotated(queries) @ rotated(keys).transpose(1, 2) * dim**-0.5
        return attn.out_proj((scores.softmax(2) @ values).transpose(0, 1).reshape(tokens, size))
