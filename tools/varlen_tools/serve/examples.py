"""A request for each served model, as a line for a shell."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tritonclient.grpc import model_config_pb2

from varlen.errors import CheckpointError, ConfigError
from varlen.tasks import TASKS, Task
from varlen_client.gateway.routes import EXAMPLES_BY_TASK
from varlen_tools.model_source import find_source, read_model_config
from varlen_tools.serve.models import SOURCE_FILE, ServeError

_JSON = "Content-Type: application/json"
# Names of inputs that are texts, and token ids of any vocabulary.
_TEXTS = {"text", "text_input", "messages"}
_IDS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Model:
    """What a request to a model needs.

    Attributes:
        ranks: whether it has one label, the score of a pair of texts.
        mask: the text that stands for a masked token.
        has_whole_config: whether its config.pbtxt loads without auto-completion.
        ids: data type of `input_ids`, if its config.pbtxt has this input and no texts; else empty.
    """

    name: str
    task: Task
    has_chat: bool = False
    ranks: bool = False
    mask: str = "[MASK]"
    has_whole_config: bool = False
    ids: str = ""


def read_model(folder: Path) -> Model | None:
    """Return the model of a folder, or None if it is of another backend.

    The server runs the same checks when it loads the model.

    Raises:
        ServeError: the model cannot be loaded.
    """
    try:
        config = read_model_config(folder)
        if config.backend != "varlen":
            return None
        source = find_source(folder, {})
        checkpoint = source.open_checkpoint()
        task = source.config.task or checkpoint.task
        checkpoint.check_task(task)
    except (CheckpointError, ConfigError) as error:
        hint = "; --force fetches it again" if (folder / SOURCE_FILE).exists() else ""
        raise ServeError(f"{folder.name} cannot be served: {error}{hint}") from None
    inputs = {each.name for each in config.input}
    takes_pairs = TASKS[task].has_labels and (not inputs or "text_pair" in inputs)
    has_rows = config.max_batch_size > 0 or TASKS[task].is_iterative
    return Model(
        folder.name,
        task,
        has_chat=checkpoint.chat_template is not None,
        ranks=takes_pairs and task != "token_classify" and checkpoint.num_labels == 1,
        mask=checkpoint.special_tokens.get("mask_token", "[MASK]"),
        has_whole_config=bool(config.input and config.output) and has_rows,
        ids=_ids_alone(config),
    )


def _ids_alone(config: model_config_pb2.ModelConfig) -> str:
    types = {each.name: each.data_type for each in config.input}
    if "input_ids" not in types or types.keys() & _TEXTS:
        return ""
    return str(model_config_pb2.DataType.Name(types["input_ids"])).removeprefix("TYPE_")


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where requests go."""

    gateway: str
    server: str
    needs_key: bool = False


def curl_line(model: Model, at: Addresses) -> str:
    """Return a command that sends the model a request and prints the answer."""
    # the gateway sends texts
    on_gateway = None if model.ids else _gateway_request(model)
    if on_gateway is None:
        path, body = _server_request(model)
        return _curl(at.server + path, [], body)
    path, body = on_gateway
    headers = [_JSON, *(["Authorization: Bearer KEY"] if at.needs_key else [])]
    return _curl(at.gateway + path, headers, body)


def _curl(url: str, headers: list[str], body: Mapping[str, Any]) -> str:
    words = ["curl", url]
    for header in headers:
        words += ["-H", header]
    return shlex.join([*words, "-d", json.dumps(body, ensure_ascii=False)])


def _gateway_request(model: Model) -> tuple[str, dict[str, Any]] | None:
    task: str = model.task
    if task == "generate" and model.has_chat:
        task = "chat"
    if task == "rerank" and not model.ranks:
        # several labels of pairs
        return None
    if model.ranks:
        task = "rerank"
    if task not in EXAMPLES_BY_TASK:
        return None
    example = EXAMPLES_BY_TASK[task]
    return example.path, {"model": model.name, **example.body}


def _server_request(model: Model) -> tuple[str, dict[str, Any]]:
    path = f"/v2/models/{quote(model.name, safe='')}"
    if model.ids and TASKS[model.task].is_iterative:
        return f"{path}/generate", {"input_ids": list(_IDS)}
    if model.ids:
        rows = {"datatype": model.ids, "shape": [1, len(_IDS)], "data": list(_IDS)}
        return f"{path}/infer", {"inputs": [{"name": "input_ids"} | rows]}
    text = f"Paris is the {model.mask} of France."
    if model.task != "fill_mask":
        text = "Ada lives in London."
    texts = {"text": text}
    if model.task == "rerank":
        texts["text_pair"] = "Where does Ada live?"
    tensors = [
        {"name": name, "datatype": "BYTES", "shape": [1, 1], "data": [value]}
        for name, value in texts.items()
    ]
    return f"{path}/infer", {"inputs": tensors}
