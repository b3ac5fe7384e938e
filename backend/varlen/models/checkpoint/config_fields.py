"""Fields of config.json: of a family, of quantized weights, and which others are refused.

A field is declared once: its name, what it may be, and its default. A family's configuration is a frozen dataclass of
them, read field by field, in their order. See docs/decisions/0014-config-fields.md.

`quantization_config` of config.json, `compression_config` of old releases, or a file of the tool that quantized
names a method and the inputs that share a scale. Fields that would change a weight and are not served are refused.
Sources: Lin et al. 2023, arXiv:2306.00978 (AWQ); Frantar et al. 2022, arXiv:2210.17323 (GPTQ); Dettmers et al. 2023,
arXiv:2305.14314 (nf4); the fields of autoawq 0.2, gptqmodel 5, compressed-tensors 0.20 and transformers 5.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from varlen.errors import CheckpointError
from varlen.models.checkpoint import generation_config
from varlen.models.checkpoint.files import (
    ACTIVATIONS,
    HARMLESS_FIELDS,
    Json,
    check_fields,
    has_file,
    is_off,
    peek_json,
    read_choice,
    read_flag,
    read_int,
    read_layers,
    read_norm_eps,
    read_object,
    show,
)

# Fields of config.json that say how weights are quantized; files of the tools that made a folder, with their method.
FIELDS = ("quantization_config", "compression_config")
_FILES: Mapping[str, str] = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
# Names of fields in other releases.
_OLD_NAMES = {
    "w_bit": "bits",
    "q_group_size": "group_size",
    "format": "checkpoint_format",
    "version": "checkpoint_format",
    "ignored_layers": "modules_to_not_convert",
}
# By method, the fields that change no weight: of training, of kernels, and those that its tensors say too. Tools write
# fields of GPTQ for AWQ.
_OF_WORDS = (
    "zero_point sym true_sequential static_groups damp_percent damp_auto_increment dataset tokenizer model_seqlen"
    " model_name_or_path model_file_base_name block_name_to_quantize module_name_preceding_first_block batch_size"
    " pad_token_id use_cuda_fp16 use_exllama disable_exllama exllama_config max_input_length cache_block_outputs"
    " modules_in_block_to_quantize modules_to_not_convert lm_head meta backend act_group_aware mse do_fuse"
    " fuse_max_seq_len modules_to_fuse autoround_version packing_format to_quant_block_names iters lr minmax_lr"
    " nsamples seqlen amp scale_dtype low_gpu_mem_usage gradient_accumulate_steps enable_minmax_tuning"
    " enable_norm_bias_tuning enable_quanted_input model_free"
)
_HARMLESS: Mapping[str, str] = {
    "awq": _OF_WORDS,
    "gptq": _OF_WORDS,
    "compressed-tensors": "ignore quantization_status global_compression_ratio version run_compressed provider",
    "fp8": "modules_to_not_convert activation_scale_ub scale_fmt producer ignore exclude_modules kv_cache_quant_algo",
    "bitsandbytes": "bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant"
    " llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules llm_int8_threshold"
    " load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit",
}
_FIXED: Mapping[str, Mapping[str, object]] = {
    "awq": {"pack_dtype": "int32", "desc_act": False, "data_type": "int"},
    "gptq": {"pack_dtype": "int32", "is_marlin_format": False, "data_type": "int"},
    "fp8": {"fmt": "e4m3", "quant_algo": "FP8", "expert_dtype": "fp8"},
}
# Fields that are read, of any method.
_READ = (
    "quant_method bits group_size checkpoint_format desc_act dynamic format config_groups kv_cache_scheme"
    " sparsity_config transform_config activation_scheme weight_block_size extra_config "
)
_METHODS = {name: name for name in _HARMLESS}
_METHODS |= {"fbgemm_fp8": "fp8", "modelopt": "fp8", "auto-round": "gptq"}
# Layouts of auto-round.
_PACKINGS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_awq": "awq",
}
_PACKINGS |= {"auto_round:awq": "awq", "auto_round:gptq:exllamav2": "gptq"}
_CT_FORMATS = dict.fromkeys(
    "pack-quantized int-quantized float-quantized naive-quantized mixed-precision dense".split()
)
# Bits of layers that auto-round names although they stay floats.
_FLOAT_BITS = 16
# What is added to stored zero points.
_WORD_FORMATS = {"awq": {"gemm": 0}, "gptq": {"gptq": 1, "gptq_v2": 0}}

_T = TypeVar("_T")
_Config = TypeVar("_Config", bound="ConfigFields")

# Written by .ci/write_config_fields.py from the sources of the releases.
FIELDS_FILE = Path(__file__).with_name("fields_of_transformers.json")
# Fields that may change results although the releases above do not read them: earlier ones did.
_REFUSED_FIELDS = frozenset({"position_embedding_type"})
_FILE = "config.json"
# The end of a refusal that the owner of a checkpoint can override.
REMEDY = " (the setting ignore_config_fields leaves it out)"
_HIDDEN_SIZES = ("hidden_size", "d_model", "n_embd", "dim")
# Fields that say that weights are quantized; the last one is of MLX.
_QUANTIZATION_FIELDS = (*FIELDS, "quantization")


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a checkpoint are quantized.

    Attributes:
        blocks: outputs and inputs that share a scale, as they may be; 0 stands for all.
        bits: bits of codes in words, as they may be.
        zero_offset: number that is added to a stored zero point.
        floats: values beside weights that the method rounds, and this version does not.
    """

    method: str
    blocks: frozenset[tuple[int, int]]
    bits: tuple[int, ...] = ()
    zero_offset: int = 0
    is_ordered: bool = False
    floats: tuple[str, ...] = ()


def read_quantization(folder: Path) -> Quantization | None:
    """Return how a folder's weights are quantized; None if they are not.

    Raises:
        CheckpointError: the method, or a field that changes a weight, is not served.
    """
    config = peek_json(folder, "config.json")
    config = config if isinstance(config, dict) else {}
    for name in FIELDS:
        if not is_off(config.get(name)):
            return _read(config[name], f"{name} of config.json", config)
    for name, method in _FILES.items():
        if has_file(folder, name):
            given = read_object(folder, name)
            if isinstance(own := given.get("quantization"), dict):
                given = own
            return _read({"quant_method": method, **given}, name, config)
    return None


def _read(given: object, name: str, config: Json) -> Quantization:
    try:
        return _read_method(given, name, config)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; take the checkpoint that it was made of") from None


def _read_method(given: object, name: str, config: Json) -> Quantization:
    if not isinstance(given, dict):
        raise CheckpointError(f"{name} is {show(given)}; allowed: an object")
    method = given.get("quant_method")
    if method is None and any(given.get(f"load_in_{bits}bit") for bits in (4, 8)):
        method = "bitsandbytes"
    tool = str(method).lower().removeprefix("intel/")
    if tool not in _METHODS:
        raise CheckpointError(
            f"{name} has quant_method {show(method)}; allowed: {', '.join(_METHODS)}"
        )
    method = _METHODS[tool]
    if tool == "auto-round":
        given = {**given, "packing_format": given.get("packing_format") or given.get("backend")}
        method = read_choice(given, "packing_format", _PACKINGS, default="", name=name)
    if config.get("model_type") == "gpt2" and method != "gptq":
        raise CheckpointError(f"{name} has quant_method {show(method)}; allowed for a gpt2: gptq")
    is_compressed = method == "compressed-tensors"
    names = {} if is_compressed else _OLD_NAMES
    fields: Json = {names.get(str(key), str(key)): value for key, value in given.items()}
    known = (_READ + _HARMLESS[method]).split()
    check_fields(fields, name, known=known, fixed=_FIXED.get(method, {}))
    if is_compressed:
        return _compressed(fields, name)
    if method == "fp8":
        static = fields.get("activation_scheme", fields.get("quant_algo"))
        floats = ("activations",) if static is not None or "activation_scale_ub" in fields else ()
        block = fields.get("weight_block_size")
        blocks = {(0, 0), (1, 0)} if block is None else {_pair(block, "weight_block_size", name)}
        return Quantization(method, frozenset(blocks), floats=floats)
    if method == "bitsandbytes":
        floats = ("activations",) if fields.get("load_in_8bit") else ()
        return Quantization(method, frozenset({(1, 0)}), floats=floats)
    return _of_words(fields, name, method)


def _of_words(given: Json, name: str, method: str) -> Quantization:
    forms = _WORD_FORMATS[method]
    form = str(given.get("checkpoint_format") or next(iter(forms))).lower()
    offset = read_choice({"format": form}, "format", forms, default="", name=name)
    is_ordered = read_flag(given, "desc_act", default=False, name=name)
    allowed: tuple[int, ...] = (4,) if method == "awq" else (4, 8)
    blocks = set()
    for rule in _rules(given, name):
        if (bits := rule.get("bits")) not in allowed:
            raise CheckpointError(
                f"{name} has bits {show(bits)}; allowed: {' or '.join(map(str, allowed))}"
            )
        blocks.add((1, _size(rule.get("group_size", -1), "group_size", name)))
    return Quantization(method, frozenset(blocks), allowed, offset, is_ordered)


def _rules(given: Json, name: str) -> Iterator[Json]:
    """Yield the fields, and the fields of each layer that differs and is no float."""
    yield given
    for own in ("dynamic", "extra_config"):
        for layer, changed in _objects(given.get(own) or {}, own, name).items():
            if not layer.startswith("-:") and changed.get("bits") != _FLOAT_BITS:
                yield {**given, **changed}


def _objects(value: object, field: str, name: str) -> Mapping[str, Json]:
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        raise CheckpointError(f"{name} has {field} {show(value)}; allowed: objects by name")
    return value


def _compressed(given: Json, name: str) -> Quantization:
    read_choice(given, "format", _CT_FORMATS, default="dense", name=name)
    for own in ("sparsity_config", "transform_config"):
        value = given.get(own) or {}
        # writers add an object that sets nothing
        is_set = not isinstance(value, dict) or value.get("config_groups")
        if is_set or value.get("format", "dense") != "dense":
            raise CheckpointError(f"{name} has {own} {show(value)}; allowed: {{}}")
    groups = _objects(given.get("config_groups"), "config_groups", name).values()
    sides = [each.get(f"{side}_activations") for each in groups for side in ("input", "output")]
    rounded = {"activations": sides, "KV caches": [given.get("kv_cache_scheme")]}
    floats = tuple(what for what, schemes in rounded.items() if not all(map(is_off, schemes)))
    blocks = frozenset(block for each in groups for block in _blocks_of(each, name))
    return Quantization("compressed-tensors", blocks, floats=floats)


def _blocks_of(group: Json, name: str) -> Iterator[tuple[int, int]]:
    if group.get("format"):
        read_choice(group, "format", _CT_FORMATS, default="", name=name)
    weights = group.get("weights")
    if is_off(weights):
        return
    if not isinstance(weights, dict):
        raise CheckpointError(f"{name} has weights {show(weights)}; allowed: an object")
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)) or weights.get("dynamic"):
        raise CheckpointError(
            f"{name} has weights of type {show(kind)} with num_bits {show(bits)}; allowed: int with 4 or 8, float with"
            " 8, none dynamic"
        )
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "group")
    if strategy == "block":
        yield _pair(weights.get("block_structure"), "block_structure", name)
    elif strategy == "group":
        yield 1, _size(size, "group_size", name)
    else:
        scales = {"tensor": (0, 0), "channel": (1, 0)}
        yield read_choice({"strategy": strategy}, "strategy", scales, default="", name=name)


def _size(value: object, field: str, name: str) -> int:
    """Return a number of inputs that share a scale; 0 for all."""
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or value >= 1):
        raise CheckpointError(
            f"{name} has {field} {show(value)}; allowed: -1, or whole numbers from 1"
        )
    return max(value, 0)


def _pair(value: object, field: str, name: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise CheckpointError(
            f"{name} has {field} {show(value)}; allowed: two whole numbers from 1"
        )
    rows, columns = (_size(each, field, name) for each in value)
    return rows, columns


@dataclass(frozen=True, slots=True)
class FieldRules:
    """The fields of config.json that a family knows.

    Attributes:
        harmless: fields that transformers reads, and that change no logit and no hidden state.
        fixed: fields that are served with one value; null means that value too.
    """

    read: frozenset[str]
    harmless: frozenset[str]
    fixed: Mapping[str, object]

    def know(self, name: str) -> bool:
        """Return whether a field is read, or changes no result, whatever its value is."""
        return name in self.read or name in self.harmless or is_dropout(name)

    def plus(
        self,
        read: Iterable[str] = (),
        harmless: Iterable[str] = (),
        fixed: Mapping[str, object] | None = None,
    ) -> "FieldRules":
        """Return these rules with more fields; what is fixed is neither read nor harmless."""
        fixed = fixed or {}
        return FieldRules(
            self.read.union(read) - fixed.keys(),
            self.harmless.union(harmless) - fixed.keys(),
            {**self.fixed, **fixed},
        )


_READ_ALWAYS = frozenset(("architectures", "model_type"))

# Releases of transformers before 5 save the defaults of generation in every config.json; an encoder generates nothing.
ENCODER = FieldRules(
    _READ_ALWAYS | {"id2label", "num_labels"}, HARMLESS_FIELDS | generation_config.ALL_FIELDS, {}
)
# See docs/decisions/0017-decoder-checkpoints.md. Releases before 5 also kept the fields of generation_config.json here.
DECODER = FieldRules(
    _READ_ALWAYS | {"is_causal"},
    HARMLESS_FIELDS
    | generation_config.REQUEST_FIELDS
    | generation_config.HARMLESS_FIELDS
    # a decoder is one either way; only a classifier reads labels
    | {"id2label", "is_decoder", "num_labels", "prefix"},
    {
        **generation_config.FIXED_FIELDS,
        "add_cross_attention": False,
        "is_encoder_decoder": False,
        "pruned_heads": {},
    },
)
# Fields of generation are read where there is no generation_config.json; see `generation_config`.
ENCODER_DECODER = FieldRules(
    _READ_ALWAYS,
    HARMLESS_FIELDS | generation_config.TRANSLATE_FIELDS | {"prefix"},
    {
        "add_cross_attention": False,
        "is_decoder": False,
        "is_encoder_decoder": True,
        "pruned_heads": {},
    },
)


@dataclass(frozen=True, slots=True)
class IgnoredFields:
    """Fields of a config.json that a load leaves out.

    Attributes:
        unread: fields that no release of transformers reads.
        by_setting: fields that the setting `ignore_config_fields` names.
    """

    unread: tuple[str, ...]
    by_setting: tuple[str, ...]

    def note(self) -> str:
        """Return a sentence about them, empty if there are none."""
        if not self.unread and not self.by_setting:
            return ""
        first, last = (release.rpartition(".")[0] for release in releases())
        reasons = (
            (self.unread, f"read by no release of transformers from {first} to {last}"),
            (self.by_setting, "named by ignore_config_fields"),
        )
        parts = [f"{', '.join(names)} ({reason})" for names, reason in reasons if names]
        return f"fields of {_FILE} that are ignored: {'; '.join(parts)}"


def check_unquantized(config: Json) -> None:
    """Raise CheckpointError if config.json says that the weights are quantized."""
    for name in _QUANTIZATION_FIELDS:
        if not is_off(config.get(name)):
            raise CheckpointError(
                f"{_FILE} has {name}, which is not served, and ignore_config_fields cannot make floats of"
                " quantized weights: take the checkpoint that they were made of"
            )


def check_known(config: Json, rules: FieldRules) -> None:
    """Raise CheckpointError for a field of config.json that would change results and is not served."""
    if not is_off(config.get("auto_map")):
        raise CheckpointError(
            f"{_FILE} has auto_map, which names code of the checkpoint; such code never runs, and another model may"
            f" need it{REMEDY}"
        )
    known = [
        name
        for name, value in config.items()
        if rules.know(name) or _is_hidden_size(name, value, config)
    ]
    check_fields(config, _FILE, known=known, fixed=rules.fixed, remedy=REMEDY)


def unread_fields(config: Json, rules: FieldRules) -> tuple[str, ...]:
    """Return the fields of config.json that neither varlen nor a listed release of transformers reads."""
    checked = {*rules.fixed, *_QUANTIZATION_FIELDS}
    return tuple(
        name
        for name, value in config.items()
        if not (rules.know(name) or name in checked or is_off(value))
        and is_unread(name, config["model_type"])
    )


def is_dropout(name: str) -> bool:
    """Return whether a field sets dropout, which only training applies."""
    return "dropout" in name or name.endswith(("pdrop", "layerdrop"))


def _is_hidden_size(name: str, value: object, config: Json) -> bool:
    """Return whether a field says that embeddings have the width of layers."""
    return name == "embedding_size" and value in [config.get(each) for each in _HIDDEN_SIZES]


def without(config: Json, names: Collection[str]) -> Json:
    """Return a config.json without some fields."""
    return {name: value for name, value in config.items() if name not in names}


def check_ignored(names: Collection[str], rules: FieldRules) -> None:
    """Raise CheckpointError if `ignore_config_fields` names a field that no load refuses as such."""
    for name in names:
        if rules.know(name):
            raise CheckpointError(
                f"ignore_config_fields names {name}, which varlen knows: correct it in {_FILE}, or leave it out of the"
                " setting"
            )


def is_unread(field: str, model_type: str) -> bool:
    """Return whether no listed release reads a field for this `model_type`."""
    return field not in fields_read("shared") | fields_read(model_type) | _REFUSED_FIELDS


def releases() -> list[str]:
    """Return the first and the last release of transformers that is listed."""
    return _content()["releases"].split()


@cache
def fields_read(family: str) -> frozenset[str]:
    """Return the fields read for a `model_type`, or for every one (`shared`)."""
    return frozenset(_content()[family].split())


@cache
def _content() -> dict[str, str]:
    content: dict[str, str] = json.loads(FIELDS_FILE.read_text(encoding="utf-8"))
    return content


class ConfigFields:
    """What config.json says of a model: a frozen dataclass of declared fields.

    See `ModelSizes` for those that every family declares.
    """

    hidden: int
    positions: int

    @property
    def uncounted_token(self) -> int | None:
        return None

    @classmethod
    def names(cls) -> frozenset[str]:
        return frozenset(name for each in fields(cls) for name in each.metadata["names"])  # type: ignore[arg-type]  # of a dataclass

    @classmethod
    def read(cls: type[_Config], config: Json) -> _Config:
        """Return the fields; raise CheckpointError for a configuration that is not served."""
        return cls(**{each.name: each.metadata["read"](config) for each in fields(cls)})  # type: ignore[arg-type]  # of a dataclass


def computed(read: Callable[[Json], _T], *names: str) -> _T:
    """Declare what a function makes of config.json.

    Args:
        read: the function; raises CheckpointError for what is not served.
        names: fields that it reads, unless they are declared already.
    """
    declared: Any = field(metadata={"read": read, "names": names})
    return declared  # type: ignore[no-any-return]


def size(name: str, default: int | None = None) -> int:
    """Declare a whole number from 1."""
    return computed(lambda config: read_int(config, name, default=default), name)


def layers(name: str, *, lowest: int = 1) -> int:
    """Declare a number of layers."""
    return computed(lambda config: read_layers(config, name, lowest=lowest), name)


def flag(name: str, *, default: bool = False) -> bool:
    """Declare a boolean."""
    return computed(lambda config: read_flag(config, name, default=default), name)


def choice(name: str, choices: Mapping[str, _T], default: str) -> _T:
    """Declare one of several words, each with its meaning."""
    return computed(lambda config: read_choice(config, name, choices, default=default), name)


def activation(name: str, default: str = "gelu") -> Any:
    """Declare an activation, by transformers' name."""
    return choice(name, ACTIVATIONS, default)


def epsilon(name: str, default: float) -> float:
    """Declare the epsilon of norms."""
    return computed(lambda config: read_norm_eps(config, name, default=default), name)
