"""Checkpoints with the module Router: queries are looked up, documents run through a model.

A query is the weights of its tokens in a table (SparseStaticEmbedding), without the model; a document goes through a
masked language model and SpladePooling. Source: base/modules/router.py and
sparse_encoder/modules/sparse_static_embedding.py of sentence-transformers; Geng et al. 2024, arXiv:2411.04403.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

from varlen.errors import CheckpointError
from varlen.models.checkpoint.config_file import (
    Json,
    check_fields,
    peek_json,
    read_flag,
    read_object,
    read_optional_object,
    show,
)
from varlen.models.checkpoint.files import TOKENIZER
from varlen.models.checkpoint.tokenizer_files import TokenizerSettings
from varlen.models.checkpoint.weights import check_shapes, read_headers

Route: TypeAlias = Literal["query", "document"]

MODULE = "Router"
CONFIG = "router_config.json"
_PREFIX = "sentence_transformers."
# The table has a weight for each token.
TABLE = "weight"
_ALLOWED = "query (SparseStaticEmbedding), document (Transformer, SpladePooling)"
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
        check_shapes(read_headers(folder / self.queries), {TABLE: (terms,)}, lambda _: False)


def has_router(folder: Path) -> bool:
    """Return whether the first module of a folder is a Router."""
    modules = peek_json(folder, "modules.json")
    first = modules[0] if isinstance(modules, list) and modules else None
    return isinstance(first, dict) and str(first.get("type")).rpartition(".")[-1] == MODULE


def folders_of_routes(folder: Path) -> list[str]:
    """Return the folders that routes name, unchecked; none without a Router."""
    config = peek_json(folder, CONFIG) if has_router(folder) else None
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
    config = read_object(folder, CONFIG)
    known = ("types", "structure", "parameters")
    check_fields(config, CONFIG, known=known, fixed={})
    parts = [config.get(name) for name in known]
    if not all(isinstance(part, dict) for part in parts):
        raise CheckpointError(f"{CONFIG} has {show(config)}; allowed: objects {', '.join(known)}")
    types, structure, parameters = (dict(part or {}) for part in parts)
    routes = {name: _modules(paths, types) for name, paths in structure.items()}
    kinds = {name: [kind for kind, _ in route] for name, route in routes.items()}
    is_served = kinds.get("query") == ["SparseStaticEmbedding"] and set(kinds) == {
        "query",
        "document",
    }
    if not is_served or kinds["document"] not in _DOCUMENTS:
        shown = ", ".join(f"{name} ({', '.join(route)})" for name, route in kinds.items())
        raise CheckpointError(f"{CONFIG} has the routes {shown}; allowed: {_ALLOWED}")
    ((_, queries),) = routes["query"]
    name = f"{queries}/config.json"
    check_fields(read_optional_object(folder, name), name, known=("frozen",), fixed={})
    return Router(queries, tuple(routes["document"]), _default(parameters, list(structure)))


def _modules(paths: object, types: Mapping[str, object]) -> list[tuple[str, str]]:
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise CheckpointError(f"{CONFIG} has the route {show(paths)}; allowed: a list of folders")
    for path in paths:
        if len(PurePosixPath(path).parts) > 1 or path.startswith((".", "/")):
            raise CheckpointError(
                f'{CONFIG} names the folder "{path}"; allowed: a folder beside it'
            )
        if not str(types.get(path)).startswith(_PREFIX):
            raise CheckpointError(
                f"{CONFIG} has a module {show(types.get(path))}; allowed: modules of sentence_transformers"
            )
    return [(str(types[path]).rpartition(".")[-1], path) for path in paths]


def _default(parameters: Json, routes: Sequence[str]) -> Route:
    fixed: dict[str, object] = {"route_mappings": {}}
    check_fields(parameters, CONFIG, known=("default_route", "allow_empty_key"), fixed=fixed)
    default = parameters.get("default_route")
    if default is None and read_flag(parameters, "allow_empty_key", default=True, name=CONFIG):
        default = routes[0]
    if default == "query":
        return "query"
    if default == "document":
        return "document"
    raise CheckpointError(f"{CONFIG} has default_route {show(default)}; allowed: query, document")
