"""Write the fields of config.json that releases of transformers read: `python .ci/write_config_fields.py`.

The backend ignores a field that none of them reads (docs/decisions/0014-config-fields.md). Sources are parsed, not
imported: the script needs no dependency of a release, and runs no code of one.
A field counts as read if its name is, in code about a configuration, an attribute that is not called, an argument of a
constructor, or the constant of a look-up (`getattr`, `get`, `pop`, `in`, subscripts). Where code looks up a name that
it computes, every word of that function counts. A name that is counted and that nothing reads makes the backend refuse
a field without need; the reverse would make it ignore a field that counts.
"""

import ast
import json
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from varlen.models.checkpoint.config_fields import FIELDS_FILE
from varlen.models.registry import FAMILIES
from varlen_tools.setup_server import download_wheel

COMMAND = "python .ci/write_config_fields.py"
# The last release of each minor version, from the first one that the tests support to the one of constraints.txt.
RELEASES = (
    "4.48.3 4.49.0 4.50.3 4.51.3 4.52.4 4.53.3 4.54.1 4.55.4 4.56.2 4.57.6 5.0.0 5.1.0 5.2.0 5.3.0 5.4.0 5.5.4 5.6.2"
    " 5.7.0 5.8.1 5.9.0 5.10.4 5.11.0 5.12.1 5.13.1 5.14.1 5.15.1 5.16.1 5.17.0 5.18.0 5.19.0 5.20.2 5.21.1 5.22.2"
    " 5.23.0"
).split()
# Parts of transformers, beside its models, that compute no hidden state and no logit of a text, and parts of quantized
# weights, which `quantization` reads or refuses.
_OTHER_PARTS = (
    "benchmark cli commands data exporters kernels loss onnx pipelines quantizers sagemaker utils/quantization_config"
    " audio_utils backbone_utils convert_graph_to_onnx debug_utils feature_extraction image_processing image_transforms"
    " image_utils keras_callbacks modelcard modeling_gguf processing_utils testing_utils tokenization trainer"
    " training_args video_"
).split()
_OTHER_INTEGRATIONS = (
    "aqlm awq bitnet bitsandbytes eetq fouroversix fp_quant ggml gguf higgs hqq integration_utils quanto spqr torchao"
    " vptq"
).split()
_NOT_READ = ("models/", *_OTHER_PARTS, *(f"integrations/{name}" for name in _OTHER_INTEGRATIONS))
_OTHER_FRAMEWORKS = ("tf", "flax")
# Fields that all families know. The backend looks up only what a family does not know, so the file leaves them out.
KNOWN_FIELDS = frozenset(
    (
        "_attn_implementation _attn_implementation_autoset _commit_hash _from_model_config _name_or_path"
        " architectures assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight"
        " assistant_lookbehind attention_dropout attn_implementation bad_words_ids base_model begin_suppress_tokens"
        " bos_token_id cache_config cache_implementation chunk_size_feed_forward classifier_dropout compile_config"
        " constraints continuous_batching_config cross_attention_hidden_size custom_pipelines"
        " decoder_start_token_id disable_compile diversity_penalty do_sample dola_layers dtype early_stopping"
        " encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff"
        " exponential_decay_length_penalty finetuning_task force_words_ids forced_bos_token_id forced_eos_token_id"
        " gradient_checkpointing guidance_scale hidden_dropout init_std initializer_factor initializer_range"
        " is_assistant label2id length_penalty low_memory mask_token_id max_cache_len max_length"
        " max_matching_ngram_size max_new_tokens max_time min_length min_new_tokens min_p model_type name"
        " name_or_path no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups"
        " num_beams num_return_sequences output_attentions output_hidden_states output_logits output_scores"
        " pad_token_id penalty_alpha prefill_chunk_size problem_type prompt_lookup_num_tokens remove_invalid_values"
        " renormalize_logits repetition_penalty return_dict return_dict_in_generate sep_token_id sequence_bias"
        " speculation_type stop_strings summary_first_dropout summary_last_dropout suppress_tokens"
        " target_lookbehind task_specific_params temperature tie_encoder_decoder token_healing tokenizer_class"
        " top_h top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache"
        " use_flash_attention_2 use_mtp watermarking_config"
    ).split()
)
_CONSTRUCTORS = ("__init__", "__post_init__")
_LOOK_UPS = ("getattr", "hasattr", "setattr")


def main() -> None:
    """Download the releases and write the file."""
    found: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for release in RELEASES:
            print(f"transformers {release}", file=sys.stderr)
            wheel = download_wheel(f"transformers=={release}", Path(scratch))
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.endswith(".py")]
                archive.extractall(Path(scratch, release), names)
            wheel.unlink()
            for family, names_read in fields_read(Path(scratch, release, "transformers")).items():
                found.setdefault(family, set()).update(names_read)
    FIELDS_FILE.write_text(_rendered(found))


def fields_read(sources: Path) -> dict[str, set[str]]:
    """Return the fields that a release reads, by `model_type`, or `shared`.

    Args:
        sources: the package's folder.
    """
    shared: set[str] = set()
    for path in sources.rglob("*.py"):
        part = path.relative_to(sources).as_posix()
        if not part.startswith(_NOT_READ):
            shared |= _fields_of(path)
    found = {"shared": shared}
    for family in FAMILIES:
        # the text part of a multimodal model is in its folder
        folder = sources / "models" / family.replace("-", "_").removesuffix("_text")
        paths = [*folder.glob("configuration_*.py"), *folder.glob("modeling_*.py")]
        found[family] = set[str]().union(*map(_fields_of, paths)) - shared
    return found


def _fields_of(path: Path) -> set[str]:
    if {*_OTHER_FRAMEWORKS} & {*path.stem.split("_")}:
        return set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # other words are names of classes and of Python's own attributes
    names = _reads(tree, in_config=False)
    return {name for name in names if name.islower() and not name.startswith("__")}


def _reads(node: ast.AST, *, in_config: bool) -> Iterator[str]:
    """Yield the fields that code reads of a configuration.

    Args:
        node: the code.
        in_config: whether it is in a class of configurations, whose arguments and `self` hold fields.
    """
    if isinstance(node, ast.ClassDef):
        if "onnx" in node.name.lower():
            return
        in_config = "config" in node.name.lower()
        if in_config:
            yield from _class_fields(node)
    elif isinstance(node, ast.FunctionDef) and any(
        _word(key) is None for key in _keys_read(node, in_config=in_config)
    ):
        # a name that the function computes
        yield from filter(None, map(_word, ast.walk(node)))
    elif isinstance(node, ast.arg) and in_config:
        yield node.arg
    elif isinstance(node, ast.Attribute) and _is_config(node.value, in_config=in_config):
        yield node.attr
    yield from filter(None, map(_word, _keys(node, in_config=in_config)))
    called = node.func if isinstance(node, ast.Call) else None
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.arguments) and getattr(node, "name", "") not in _CONSTRUCTORS:
            continue
        # what is called is a method; the configuration whose method it is may be a field
        if child is called and isinstance(child, ast.Attribute):
            child = child.value  # noqa: PLW2901
        yield from _reads(child, in_config=in_config)


def _class_fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield annotated fields of a class, and both sides of `attribute_map`."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        if (
            isinstance(each, ast.Assign | ast.AnnAssign)
            and isinstance(each.value, ast.Dict)
            # of plans for ranks, the words are kinds of layers
            and not ast.unparse(each).split()[0].endswith(("_plan", "_plan:"))
        ):
            yield from filter(None, map(_word, ast.walk(each.value)))


def _keys_read(function: ast.FunctionDef, *, in_config: bool) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        yield from _keys(node, in_config=in_config)


def _keys(node: ast.AST, *, in_config: bool) -> Iterator[ast.expr]:
    """Yield the key of a look-up in a configuration, if the code is one."""
    if isinstance(node, ast.Subscript) and _is_config(node.value, in_config=in_config):
        yield node.slice
    if (
        isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.In | ast.NotIn)
        and _is_config(node.comparators[0], in_config=in_config)
    ):
        yield node.left
    if isinstance(node, ast.Call) and node.args:
        function, first, *others = node.func, *node.args
        if isinstance(function, ast.Name) and function.id in _LOOK_UPS and others:
            if _is_config(first, in_config=in_config):
                yield others[0]
        elif isinstance(function, ast.Attribute) and function.attr in ("get", "pop"):
            yield from [first] if _is_config(function.value, in_config=in_config) else []


def _is_config(node: ast.AST, *, in_config: bool) -> bool:
    """Return whether an expression is a configuration, by its last name."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return "config" in node.attr.lower()
    if not isinstance(node, ast.Name):
        return False
    return (
        "config" in node.id.lower()
        or node.id == "cfg"
        or (in_config and node.id in ("self", "kwargs"))
    )


def _word(node: ast.AST) -> str | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) and value.isidentifier() else None


def _rendered(found: dict[str, set[str]]) -> str:
    """Return the fields as JSON, with the first and the last release.

    Each line has a family: more lines take bytes of the wheel.
    """
    shared = found["shared"]
    lines = {
        family: " ".join(sorted(names - (KNOWN_FIELDS if family == "shared" else shared)))
        for family, names in found.items()
    }
    return json.dumps({"releases": f"{RELEASES[0]} {RELEASES[-1]}", **lines}, indent=1) + "\n"


if __name__ == "__main__":
    main()
