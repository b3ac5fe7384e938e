"""Makes a checkpoint of a GGUF file: config.json, tokenizer and weights, as transformers names them.

Quantized tensors are widened to bf16, a part at a time; floats stay. llama.cpp has names of its own, puts the two
values that a rotary position turns side by side in Llama, and adds 1 to the norms of Gemma.
llama.cpp's package gguf widens blocks; the reader of files is our own, since the package's believes every count.
Source: docs/gguf.md of ggml; convert_hf_to_gguf.py and llama-vocab.cpp of llama.cpp.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import TOKENIZER, Json
from varlen.models.checkpoint.folder_forms import ORIGINAL
from varlen.models.checkpoint.quantized_tensors import BYTES
from varlen.models.checkpoint.weights import SINGLE
from varlen_tools.messages import one_line

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

Bytes: TypeAlias = npt.NDArray[np.uint8]

# Names of the parts of a model, and of its layers.
_LLAMA = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in ("q", "k", "v", "qkv")},
    **{f"attn_{each}_norm": f"self_attn.{each}_norm" for each in ("q", "k")},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")},
}
_GEMMA2 = {
    **_LLAMA,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# By architecture.
_FAMILIES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "gemma"), _LLAMA),
    "phi3": {**_LLAMA, "ffn_up": "mlp.gate_up_proj"},
    **dict.fromkeys(("gemma2", "gemma3"), _GEMMA2),
}
# Layers of the largest Gemma 2 and 3, whose scores have another scale.
_LARGEST = {"gemma2": 46, "gemma3": 62}
# Factors of rotary positions, which config.json has.
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_ORIGINAL_LENGTH = "original_max_position_embeddings"
# Types of a token.
_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
# Tokens that end an answer; a file may name others.
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
# Tokens of Phi-3 that keep white space behind them.
_UNSTRIPPED = ("<s>", "<|endoftext|>")
# Longest piece that merges make, in characters.
_LONGEST_PIECE = 256
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Parts of texts that are tokenized alone, by tokenizer.ggml.pre. GPT-2's pattern splits them for SmolLM and GPT-2.
_PATTERNS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _LLAMA3.replace("{1,3}", "")),
    "smollm": r"\p{N}",
    "gpt-2": "",
}


# The largest vocabularies with their merges take 20 MB.
_MOST_HEADER_BYTES = 64 << 20
_MOST_DIMENSIONS, _MOST_ALIGNMENT = 4, 1 << 16
# Types of metadata: numbers, texts, arrays of either.
_NUMBERS = {
    **dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"))),
    **dict(enumerate(("<u8", "<i8", "<f8"), 10)),
}
_TEXT, _ARRAY = 8, 9
# Bytes that are widened at once.
_PART = 1 << 21


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        shape: sizes as in torch, rows first.
        data: `[rows, bytes]`, which are read from the file when they are used.
    """

    kind: "GGMLQuantizationType"
    shape: list[int]
    data: Bytes

    @property
    def dtype(self) -> str:
        """Dtype of the widened tensor, as safetensors names it; floats stay."""
        return self.kind.name if self.kind.name in ("F32", "F16") else "BF16"

    @property
    def size(self) -> int:
        """Bytes of the widened tensor."""
        return BYTES[self.dtype] * prod(self.shape)

    def widened(self) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the values in parts of whole rows."""
        from gguf.quants import dequantize

        rows = max(_PART // self.data.shape[1], 1)
        for begin in range(0, len(self.data), rows):
            yield dequantize(np.ascontiguousarray(self.data[begin : begin + rows]), self.kind)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The content of a file; arrays of numbers are numpy's."""

    name: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The model's family, as llama.cpp names it."""
        return str(self.metadata.get("general.architecture"))

    def refusal(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.name} has {what}; {ORIGINAL}")

    def number(self, name: str, default: float | None = None) -> Any:
        """Return a number of the architecture; raise CheckpointError without one."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        # some models have an array of numbers, one for each layer
        if type(value) not in (int, float):
            raise self.refusal(f"{name} {value!r}, not a number for all layers")
        return value

    def rule(self, name: str, default: Any = None) -> Any:
        """Return a part of the tokenizer."""
        return self.metadata.get(f"tokenizer.ggml.{name}", default)

    def token(self, name: str) -> str | None:
        """Return the text of a special token, such as `bos`."""
        number = self.rule(f"{name}_token_id")
        return None if number is None else self.rule("tokens")[number]


def read_gguf(path: Path) -> GgufFile:
    """Return the content of a file; its tensors are not read yet.

    Raises:
        CheckpointError: it is damaged, or has a type of tensors that is not read, or the package gguf is missing.
    """
    try:
        return _read(path.name, np.memmap(path, np.uint8, "r"))
    except ModuleNotFoundError:
        raise CheckpointError(
            f"{path.name} can be read with gguf: pip install gguf, then fetch again"
        ) from None
    # what is made of a damaged file raises anything
    except Exception as error:
        raise CheckpointError(
            f"{path.name} cannot be read ({one_line(error)}): download it again, or take another, such as Q4_K_M"
        ) from None


def _read(name: str, data: Bytes) -> GgufFile:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    reader = _Reader(data)
    magic, version = bytes(reader.take(4)), reader.number("<u4")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it begins with {magic!r} and {version}; allowed: b'GGUF' and 2 or 3")
    num_tensors, num_fields = reader.number("<u8"), reader.number("<u8")
    # both loops end where the file ends
    metadata = {reader.text(): reader.value(reader.number("<u4")) for _ in range(num_fields)}
    found = []
    for _ in range(num_tensors):
        tensor, dimensions = reader.text(), reader.number("<u4")
        if not 0 < dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"{tensor} has {dimensions} dimensions")
        shape = reader.numbers("<u8", dimensions)[::-1].tolist()
        found.append(
            (tensor, shape, GGMLQuantizationType(reader.number("<u4")), reader.number("<u8"))
        )
    begin = reader.at + -reader.at % min(
        int(metadata.get("general.alignment", 32)), _MOST_ALIGNMENT
    )
    tensors: dict[str, GgufTensor] = {}
    left = len(data) - begin
    for tensor, shape, kind, offset in found:
        values, size = GGML_QUANT_SIZES[kind]
        # whether it is widened
        dequantize(np.zeros((1, size), np.uint8), kind)
        row = shape[-1] // values * size
        size, start = prod(shape[:-1]) * row, begin + offset
        # tensors that share bytes could become any number of times as large as the file
        left -= size
        if not size or shape[-1] % values or min(left, len(data) - start - size) < 0:
            raise ValueError(f"{tensor} of {shape} {kind.name} is not in {len(data)} bytes")
        tensors[tensor] = GgufTensor(kind, shape, data[start : start + size].reshape(-1, row))
    return GgufFile(name, metadata, tensors)


class _Reader:
    def __init__(self, data: Bytes) -> None:
        self._data = data
        self.at = 0

    def take(self, size: int) -> Bytes:
        begin, self.at = self.at, self.at + size
        if self.at > min(len(self._data), _MOST_HEADER_BYTES):
            raise ValueError(
                f"{len(self._data)} bytes end within the metadata, or they are too many"
            )
        return self._data[begin : self.at]

    def numbers(self, dtype: str, count: int) -> Any:
        return self.take(np.dtype(dtype).itemsize * count).view(dtype)

    def number(self, dtype: str) -> Any:
        return self.numbers(dtype, 1)[0].item()

    def text(self) -> str:
        return bytes(self.take(self.number("<u8"))).decode()

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        kind, count = self.number("<u4"), self.number("<u8")
        if kind == _TEXT:
            return [self.text() for _ in range(count)]
        return self.numbers(_NUMBERS[kind], count)


def convert_gguf(path: Path, into: Path, report: Callable[[str], object]) -> None:
    """Write a checkpoint folder.

    Args:
        report: function that shows what the file holds, before anything is written.

    Raises:
        CheckpointError: the file is damaged, or of a kind that is not served, or does not fit the disk.
    """
    source = read_gguf(path)
    if (count := source.metadata.get("split.count", 1)) != 1:
        raise CheckpointError(
            f"{source.name} is one of {count} files; join them: llama-gguf-split --merge FIRST.gguf WHOLE.gguf"
        )
    if source.architecture not in _FAMILIES:
        raise source.refusal(
            f"the architecture {source.architecture}, not one of {', '.join(_FAMILIES)}"
        )
    try:
        config, tokenizer = _read_config(source), _read_tokenizer(source)
        weights, texts = _rename(source, config), _json_files(source, config)
    except CheckpointError:
        raise
    # what is made of damaged metadata raises anything
    except Exception as error:
        raise source.refusal(f"damaged metadata ({one_line(error)})") from None
    tensors, size = source.tensors.values(), sum(each.size for each in weights.values())
    bits = 8 * sum(each.data.nbytes for each in tensors) / sum(prod(each.shape) for each in tensors)
    report(
        f"{source.name}: {source.architecture}, {', '.join(sorted({each.kind.name for each in tensors}))},"
        f" {bits:.1f} bits a weight; its checkpoint has {size / 1e6:.1f} MB"
    )
    if size > (free := shutil.disk_usage(into).free):
        raise CheckpointError(
            f"{into} has {free / 1e6:.1f} MB free; needed are {size / 1e6:.1f} MB"
        )
    tokenizer.save(str(into / TOKENIZER))
    for name, text in texts.items():
        (into / name).write_text(text, encoding="utf-8")
    _write_weights(into / SINGLE, weights, adds_one=source.architecture.startswith("gemma"))


def _read_config(source: GgufFile) -> Json:
    number, tensors, architecture = source.number, source.tensors, source.architecture
    hidden, heads = number("embedding_length"), number("attention.head_count")
    size, positions = number("attention.key_length", hidden // heads), number("context_length")
    if number("attention.value_length", size) != size:
        raise source.refusal("keys and values of different sizes")
    if number("expert_count", 0) or number("pooling_type", 0):
        raise source.refusal("experts, or vectors for its answers")
    config: Json = {
        "model_type": "gemma3_text" if architecture == "gemma3" else architecture,
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": size,
        "max_position_embeddings": positions,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base", 1e4),
        "rope_scaling": _rope_scaling(source, positions),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if architecture == "phi3":
        config["partial_rotary_factor"] = number("rope.dimension_count", size) / size
        config["sliding_window"] = number("attention.sliding_window", 0) or None
        config[_ORIGINAL_LENGTH] = number("rope.scaling.original_context_length", positions)
    if architecture in _LARGEST:
        is_largest = config["num_hidden_layers"] == _LARGEST[architecture]
        config["sliding_window"] = number("attention.sliding_window")
        config["query_pre_attn_scalar"] = hidden // heads if is_largest else size
    return config


def _rope_scaling(source: GgufFile, positions: int) -> Json | None:
    number, tensors = source.number, source.tensors
    kind = source.metadata.get(f"{source.architecture}.rope.scaling.type", "none")
    factors = [
        next(tensors[each].widened()).ravel().tolist() for each in _FACTORS if each in tensors
    ]
    if factors:
        return {
            "rope_type": "longrope",
            "short_factor": factors[0],
            "long_factor": factors[-1],
            "attention_factor": number("rope.scaling.attn_factor", 1.0),
            # Llama 3 has one list for all lengths, and Phi-3 the field beside this one
            _ORIGINAL_LENGTH: positions,
        }
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise source.refusal(f"scaled positions of the type {kind}, not linear or yarn")
    scaling: Json = {"rope_type": kind, "factor": number("rope.scaling.factor")}
    if kind == "yarn":
        scaling[_ORIGINAL_LENGTH] = number("rope.scaling.original_context_length", positions)
    return scaling


def _rename(source: GgufFile, config: Json) -> dict[str, GgufTensor]:
    """Return the tensors by transformers' names, with its order of rows."""
    renamed = {}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in source.tensors.items():
        # such as blk.0.attn_q.weight
        *layer, part, kind = name.split(".")
        own = _FAMILIES[source.architecture].get(part)
        data = tensor.data
        if source.architecture == "llama" and part in heads:
            # the first values of all pairs of a head come before the second ones
            halves = data.reshape(heads[part], tensor.shape[0] // heads[part] // 2, 2, -1)
            data = halves.swapaxes(1, 2).reshape(data.shape)
        if own is not None:
            path = [*(("model.layers", *layer[1:]) if layer else ()), own, kind]
            renamed[".".join(path)] = replace(tensor, data=data)
        elif name not in _FACTORS:
            raise source.refusal(f"the tensor {name}, which {source.architecture} has not")
    return renamed


def _write_weights(path: Path, weights: Mapping[str, GgufTensor], *, adds_one: bool) -> None:
    import torch

    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    header: Json = {}
    end = 0
    # the largest numbers first, so that all are aligned
    ordered = sorted(weights.items(), key=lambda each: -BYTES[each[1].dtype])
    for name, tensor in ordered:
        begin, end = end, end + tensor.size
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in ordered:
            less = 1 if adds_one and name.endswith("norm.weight") else 0
            for part in tensor.widened():
                values = torch.from_numpy(part - less).to(kinds[tensor.dtype])
                file.write(values.view(torch.uint8).numpy().data)


def _json_files(source: GgufFile, config: Json) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{name}_token": source.token(each) for name, each in names.items()}
    ends = {source.token("eos"), source.token("eot"), *_ENDS}
    types = zip(source.rule("tokens"), source.rule("token_type"), strict=True)
    stops = [
        number for number, (token, kind) in enumerate(types) if token in ends and kind == _CONTROL
    ]
    found: dict[str, Json] = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": stops},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **special},
    }
    texts = {name: json.dumps(content) for name, content in found.items()}
    template = source.metadata.get("tokenizer.chat_template")
    return texts if template is None else {**texts, "chat_template.jinja": str(template)}


def _read_tokenizer(source: GgufFile) -> Tokenizer:
    kind, rules, tokens = (source.rule(each, "") for each in ("model", "pre", "tokens"))
    if kind != "llama" and (kind != "gpt2" or rules not in _PATTERNS):
        raise source.refusal(
            f"a tokenizer {kind} with the rules {rules}; allowed: llama, and gpt2 with {', '.join(_PATTERNS)}"
        )
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = _pieces(source, ids) if kind == "llama" else _byte_pairs(source, ids, rules)
    # the template of Phi-3 has white space after tokens, which it does not mean
    strips = source.architecture == "phi3"
    special, others = (
        [
            AddedToken(token, rstrip=strips and token not in _UNSTRIPPED, normalized=False)
            for token, each in zip(tokens, source.rule("token_type"), strict=True)
            if each == wanted
        ]
        for wanted in (_CONTROL, _USER)
    )
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(others)
    defaults = {"bos": kind == "llama" or rules.startswith("llama"), "eos": False}
    first, last = (
        [token]
        if (token := source.token(name)) and source.rule(f"add_{name}_token", default)
        else []
        for name, default in defaults.items()
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        special_tokens=[(each, tokens.index(each)) for each in first + last],
    )
    return tokenizer


def _byte_pairs(source: GgufFile, ids: dict[str, int], rules: str) -> Tokenizer:
    pattern = _PATTERNS[rules]
    merges = [(*each.split(" "),) for each in source.rule("merges", [])]
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=rules.startswith("llama")))
    if source.architecture.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="(?" not in pattern)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, last])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pieces(source: GgufFile, ids: dict[str, int]) -> Tokenizer:
    """Return a tokenizer of the byte pairs of SentencePiece, whose scores order the merges."""
    kinds, scores = source.rule("token_type"), source.rule("scores")
    pieces = {
        token
        for token, number in ids.items()
        if kinds[number] == _NORMAL and len(token) <= _LONGEST_PIECE
    }
    pairs = (
        (-scores[ids[token]], ids[token], (token[:cut], token[cut:]))
        for token in pieces
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    )
    unknown = next((token for token, number in ids.items() if kinds[number] == _UNKNOWN), None)
    merges = [pair for _, _, pair in sorted(pairs)]
    tokenizer = Tokenizer(
        models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    marks: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    steps: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if source.rule("add_space_prefix", True):
        marks.insert(0, normalizers.Prepend("▁"))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(marks)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
