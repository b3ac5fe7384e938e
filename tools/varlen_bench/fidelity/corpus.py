"""The corpus of the board: checkpoints in the form of the hub, and their inputs.

Weights are small and random. Kept of a public checkpoint: all fields of config.json but sizes and ids of special
tokens, the modules of sentence-transformers, prompts, the kind of the tokenizer, its template and padding, and the
share of the positions that `max_seq_length` allows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

from varlen.models.checkpoint.first_releases import to_native
from varlen_bench.fidelity.hub import (
    LONGEST,
    Width,
    read_hub_entries,
    save_hub_checkpoint,
    shrunk,
    stored_dtype,
)
from varlen_bench.fidelity.tokenizers import (
    TOKENIZER_OF,
    TOKENIZERS,
    VOCABULARY,
    count_tokens,
    write_tokenizer,
)

BoardTask = Literal["embed", "sparse_embed", "rerank", "classify", "token_classify", "generate"]
# transformers' stand-in for "no limit", which real files have.
_NO_LIMIT = 1000000000000000019884624838656
_DENSE_FEATURES = 12
_PROMPT_CHARACTERS = 16
# Heads of 32 features, or 64 where config.json names their size: vLLM's kernel for CPUs takes no smaller ones.
_WIDTH = Width(hidden=64, head=64)
# Raised when checkpoints are written in another way: rows of older ones count no more.
_EDITION = 3
# Classifiers of pairs, by name.
_PAIRS = re.compile("nli|zeroshot")
# Kinds of input, as columns of the board.
KINDS = (*"plain spaces case odd markers blank long prompt".split(), "long query")
# Models whose tokenizers give the second text of a pair another type.
_WITH_TYPES = "bert albert electra deberta deberta-v2".split()
# Their original is code of their own: transformers computes another model of the same files.
_NO_ORIGINAL = (
    "Alibaba-NLP/gte-Qwen2-1.5B-instruct",
    "NovaSearch/stella_en_1.5B_v5",
    "nvidia/llama-nemotron-rerank-1b-v2",
    "perplexity-ai/pplx-embed-v1-0.6b",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The files of a checkpoint beside config.json and weights.

    Attributes:
        like: checkpoint whose config.json it shares but for sizes; empty: its own.
        head, labels: class and number of labels of a head that the checkpoint of `like` does not have.
        task: task; None: its architecture says.
        pooling: pooling of sentence-transformers; None: the checkpoint has no modules.
        normalize: whether a Normalize module follows.
        dense: activations of the Dense modules, in their order.
        longest: `max_seq_length`, of `positions`; None: it has none.
        positions: real number of positions.
        model_max_length: a field of tokenizer_config.json, in the same unit; None: absent. -1: the number for no limit.
        prompts, default_prompt: fields of config_sentence_transformers.json.
        include_prompt: whether the pooling reads the prompt's tokens.
        tokenizer: name of a `TokenizerKind`; empty: its architecture says.
        left: whether the tokenizer pads on the left.
        lower: `do_lower_case` of sentence_bert_config.json.
    """

    like: str = ""
    head: str = ""
    labels: int = 3
    task: BoardTask | None = None
    pooling: str | None = None
    normalize: bool = False
    dense: tuple[str, ...] = ()
    longest: int | None = None
    positions: int = 512
    model_max_length: int | None = 512
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    include_prompt: bool = True
    tokenizer: str = ""
    left: bool = False
    lower: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint of the board.

    Attributes:
        name: name at the hub.
        config: its small config.json.
        tokenizer: name of its `TokenizerKind`.
    """

    name: str
    task: BoardTask
    config: dict[str, Any]
    layout: Layout
    tokenizer: str

    @property
    def digest(self) -> str:
        """Hash of the checkpoint's files, less weights, and of its inputs."""
        content = [_EDITION, self.config, asdict(self.layout), self.tokenizer, inputs_of(self)]
        if stored_dtype(self.config).itemsize == 2:
            # weights of older rows were not rounded to it
            content.append("rounded")
        return f"{crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def entries() -> list[Entry]:
    """Return all checkpoints of the board, by name."""
    hub = read_hub_entries()
    found = []
    for name, each in hub.items():
        layout = Layout(**each.get("layout", {}))
        if "refused" not in each and name not in _NO_ORIGINAL:
            found.append(_entry(name, hub[layout.like or name]["config"], layout))
    return sorted((each for each in found if each is not None), key=lambda each: each.name)


def inputs_of(entry: Entry) -> dict[str, dict[str, Any]]:
    """Return the requests of an entry by kind: `inputs`, and `prompt`, a prompt's name."""
    plain = [
        "The cat is in the house.",
        "bank",
        "A small river of words and water, the bank of the river is 12 miles away!",
        "Is it a house?",
    ]
    long = [" ".join(["the cat of the river house is in water"] * 16), plain[0]]
    odd = [
        "Ça coûte 5 €, n'est-ce pas?",
        "自然语言 處理 テスト",
        "a\u200bb\u00a0c ﬁne Ⅳ",
        "👍🏽 e\u0301 é",
    ]
    kinds: dict[str, list[Any]] = {
        "plain": plain,
        "long": long,
        "spaces": [" the river", "the river ", "the  river  house", "the river\nhouse\tof water"],
        "case": ["The Bank Of The River", "IS IT A HOUSE?", "iPhone", plain[0]],
        "blank": ["", " ", "\n\t", plain[0]],
        "odd": odd,
        "markers": ["a [SEP] b", "the </s> cat", "<s> bank [MASK]", "house <|endoftext|> of"],
    }
    if entry.task == "generate":
        # a byte is a token: prompt and answer have to fit into the positions
        return {
            kind: {"inputs": [text[:_PROMPT_CHARACTERS] for text in kinds[kind]]}
            for kind in ("plain", "spaces", "case", "odd", "markers")
        }
    if entry.task == "rerank" or (entry.task == "classify" and _PAIRS.search(entry.name)):
        query = "Is the cat in the water?"
        kinds = {kind: [[query, each] for each in texts] for kind, texts in kinds.items()}
        kinds["long query"] = [[long[0], plain[0]], [long[0], long[0]]]
    requests: dict[str, dict[str, Any]] = {kind: {"inputs": texts} for kind, texts in kinds.items()}
    if "query" in entry.layout.prompts:
        requests["prompt"] = {"inputs": plain, "prompt": "query"}
    return requests


def write_entry(entry: Entry, folder: Path) -> None:
    """Write the checkpoint of an entry into a new folder.

    Raises:
        AttributeError, ValueError: transformers has no such model.
    """
    import transformers

    scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    write_tokenizer(scratch, entry.tokenizer, _tokenizer_settings(entry))
    tokenizer = scratch / "tokenizer.json"
    target = scratch / "target"
    target.mkdir()
    written = save_hub_checkpoint(
        target, entry.config, tokenizer, lambda name: getattr(transformers, name)
    )
    # a first release needs its own code elsewhere: all engines get the form that transformers reads
    kept = target if to_native(entry.config) is entry.config else written
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(scratch / name, kept)
    _write_modules(entry, kept)
    if kept is target:
        shutil.rmtree(written)
    kept.rename(folder)
    shutil.rmtree(scratch)


def _entry(name: str, config: dict[str, Any], layout: Layout) -> Entry | None:
    config = _with_head(config, layout)
    small = shrunk(config, VOCABULARY, _WIDTH)
    task = layout.task or _task(small, layout)
    if task is None:
        return None
    tokenizer = layout.tokenizer or _tokenizer(name, small)
    small = shrunk(config, count_tokens(tokenizer), _WIDTH)
    ids = TOKENIZERS[tokenizer].ids
    if config.get("query_pre_attn_scalar") == config.get("head_dim", -1):
        small["query_pre_attn_scalar"] = small["head_dim"]
    small |= {name: value for name, value in ids.items() if small.get(name) is not None}
    return Entry(name, task, small, layout, tokenizer)


def _with_head(config: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Return config.json with the head of a layout, and with its labels."""
    if not layout.head:
        return config
    labels = {str(index): f"LABEL_{index}" for index in range(layout.labels)}
    ids = {name: int(index) for index, name in labels.items()}
    return {**config, "architectures": [layout.head], "id2label": labels, "label2id": ids}


def _task(config: dict[str, Any], layout: Layout) -> BoardTask | None:
    architecture = (config.get("architectures") or [""])[0]
    if layout.pooling is not None:
        return "embed"
    if architecture.endswith("ForSequenceClassification"):
        return "classify"
    if architecture.endswith("ForTokenClassification"):
        return "token_classify"
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "generate"
    # encoder-decoders have tokenizers of their own, which no small file stands for
    if architecture.endswith(("ForConditionalGeneration", "MTModel")):
        return None
    return "embed"


def _tokenizer(name: str, config: dict[str, Any]) -> str:
    kind = TOKENIZER_OF.get(config["model_type"], "wordpiece")
    is_cased = "cased" in name and "uncased" not in name
    return "wordpiece-cased" if kind == "wordpiece" and is_cased else kind


def _share(length: int, layout: Layout) -> int:
    """Return a length in proportion to the small number of positions."""
    return max(8, LONGEST * length // layout.positions)


def _tokenizer_settings(entry: Entry) -> dict[str, object]:
    layout = entry.layout
    kind = TOKENIZERS[entry.tokenizer]
    has_types = entry.config["model_type"] in _WITH_TYPES and kind.types
    # releases of transformers differ in what they give without this field
    names = ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"]
    settings: dict[str, object] = {"model_input_names": names}
    if layout.model_max_length == -1:
        settings["model_max_length"] = _NO_LIMIT
    elif layout.model_max_length is not None:
        settings["model_max_length"] = _share(layout.model_max_length, layout)
    if layout.left:
        settings["padding_side"] = "left"
    if layout.pooling is not None and "pad" not in kind.tokens:
        # texts are embedded together
        settings["pad_token"] = kind.tokens["eos"]
    return settings


def _write_modules(entry: Entry, folder: Path) -> None:
    """Write the files of sentence-transformers, as its releases before 6 did."""
    layout, is_sparse = entry.layout, entry.task == "sparse_embed"
    if layout.pooling is None and not is_sparse:
        return
    names = ("hidden_size", "n_embd", "d_model", "dim")
    hidden = next(entry.config[name] for name in names if name in entry.config)
    if is_sparse:
        package, kinds = "sentence_transformers.sparse_encoder.models", ["SpladePooling"]
        settings: dict[str, object] = {
            "pooling_strategy": "max",
            "activation_function": "relu",
            "word_embedding_dimension": None,
        }
    else:
        package, kinds = "sentence_transformers.models", ["Pooling"]
        settings = _pooling(layout, hidden)
    kinds += ["Dense"] * len(layout.dense) + ["Normalize"] * layout.normalize
    places = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds, start=1))]
    types = ["MLMTransformer" if is_sparse else "Transformer", *kinds]
    modules = [
        {"idx": at, "name": str(at), "path": place, "type": f"{package}.{kind}"}
        for at, (place, kind) in enumerate(zip(places, types, strict=True))
    ]
    _write(folder / "modules.json", modules)
    _write(folder / places[1] / "config.json", settings)
    sizes = [hidden, *[_DENSE_FEATURES] * (len(layout.dense) - 1), hidden]
    for activation, place, given, made in zip(
        layout.dense, places[2:], sizes, sizes[1:], strict=False
    ):
        _write_dense(folder / place, given, made, activation, has_bias="Tanh" in activation)
    if layout.normalize:
        (folder / places[-1]).mkdir()
    options: dict[str, object] = {"do_lower_case": layout.lower}
    if layout.longest is not None:
        options["max_seq_length"] = _share(layout.longest, layout)
    _write(folder / "sentence_bert_config.json", options)
    if layout.prompts or is_sparse:
        content = {"prompts": layout.prompts, "default_prompt_name": layout.default_prompt}
        content |= {"model_type": "SparseEncoder"} if is_sparse else {}
        _write(folder / "config_sentence_transformers.json", content)


def _pooling(layout: Layout, hidden: int) -> dict[str, object]:
    tokens = "cls_token mean_tokens max_tokens lasttoken weightedmean_tokens".split()
    names = {each.partition("_")[0]: each for each in tokens}
    modes = {f"pooling_mode_{value}": key == layout.pooling for key, value in names.items()}
    return {"word_embedding_dimension": hidden, **modes, "include_prompt": layout.include_prompt}


def _write_dense(folder: Path, given: int, made: int, activation: str, *, has_bias: bool) -> None:
    import torch
    from safetensors.torch import save_file

    weights = {"linear.weight": torch.randn(made, given) * given**-0.5}
    if has_bias:
        weights["linear.bias"] = torch.randn(made) * 0.2
    content = {"in_features": given, "out_features": made, "bias": has_bias}
    _write(folder / "config.json", {**content, "activation_function": activation})
    save_file(weights, folder / "model.safetensors")


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
