"""How the weights of a checkpoint are quantized, as its configuration says.

`quantization_config` of config.json, `compression_config` of old releases, or a file of the tool that quantized
names a method and the inputs that share a scale. Fields that would change a weight and are not served are refused.
Sources: Lin et al. 2023, arXiv:2306.00978 (AWQ); Frantar et al. 2022, arXiv:2210.17323 (GPTQ); Dettmers et al. 2023,
arXiv:2305.14314 (nf4); the fields of autoawq 0.2, gptqmodel 5, compressed-tensors 0.20 and transformers 5.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import (
    Json,
    check_fields,
    has_file,
    is_off,
    peek_json,
    read_choice,
    read_flag,
    read_object,
    show,
)

# Fields of config.json that hold it, and files of the tools that made a folder, with their method.
FIELDS = ("quantization_config", "compression_config")
_FILES: Mapping[str, str] = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_UNQUANTIZED = "take the checkpoint that it was made of"
# Names of fields in other releases.
_OLD_NAMES = {
    "w_bit": "bits",
    "q_group_size": "group_size",
    "format": "checkpoint_format",
    "version": "checkpoint_format",
    "ignored_layers": "modules_to_not_convert",
}
# By method, the fields that change no weight: of training, of kernels, and those that its tensors say too.
_HARMLESS: Mapping[str, str] = {
    "awq": "modules_to_not_convert lm_head do_fuse fuse_max_seq_len modules_to_fuse exllama_config backend zero_point"
    " sym true_sequential damp_percent meta model_name_or_path model_file_base_name",
    "gptq": "sym true_sequential static_groups damp_percent damp_auto_increment dataset tokenizer model_seqlen"
    " model_name_or_path model_file_base_name block_name_to_quantize module_name_preceding_first_block batch_size"
    " pad_token_id use_cuda_fp16 use_exllama disable_exllama exllama_config max_input_length cache_block_outputs"
    " modules_in_block_to_quantize modules_to_not_convert lm_head meta backend act_group_aware mse",
    "compressed-tensors": "ignore quantization_status global_compression_ratio version run_compressed",
    "fp8": "modules_to_not_convert activation_scale_ub",
    "bitsandbytes": "bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type bnb_4bit_use_double_quant"
    " llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules llm_int8_threshold"
    " load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit",
}
_FIXED: Mapping[str, Mapping[str, object]] = {
    "awq": {"pack_dtype": "int32", "desc_act": False},
    "gptq": {"pack_dtype": "int32", "is_marlin_format": False},
    "fp8": {"fmt": "e4m3"},
}
# Fields that are read, of any method.
_READ = (
    "quant_method bits group_size checkpoint_format desc_act dynamic format config_groups kv_cache_scheme"
    " sparsity_config transform_config activation_scheme weight_block_size "
)
_METHODS = {**{name: name for name in _HARMLESS}, "fbgemm_fp8": "fp8"}
_CT_FORMATS = dict.fromkeys(
    "pack-quantized int-quantized float-quantized naive-quantized mixed-precision dense".split()
)
# What is added to stored zero points.
_WORD_FORMATS = {"awq": {"gemm": 0}, "gptq": {"gptq": 1, "gptq_v2": 0}}


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a checkpoint are quantized.

    Attributes:
        blocks: outputs and inputs that share a scale, as they may be; 0 stands for all.
        bits: bits of a code; None where the tensors say it.
        zero_offset: number that is added to a stored zero point.
        floats: values beside weights that the method rounds, and this version does not.
    """

    method: str
    blocks: frozenset[tuple[int, int]]
    bits: int | None = None
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
    for field in FIELDS:
        if not is_off(config.get(field)):
            return _read(config[field], f"{field} of config.json", config)
    for name, method in _FILES.items():
        if has_file(folder, name):
            return _read({"quant_method": method, **read_object(folder, name)}, name, config)
    return None


def _read(given: object, name: str, config: Json) -> Quantization:
    if not isinstance(given, dict):
        raise CheckpointError(f"{name} is {show(given)}; allowed: an object")
    method = given.get("quant_method")
    if method is None and any(given.get(f"load_in_{bits}bit") for bits in (4, 8)):
        method = "bitsandbytes"
    if not isinstance(method, str) or method.lower() not in _METHODS:
        raise CheckpointError(
            f"{name} has quant_method {show(method)}; allowed: {', '.join(_METHODS)}; {_UNQUANTIZED}"
        )
    method = _METHODS[method.lower()]
    if config.get("model_type") == "gpt2" and method != "gptq":
        raise CheckpointError(
            f"{name} has quant_method {show(method)}; allowed for a gpt2: gptq; {_UNQUANTIZED}"
        )
    is_compressed = method == "compressed-tensors"
    names = {} if is_compressed else _OLD_NAMES
    fields: Json = {names.get(str(key), str(key)): value for key, value in given.items()}
    known = (_READ + _HARMLESS[method]).split()
    check_fields(
        fields, name, known=known, fixed=_FIXED.get(method, {}), remedy=f"; {_UNQUANTIZED}"
    )
    if is_compressed:
        return _compressed(fields, name)
    if method == "fp8":
        static = fields.get("activation_scheme")
        floats = ("activations",) if static is not None or "activation_scale_ub" in fields else ()
        block = fields.get("weight_block_size")
        blocks = {(0, 0), (1, 0)} if block is None else {_pair(block, "weight_block_size", name)}
        return Quantization(method, frozenset(blocks), floats=floats)
    if method == "bitsandbytes":
        floats = ("activations",) if fields.get("load_in_8bit") else ()
        return Quantization(method, frozenset({(1, 0)}), floats=floats)
    return _of_words(fields, name, method)


def _of_words(given: Json, name: str, method: str) -> Quantization:
    bits, allowed = given.get("bits"), (4,) if method == "awq" else (4, 8)
    if bits not in allowed or isinstance(bits, bool):
        raise CheckpointError(
            f"{name} has bits {show(bits)}; allowed: {' or '.join(map(str, allowed))}; {_UNQUANTIZED}"
        )
    forms = _WORD_FORMATS[method]
    form = str(given.get("checkpoint_format") or next(iter(forms))).lower()
    offset = read_choice({"format": form}, "format", forms, default="", name=name)
    changed = given.get("dynamic") or {}
    if not isinstance(changed, dict) or not all(each.startswith("-:") for each in changed):
        raise CheckpointError(
            f"{name} has dynamic {show(changed)}, layers of other bits; allowed: layers that stay floats;"
            f" {_UNQUANTIZED}"
        )
    group = _size(given.get("group_size", -1), "group_size", name)
    is_ordered = read_flag(given, "desc_act", default=False, name=name)
    return Quantization(method, frozenset({(1, group)}), bits, offset, is_ordered)


def _compressed(given: Json, name: str) -> Quantization:
    read_choice(given, "format", _CT_FORMATS, default="dense", name=name)
    for field in ("sparsity_config", "transform_config"):
        value = given.get(field) or {}
        # writers add an object that sets nothing
        is_set = not isinstance(value, dict) or value.get("config_groups")
        if is_set or value.get("format", "dense") != "dense":
            raise CheckpointError(
                f"{name} has {field} {show(value)}; allowed: {{}}; {_UNQUANTIZED}"
            )
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(each, dict) for each in groups.values()):
        raise CheckpointError(f"{name} has config_groups {show(groups)}; allowed: objects by name")
    sides = [
        each.get(f"{side}_activations") for each in groups.values() for side in ("input", "output")
    ]
    rounded = {"activations": sides, "KV caches": [given.get("kv_cache_scheme")]}
    floats = tuple(what for what, schemes in rounded.items() if not all(map(is_off, schemes)))
    blocks = frozenset(block for each in groups.values() for block in _blocks_of(each, name))
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
            f" 8, none dynamic; {_UNQUANTIZED}"
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
