"""Settings of sentence-transformers in a checkpoint: pooling, layers, normalization, prompts, limit.

The files are modules.json, the configurations of its modules, sentence_bert_config.json and
config_sentence_transformers.json. A field that would change vectors and is not served is refused
by name; see docs/decisions/0014-config-fields.md.

With the module Router, a query is the weights of its tokens in a table (SparseStaticEmbedding), without the model; a
document goes through a masked language model and SpladePooling. Source: base/modules/router.py and
sparse_encoder/modules/sparse_static_embedding.py of sentence-transformers; Geng et al. 2024, arXiv:2411.04403.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias

from varlen.errors import CheckpointError
from varlen.models.checkpoint.files import (
    TOKENIZER,
    Json,
    check_fields,
    has_file,
    peek_json,
    read_flag,
    read_json,
    read_object,
    read_optional_int,
    read_optional_object,
    show,
)
from varlen.models.checkpoint.ranking import (
    PYLATE_FIELDS,
    TRANSFORMER_FIELDS,
    LateInteraction,
    LogitScore,
    is_late_interaction,
    is_pylate,
    pylate_prompts,
    read_late_interaction,
    read_logit_score,
    read_pylate,
)
from varlen.models.checkpoint.tokenizer_files import TokenizerSettings
from varlen.models.checkpoint.vector_layers import (
    LayerMix,
    SpladeConfig,
    VectorConfig,
    read_dense,
    read_layer_mix,
    read_norm,
    read_splade,
)
from varlen.models.checkpoint.weights import check_shapes, read_headers
from varlen_kernels import Pooling

_BERT_CONFIG = "sentence_bert_config.json"
_MODEL_CONFIG = "config_sentence_transformers.json"

_MODULES = (
    "Transformer WeightedLayerPooling Pooling Dense LayerNorm Normalize FlexibleQuantizer MLMTransformer SpladePooling"
    " LogitScore MultiVectorMask StaticEmbedding"
).split()
# By module, the reader of a layer of vectors. There may be any number of layers.
_LAYERS: Mapping[str, Callable[[Path, str], VectorConfig]] = {
    "Dense": read_dense,
    "LayerNorm": read_norm,
}
_ORDER = re.compile(
    r"Transformer(,WeightedLayerPooling)?,Pooling(,Dense|,LayerNorm)*(,Normalize|,FlexibleQuantizer)?|Transformer"
    r"|(MLM)?Transformer,SpladePooling|Transformer,LogitScore"
    r"|StaticEmbedding(,Normalize)?"
)
# Modules of models with a vector per token. MultiVectorMask may come anywhere; PyLate leaves it out, and Normalize.
_LATE_ORDER = re.compile(r"Transformer(,Dense)*(,Normalize)?")
_PYLATE_ORDER = re.compile(r"Transformer(,Dense)*")
# Modules that are read as what their code does, by the names of their classes; the code never runs.
_OTHER_CLASSES = {
    "pylate.models.Dense.Dense": "Dense",
    "st_quantize.FlexibleQuantizer": "FlexibleQuantizer",
}
_POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}
_POOLING_NAMES: dict[str, Pooling] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
# By task, the output of transformers that the module returns, and the name that it gets.
_OUTPUTS_OF_TASK = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "fill-mask": ("logits", "token_embeddings"),
    "text-generation": ("logits", "causal_logits"),
}
# By the module after the transformer, the tasks that it may have.
_TASKS_OF_MODULE = {"SpladePooling": ("fill-mask",), "LogitScore": ("text-generation",)}
_OTHER_TASKS = ("feature-extraction", "sequence-classification")
# Kinds of models, with SpladePooling and without.
_SPARSE_TYPES = ("SparseEncoder", "SentenceTransformer")
_DENSE_TYPES = ("SentenceTransformer", "CrossEncoder")
_KNOWN_MODEL_FIELDS = frozenset(
    # similarity_fn_name is for `similarity`, activation_fn for the scores of a cross-encoder
    "__version__ requirements prompts default_prompt_name model_type activation_fn similarity_fn_name".split()
)


Route: TypeAlias = Literal["query", "document"]

ROUTER = "Router"
_ROUTER_CONFIG = "router_config.json"
_MODULE_PREFIX = "sentence_transformers."
# The table has a weight for each token.
ROUTER_TABLE = "weight"
_ALLOWED_ROUTES = "query (SparseStaticEmbedding), document (Transformer, SpladePooling)"
_DOCUMENTS = (["Transformer", "SpladePooling"], ["MLMTransformer", "SpladePooling"])
# Settings of tokenizer.json that change no token of a query: it is cut elsewhere, and has no special tokens.
_OTHER_SETTINGS = ("truncation", "padding", "post_processor")


@dataclass(frozen=True, slots=True)
class Router:
    """The routes of a checkpoint.

    Attributes:
        queries: path of the folder with the table of queries, relative to the checkpoint.
    """

    queries: str
    documents: tuple[tuple[str, str], ...]
    default: Route

    @property
    def transformer(self) -> str:
        """Path of the folder of the model, empty for the checkpoint's own."""
        return self.documents[0][1]

    def check_tokenizers(
        self, folder: Path, queries: TokenizerSettings, documents: TokenizerSettings
    ) -> None:
        """Raise CheckpointError unless queries and documents have the same tokens."""
        first, second = (
            {key: value for key, value in tokenizer.items() if key not in _OTHER_SETTINGS}
            for tokenizer in (
                read_object(folder / path, TOKENIZER) for path in (self.queries, self.transformer)
            )
        )
        if first != second or queries.truncation_side != documents.truncation_side:
            raise CheckpointError(
                f"{self.queries}/{TOKENIZER} splits queries in another way than the tokenizer of documents; save the"
                " checkpoint with one tokenizer for both"
            )

    def check_table(self, folder: Path, terms: int) -> None:
        """Raise CheckpointError unless the table has a weight for each term and nothing else."""
        check_shapes(read_headers(folder / self.queries), {ROUTER_TABLE: (terms,)}, lambda _: False)


def first_module(folder: Path, kind: str) -> Json | None:
    """Return the entry of a folder's first module; None of another kind."""
    modules = peek_json(folder, "modules.json")
    first = modules[0] if isinstance(modules, list) and modules else None
    is_it = isinstance(first, dict) and str(first.get("type")).rpartition(".")[-1] == kind
    return first if is_it else None


def has_router(folder: Path) -> bool:
    """Return whether the first module of a folder is a Router."""
    return first_module(folder, ROUTER) is not None


def folders_of_routes(folder: Path) -> list[str]:
    """Return the folders that routes name, unchecked; none without a Router."""
    config = peek_json(folder, _ROUTER_CONFIG) if has_router(folder) else None
    types = config.get("types") if isinstance(config, dict) else None
    return [str(name) for name in types] if isinstance(types, dict) else []


def read_router(folder: Path) -> Router | None:
    """Return the routes of a checkpoint folder, None without a Router.

    Raises:
        CheckpointError: its files are damaged, or its routes are not served.
    """
    if not has_router(folder):
        return None
    (first, *others) = peek_json(folder, "modules.json")
    if others or first.get("path"):
        raise CheckpointError(
            "modules.json has the module Router; allowed: Router alone, in the checkpoint folder itself"
        )
    config = read_object(folder, _ROUTER_CONFIG)
    known = ("types", "structure", "parameters")
    check_fields(config, _ROUTER_CONFIG, known=known, fixed={})
    parts = [config.get(name) for name in known]
    if not all(isinstance(part, dict) for part in parts):
        raise CheckpointError(
            f"{_ROUTER_CONFIG} has {show(config)}; allowed: objects {', '.join(known)}"
        )
    types, structure, parameters = (dict(part or {}) for part in parts)
    routes = {name: _router_modules(paths, types) for name, paths in structure.items()}
    kinds = {name: [kind for kind, _ in route] for name, route in routes.items()}
    is_served = kinds.get("query") == ["SparseStaticEmbedding"] and set(kinds) == {
        "query",
        "document",
    }
    if not is_served or kinds["document"] not in _DOCUMENTS:
        shown = ", ".join(f"{name} ({', '.join(route)})" for name, route in kinds.items())
        raise CheckpointError(
            f"{_ROUTER_CONFIG} has the routes {shown}; allowed: {_ALLOWED_ROUTES}"
        )
    ((_, queries),) = routes["query"]
    name = f"{queries}/config.json"
    check_fields(read_optional_object(folder, name), name, known=("frozen",), fixed={})
    return Router(queries, tuple(routes["document"]), _default(parameters, list(structure)))


def _router_modules(paths: object, types: Mapping[str, object]) -> list[tuple[str, str]]:
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise CheckpointError(
            f"{_ROUTER_CONFIG} has the route {show(paths)}; allowed: a list of folders"
        )
    for path in paths:
        if len(PurePosixPath(path).parts) > 1 or path.startswith((".", "/")):
            raise CheckpointError(
                f'{_ROUTER_CONFIG} names the folder "{path}"; allowed: a folder beside it'
            )
        if not str(types.get(path)).startswith(_MODULE_PREFIX):
            raise CheckpointError(
                f"{_ROUTER_CONFIG} has a module {show(types.get(path))}; allowed: modules of sentence_transformers"
            )
    return [(str(types[path]).rpartition(".")[-1], path) for path in paths]


def _default(parameters: Json, routes: Sequence[str]) -> Route:
    fixed: dict[str, object] = {"route_mappings": {}}
    check_fields(
        parameters, _ROUTER_CONFIG, known=("default_route", "allow_empty_key"), fixed=fixed
    )
    default = parameters.get("default_route")
    if default is None and read_flag(
        parameters, "allow_empty_key", default=True, name=_ROUTER_CONFIG
    ):
        default = routes[0]
    if default == "query":
        return "query"
    if default == "document":
        return "document"
    raise CheckpointError(
        f"{_ROUTER_CONFIG} has default_route {show(default)}; allowed: query, document"
    )


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """Settings of the steps around a transformer.

    Attributes:
        pooling: pooling of a sequence into the vector of `embed`; the results of several are concatenated.
        layer_mix: weights of the outputs of layers, whose mean is pooled; None pools the output of the last layer.
        normalize: whether the vector is divided by its length; with `late`, the vectors of tokens.
        default_prompt: the one that it takes if a request names none; empty without one.
        pools_prompt: whether tokens of prompts are pooled; True where no prompt says anything.
        max_seq_length: length at which it truncates, in tokens; None if no file has it.
        activation_class: class that makes scores of a cross-encoder's logits, if a file has it.
    """

    pooling: tuple[Pooling, ...] = ("mean",)
    has_pooling: bool = False
    dense: tuple[VectorConfig, ...] = ()
    layer_mix: LayerMix | None = None
    rounds: bool = False
    normalize: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    pools_prompt: bool = True
    max_seq_length: int | None = None
    lowercase: bool = False
    activation_class: str | None = None
    splade: SpladeConfig | None = None
    logit_score: LogitScore | None = None
    late: LateInteraction | None = None


def read_sentence_settings(
    folder: Path,
    *,
    pooling: Pooling = "mean",
    config: Json | None = None,
    transformer: str = "",
    router: Router | None = None,
) -> SentenceSettings:
    """Return the settings in a checkpoint folder; defaults where files are absent.

    Args:
        pooling: default pooling, if no file names one.
        transformer: a module of the checkpoint that stands for Transformer.

    Raises:
        CheckpointError: a file is damaged, or asks for something that is not served.
    """
    model = read_optional_object(folder, _MODEL_CONFIG)
    modules = list(router.documents) if router else _modules(folder, model, transformer)
    if is_late_interaction(model):
        return _late_settings(folder, modules, model)
    paths = dict(modules)
    last = modules[-1][0] if modules else ""
    settings = _transformer_config(
        folder / router.transformer if router else folder,
        _TASKS_OF_MODULE.get(last, _OTHER_TASKS),
    )
    pools_prompt = True
    modes: tuple[Pooling, ...] = (pooling,)
    if "Pooling" in paths:
        name = f"{paths['Pooling']}/config.json"
        of_pooling = read_object(folder, name)
        modes = _pooling(of_pooling, name)
        pools_prompt = _pools_prompt(of_pooling, name)
    if "Normalize" in paths:
        _check_normalize(folder, paths["Normalize"], "sentence_embedding")
    mix = paths.get("WeightedLayerPooling")
    prompts, prompt = _prompts(model, last)
    score = None
    if last == "LogitScore":
        score = read_logit_score(folder, paths[last], settings, prompt)
        # a message of its own
        prompt = ""
    return SentenceSettings(
        pooling=modes,
        has_pooling="Pooling" in paths,
        dense=tuple(_LAYERS[kind](folder, path) for kind, path in modules if kind in _LAYERS),
        layer_mix=None if mix is None else read_layer_mix(folder, mix, config or {}),
        rounds="FlexibleQuantizer" in paths,
        normalize="Normalize" in paths,
        prompts=prompts,
        default_prompt=prompt,
        # without prompts, there is nothing to leave out
        pools_prompt=pools_prompt or not any(prompts.values()),
        max_seq_length=read_optional_int(settings, "max_seq_length", _BERT_CONFIG),
        lowercase=bool(settings.get("do_lower_case")),
        activation_class=model.get("activation_fn"),
        splade=(
            read_splade(
                folder,
                paths["SpladePooling"],
                read_optional_int(model, "max_active_dims", _MODEL_CONFIG),
            )
            if "SpladePooling" in paths
            else None
        ),
        logit_score=score,
    )


def _late_settings(
    folder: Path, modules: Sequence[tuple[str, str]], model: Json
) -> SentenceSettings:
    paths = dict(modules)
    # the fields of PyLate are elsewhere
    more = frozenset[str]() if is_pylate(model) else TRANSFORMER_FIELDS
    transformer = _transformer_config(folder, ("feature-extraction",), more=more)
    prompts, prompt = _prompts(model, modules[-1][0])
    if is_pylate(model):
        late = read_pylate(model, _MODEL_CONFIG)
        prompts = pylate_prompts(model, prompts, _MODEL_CONFIG)
        normalize = True
    else:
        late = read_late_interaction(folder, paths["MultiVectorMask"], transformer)
        normalize = "Normalize" in paths
        if normalize:
            _check_normalize(folder, paths["Normalize"], "token_embeddings")
    return SentenceSettings(
        dense=tuple(
            read_dense(folder, path, of="token_embeddings")
            for kind, path in modules
            if kind == "Dense"
        ),
        normalize=normalize,
        prompts=prompts,
        default_prompt=prompt,
        max_seq_length=read_optional_int(transformer, "max_seq_length", _BERT_CONFIG),
        lowercase=bool(transformer.get("do_lower_case")),
        late=late,
    )


def _modules(folder: Path, model: Json, transformer: str) -> list[tuple[str, str]]:
    """Return kind and folder of each module in modules.json; none without the file."""
    is_late = is_late_interaction(model)
    if not is_late and not has_file(folder, "modules.json"):
        return []
    modules = read_json(folder, "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError("modules.json is not a list of objects")
    own = {transformer: "Transformer"} if transformer else {}
    kinds = [own.get(module.get("type")) or _module_kind(module) for module in modules]
    if is_late:
        _check_late_order(kinds, with_mask=not is_pylate(model))
    elif kinds and not _ORDER.fullmatch(",".join(kinds)):
        raise CheckpointError(
            f"modules.json has the modules {', '.join(kinds)}; allowed: Transformer, WeightedLayerPooling or none,"
            " Pooling, Dense and LayerNorm, Normalize or FlexibleQuantizer, in this order, each once, Dense and"
            " LayerNorm any number of times; or Transformer, SpladePooling; or Router; or Transformer, LogitScore; or"
            " StaticEmbedding, with Normalize or without"
        )
    paths = [str(module.get("path") or "") for module in modules]
    if paths and paths[0] and kinds[0] != "StaticEmbedding":
        raise CheckpointError(
            f'modules.json has the transformer in the folder "{paths[0]}";'
            " allowed: the checkpoint folder itself"
        )
    return list(zip(kinds, paths, strict=True))


def _check_late_order(kinds: Sequence[str], *, with_mask: bool) -> None:
    others = ",".join(kind for kind in kinds if kind != "MultiVectorMask")
    order = _LATE_ORDER if with_mask else _PYLATE_ORDER
    if kinds.count("MultiVectorMask") != with_mask or not order.fullmatch(others):
        allowed = "Transformer, Dense any number of times" + (
            ", Normalize or none, and MultiVectorMask once, anywhere" if with_mask else ""
        )
        raise CheckpointError(
            f"modules.json has the modules {', '.join(kinds)}; allowed with a vector for each token: {allowed}"
        )


def _module_kind(module: Json) -> str:
    name = str(module.get("type", ""))
    if name in _OTHER_CLASSES:
        return _OTHER_CLASSES[name]
    kind = name.rpartition(".")[-1]
    if kind not in _MODULES:
        raise CheckpointError(f'modules.json has a module "{kind}"; allowed: {", ".join(_MODULES)}')
    if not name.startswith(_MODULE_PREFIX):
        raise CheckpointError(
            f'modules.json has a module "{name}"; allowed: modules of sentence_transformers'
        )
    return kind


def _pooling(config: Json, name: str) -> tuple[Pooling, ...]:
    flags = {key for key in config if key.startswith("pooling_mode_")}
    known = {"pooling_mode", "include_prompt", "embedding_dimension", "word_embedding_dimension"}
    check_fields(config, name, known=known | flags, fixed={})
    names: dict[str, Pooling]
    if "pooling_mode" in config:
        modes = config["pooling_mode"]
        chosen = modes if isinstance(modes, list) else [modes]
        names = _POOLING_NAMES
    else:
        # in the order in which sentence-transformers concatenates them, not in the order of the file
        known_first = [key for key in _POOLING_FLAGS if config.get(key)]
        unknown = [key for key in config if key in flags and config[key] and key not in known_first]
        chosen = [*known_first, *unknown]
        names = _POOLING_FLAGS
    if not chosen or not all(isinstance(each, str) and each in names for each in chosen):
        raise CheckpointError(
            f"{name} has the pooling {chosen}; allowed: one or more of {list(names)}"
        )
    return tuple(names[each] for each in chosen)


def _pools_prompt(config: Json, name: str) -> bool:
    # null is false to sentence-transformers, and a default elsewhere
    pools_prompt = config.get("include_prompt", True)
    if not isinstance(pools_prompt, bool):
        raise CheckpointError(
            f"{name} has include_prompt {show(pools_prompt)}; allowed: true, false"
        )
    return pools_prompt


def _check_normalize(folder: Path, path: str, feature: str) -> None:
    name = f"{path}/config.json"
    fixed = dict.fromkeys(("module_input_name", "module_output_name"), feature)
    check_fields(read_optional_object(folder, name), name, known=(), fixed=fixed)


def _transformer_config(
    folder: Path, allowed: Sequence[str], *, more: Collection[str] = ()
) -> Json:
    config = read_optional_object(folder, _BERT_CONFIG)
    # the module that older files name has its task without a field
    task = config.get("transformer_task") or allowed[0]
    if task not in allowed:
        raise CheckpointError(
            f"{_BERT_CONFIG} has transformer_task {show(task)}; allowed: {', '.join(allowed)}"
        )
    output, name = _OUTPUTS_OF_TASK[task]
    fixed: dict[str, Any] = {
        "modality_config": {"text": {"method": "forward", "method_output_name": output}},
        "module_output_name": name,
    }
    if task == "text-generation":
        # what it says of messages is read with the module after it
        fixed = {"module_output_name": name}
    # unpad_inputs chooses between two ways to the same vectors
    known = {
        "transformer_task",
        "max_seq_length",
        "do_lower_case",
        "unpad_inputs",
        "modality_config",
        *more,
    }
    check_fields(config, _BERT_CONFIG, known=known - fixed.keys(), fixed=fixed)
    return config


def _prompts(config: Json, last_module: str) -> tuple[Mapping[str, str], str]:
    is_splade = last_module == "SpladePooling"
    kind = config.get("model_type") or "SentenceTransformer"
    allowed = _SPARSE_TYPES if is_splade else _DENSE_TYPES
    if not is_late_interaction(config) and kind not in allowed:
        raise CheckpointError(
            f"{_MODEL_CONFIG} has model_type {show(kind)}; allowed: {', '.join(allowed)}"
        )
    known = _KNOWN_MODEL_FIELDS | ({"max_active_dims"} if is_splade else set())
    if is_pylate(config):
        known |= PYLATE_FIELDS
    check_fields(config, _MODEL_CONFIG, known=known, fixed={"truncate_dim": None})
    name = config.get("default_prompt_name")
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise CheckpointError(f"{_MODEL_CONFIG} has prompts {show(prompts)}; allowed: an object")
    for prompt in prompts.values():
        if not isinstance(prompt, str | None):
            raise CheckpointError(
                f"{_MODEL_CONFIG} has the prompt {show(prompt)}; allowed: strings"
            )
    texts = {} if kind == "CrossEncoder" else {key: text or "" for key, text in prompts.items()}
    if name is None:
        return texts, ""
    if not isinstance(name, str) or name not in prompts:
        raise CheckpointError(
            f"{_MODEL_CONFIG} has default_prompt_name {show(name)}; allowed: null, or one of its prompts:"
            f" {', '.join(prompts) or 'it has none'}"
        )
    prompt = prompts[name] or ""
    if prompt and kind == "CrossEncoder" and last_module != "LogitScore":
        raise CheckpointError(
            f"{_MODEL_CONFIG} has a default prompt {show(prompt)}; prompts of a CrossEncoder are not served"
        )
    return texts, prompt
