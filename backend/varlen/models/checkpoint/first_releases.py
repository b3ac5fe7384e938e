"""config.json of models with code of their own, in the fields of transformers 5.

No code of a checkpoint runs, which `auto_map` names: the fields that it read are translated, and those that change its
results in another way are refused.
Source: nomic-ai/nomic-bert-2048, Alibaba-NLP/new-impl, jinaai/jina-bert-implementation and
xlm-roberta-flash-implementation, nvidia/llama-nemotron-embed-1b-v2 and -rerank-1b-v2 (with the text of a pair from its
model card), Alibaba-NLP/gte-Qwen2-1.5B-instruct, voyageai/voyage-4-nano and perplexity-ai/pplx-embed-v1-0.6b on the
Hugging Face hub; Phi-3, whose files still name code that transformers has.
"""

import re
from collections.abc import Mapping

from varlen.errors import CheckpointError
from varlen.models.checkpoint.config_fields import REMEDY, without
from varlen.models.checkpoint.files import (
    Json,
    check_fields,
    read_choice,
    read_int,
    read_num_labels,
    read_number,
    show,
)
from varlen.models.checkpoint.weights import ADAPTER_FIELDS

_FILE = "config.json"

_NOMIC_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
# What its code takes where a field is absent.
_NOMIC_DEFAULTS: Json = {
    "layer_norm_epsilon": 1e-5,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "n_positions": 1024,
    "qkv_proj_bias": True,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 0.0,
}
_NOMIC_FIXED: Mapping[str, object] = {
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "num_heads_kv": None,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_head_dim": False,
    "use_rms_norm": False,
}
# The same where some layers have experts.
_NOMIC_MOE_FIXED: Mapping[str, object] = {
    **_NOMIC_FIXED,
    "expert_choice_router": False,
    "ffn_div": 1,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_normalize_expert_weights": False,
    "num_shared_experts": 0,
    "qkv_proj_bias": True,
}
_NOMIC_EXPERTS = ("moe_every_n_layers", "moe_top_k", "num_experts")
_NOMIC_GATES = {"swiglu": "silu", "geglu": "gelu"}
_NOMIC_PLAIN = {"gelu": "gelu"}
# Its code rounds the features between the two linear layers of a part with a gate up.
_NOMIC_INNER_MULTIPLE = 256
_NOMIC_READ = {
    "activation_function",
    "max_trained_positions",
    "n_inner",
    "n_positions",
    "pad_vocab_size_multiple",
    "rotary_scaling_factor",
}
_NOMIC_HARMLESS = frozenset(
    # of a head that is not served
    "summary_activation summary_proj_to_labels summary_type summary_use_proj"
    # another order of the same sums, or left over from GPT-2
    " dense_seq_output fused_bias_fc fused_dropout_add_ln last_layer_subset n_ctx parallel_block_tied_norm"
    " reorder_and_upcast_attn scale_attn_by_inverse_layer_idx scale_attn_weights use_flash_attn use_xentropy"
    # of experts: how its code runs, and training
    " moe_impl moe_resid_pdrop router_aux_loss_coef".split()
)

_GTE_DEFAULTS: Json = {"max_position_embeddings": 2048, "type_vocab_size": 1}
_GTE_FIXED: Mapping[str, object] = {
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "pack_qkv": True,
    "position_embedding_type": "rope",
}
_GTE_HARMLESS = frozenset(
    "logn_attention_clip1 matryoshka_dimensions unpad_inputs use_memory_efficient_attention".split()
)

# Feed-forward parts of JinaBERT with a gate, and the activation of that gate.
_JINA_BERT_GATES = {"geglu": "gelu", "reglu": "relu"}
_JINA_BERT_FIXED: Mapping[str, object] = {"position_embedding_type": "alibi"}
# What its own method `encode` reads, and a limit that its tokenizer has too.
_JINA_BERT_HARMLESS = ("emb_pooler", "model_max_length")

# XLM-RoBERTa of Jina, with a position table or rotary positions.
_JINA_XLM_FIXED: Mapping[str, object] = {"truncate_dim": None}
_JINA_XLM_HARMLESS = frozenset(
    # training and prompts, and how its code runs
    "emb_pooler load_trained_adapters lora_dropout_p lora_main_params_trainable matryoshka_dimensions output_past"
    " task_instructions use_flash_attn use_reentrant".split()
)
_JINA_XLM_TYPES = {"absolute": "xlm-roberta", "rotary": "jina_embeddings_v3"}

_GTE_FORM = frozenset({"layer_norm_type", "pack_qkv"})
# Fields of Phi-4-mini, with the values of the arithmetic that transformers has.
_PHI3_FIXED: Mapping[str, object] = {
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
}
# Texts of tokens, which the files of the tokenizer have too.
_TOKENS = ("bos_token", "eos_token", "mask_token", "pad_token")
_BIDIRECTIONAL = "use_bidirectional_attention"
# What the model card of NVIDIA's reranker puts in front of a query and of a document.
_QUESTION_AND_PASSAGE = ("question:", " \n \n passage:")


def to_native(config: Json) -> Json:
    """Return a config.json in the fields of transformers 5, unchanged if it has them.

    Raises:
        CheckpointError: it asks for a variant that transformers 5 does not have, or its fields disagree.
    """
    kind, fields = config.get("model_type"), config.keys()
    # the first form that it has
    forms = (
        (_nomic, kind == "nomic_bert" and fields & {*_NOMIC_NAMES, *_NOMIC_READ}),
        (_gte, kind == "new" or (kind == "gte" and fields & {"auto_map", *_GTE_FORM})),
        (_llama, kind == "llama_bidirec"),
        (
            _qwen2,
            kind == "qwen2" and config.get("auto_map") and config.get("is_causal") is not None,
        ),
        (_qwen3, kind == "bidirectional_pplx_qwen3"),
        (_qwen3, kind == "qwen3" and config.get(_BIDIRECTIONAL)),
        (_jina_bert, kind == "bert" and "feed_forward_type" in fields),
        (_jina_xlm, kind == "xlm-roberta" and {"auto_map", "use_flash_attn"} <= fields),
        (_eurobert, kind == "eurobert" and fields & {"auto_map", "clf_pooling"}),
        (_phi3, kind == "phi3" and "auto_map" in fields),
    )
    translate = next((translate for translate, has_form in forms if has_form), None)
    return config if translate is None else translate(config)


def _nomic(config: Json) -> Json:
    is_pure = "hidden_size" not in config
    given = {**_NOMIC_DEFAULTS, **config} if is_pure else config
    has_experts = bool(given.get(_NOMIC_EXPERTS[0]))
    _check(given, _NOMIC_MOE_FIXED if has_experts else _NOMIC_FIXED, "NomicBert")
    names = {*_NOMIC_NAMES, *_NOMIC_READ, *_NOMIC_HARMLESS, *_NOMIC_MOE_FIXED, "auto_map"}
    native = without(config, names if has_experts else names | {*_NOMIC_EXPERTS})
    if has_experts:
        native.setdefault("architectures", ["NomicBertModel"])
        _rename(native, "NomicBert(?!Moe)", "NomicBertMoe")
    for old, new in _NOMIC_NAMES.items():
        if given.get(old) is not None:
            _set(native, new, given[old], old)
    kinds, default = (_NOMIC_PLAIN, "gelu") if has_experts else (_NOMIC_GATES, "swiglu")
    kind = read_choice(given, "activation_function", kinds, default=default)
    _set(native, "hidden_act", kind, "activation_function")
    if is_pure:
        inner = read_int(given, "n_inner")
        multiple = 1 if has_experts else _NOMIC_INNER_MULTIPLE
        native["intermediate_size"] = _round_up(inner, multiple)
        multiple = read_int(given, "pad_vocab_size_multiple", default=1)
        native["vocab_size"] = _round_up(read_int(given, "vocab_size"), multiple)
        native.setdefault("type_vocab_size", 2)
    # from max_trained_positions on, its scaling depends on the longest text of a batch
    limit = "max_trained_positions" if given.get("rotary_scaling_factor") else "n_positions"
    if given.get(limit) is not None:
        native["max_position_embeddings"] = read_int(given, limit)
    return native


def _gte(config: Json) -> Json:
    given = {**_GTE_DEFAULTS, **config}
    _check(given, _GTE_FIXED, "New", "Gte")
    native = without(given, {*_GTE_FIXED, *_GTE_HARMLESS, "auto_map"})
    native["model_type"] = "gte"
    _rename(native, "New", "Gte")
    if not native.get("rope_parameters"):
        native.setdefault("rope_theta", 10_000.0)
    scaling = native.get("rope_scaling")
    if isinstance(scaling, dict) and "ntk" in (scaling.get("type"), scaling.get("rope_type")):
        native["rope_scaling"] = _linear_form(native, scaling)
        del native["rope_theta"]
    return native


def _jina_bert(config: Json) -> Json:
    _check({"position_embedding_type": "absolute", **config}, _JINA_BERT_FIXED, "JinaBert")
    gate = read_choice(config, "feed_forward_type", _JINA_BERT_GATES, default="")
    native = without(config, {*_JINA_BERT_HARMLESS, "auto_map", "feed_forward_type"})
    _set(native, "hidden_act", gate, "feed_forward_type")
    names = config.get("architectures")
    names = names if isinstance(names, list) and names else ["Model"]
    native["architectures"] = [re.sub("^(Jina)?(Bert)?", "JinaBert", str(name)) for name in names]
    return native


def _jina_xlm(config: Json) -> Json:
    _check(config, _JINA_XLM_FIXED, "XLMRoberta")
    dropped = {*_JINA_XLM_FIXED, *_JINA_XLM_HARMLESS, "auto_map", "rotary_emb_base"}
    native = without(config, {*dropped, "position_embedding_type"})
    kind = read_choice(config, "position_embedding_type", _JINA_XLM_TYPES, default="rotary")
    if not config.get("load_trained_adapters"):
        # its code would make new ones
        native = without(native, ADAPTER_FIELDS)
    native["model_type"] = kind
    if kind == "xlm-roberta":
        return native
    native["rope_theta"] = read_number(config, "rotary_emb_base", default=10_000.0)
    _rename(native, "XLMRobertaLoRA$", "JinaEmbeddingsV3Model")
    _rename(native, "XLMRoberta", "JinaEmbeddingsV3")
    return native


def _llama(config: Json) -> Json:
    _check(config, {}, "LlamaBidirectional")
    native = without(config, {"auto_map", "pooling", "temperature"})
    native["model_type"] = "llama"
    _rename(native, "LlamaBidirectional", "Llama")
    _set_bidirectional(native, config, "model_type")
    native["sequence_pooling"] = config.get("pooling") or "avg"
    native["score_temperature"] = config.get("temperature")
    native["pair_prefixes"] = _QUESTION_AND_PASSAGE
    return native


def _qwen2(config: Json) -> Json:
    _check(config, {}, "Qwen2")
    return without(config, {"auto_map"})


def _qwen3(config: Json) -> Json:
    _check(config, {_BIDIRECTIONAL: True}, "Qwen3Bidirectional", "PPLXQwen3")
    native = without(config, {"auto_map", _BIDIRECTIONAL})
    native["model_type"] = "qwen3"
    _rename(native, "PPLXQwen3", "Qwen3")
    _set_bidirectional(native, config, _BIDIRECTIONAL)
    if "Qwen3Bidirectional" in str(config.get("auto_map")):
        # its code has a layer in place of the logits
        native["architectures"] = ["Qwen3Model"]
        native["projection_size"] = read_num_labels(config)
    return native


def _set_bidirectional(native: Json, config: Json, field: str) -> None:
    if native.get("is_causal"):
        raise CheckpointError(
            f"{_FILE} has {field} {show(config.get(field))} and is_causal true; make them agree"
        )
    native["is_causal"] = False


def _eurobert(config: Json) -> Json:
    _check(config, {}, "EuroBert")
    native = without(config, {"auto_map", "clf_pooling", *_TOKENS})
    if config.get("clf_pooling") is not None:
        _set(native, "classifier_pooling", config["clf_pooling"], "clf_pooling")
    return native


def _phi3(config: Json) -> Json:
    code = config["auto_map"]
    if isinstance(code, dict):
        # the tokenizer of another repository, whose files this one has
        code = without(code, {"AutoTokenizer"})
    _check({**config, "auto_map": code}, _PHI3_FIXED, "Phi3")
    native = without(config, {"auto_map", *_PHI3_FIXED})
    scaling = native.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") == "su":
        native["rope_scaling"] = {**scaling, "type": "longrope"}
    return native


def _rename(config: Json, old: str, new: str) -> None:
    names = config.get("architectures")
    if isinstance(names, list):
        config["architectures"] = [re.sub(f"^{old}", new, str(name)) for name in names]


def _linear_form(config: Json, scaling: Json) -> Json:
    """Return NTK scaling as the same larger base and divided frequencies."""
    name = f"rope_scaling of {_FILE}"
    known = ("type", "rope_type", "factor")
    check_fields(scaling, name, known=known, fixed={"mixed_b": None})
    factor = read_number(scaling, "factor", name=name)
    if factor <= 1:
        raise CheckpointError(f"{name} has factor {factor:g}; allowed: numbers above 1")
    head_dim = read_int(config, "hidden_size") // read_int(config, "num_attention_heads")
    theta = read_number(config, "rope_theta") * factor
    return {
        "rope_type": "linear",
        "rope_theta": theta,
        "factor": factor ** (2 / max(head_dim, 1)),
    }


def _check(config: Json, fixed: Mapping[str, object], *class_names: str) -> None:
    own = {key: config[key] for key in fixed if key in config}
    check_fields(own, _FILE, known=(), fixed=fixed, remedy=REMEDY)
    mapped = config.get("auto_map") or {}
    for classes in mapped.values() if isinstance(mapped, dict) else [mapped]:
        for path in classes if isinstance(classes, list) else [classes]:
            name = str(path).rpartition(".")[-1]
            if path is not None and not name.startswith(class_names):
                raise CheckpointError(
                    f"{_FILE} has auto_map with {show(path)}, code that is not known, and custom code never runs;"
                    f" allowed: {' or '.join(class_names)} and their heads{REMEDY}"
                )


def _set(config: Json, key: str, value: object, old: str) -> None:
    """Set a field under its new name, unless it has another value already."""
    if config.get(key) not in (None, value):
        raise CheckpointError(
            f"{_FILE} has {old} {show(value)} and {key} {show(config[key])}; make them agree"
        )
    config[key] = value


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
