"""Wrong settings: refused at load with a reason, or the model serves.

Most are loaded in a process of their own, as the server loads them; some by the server itself.
"""

import random
import time
from collections.abc import Mapping
from typing import Any

from tests.checkpoints import save_checkpoint
from tests.server.clients import AnswerError, texts
from tests.server.serving import load, unload
from varlen.config import SETTINGS
from varlen.parameter import Parameter

from ..endings import End, Ending
from ..loads import Loader
from ..models import CACHED, HIDDEN
from ..phase import Campaign, attacked_server
from ..report import Report
from ..target import Target

_FIXED: Mapping[str, str] = {
    "device": "cpu",
    "dtype": "fp32",
    "threads": "1",
    "warmup_seconds": "0",
}
_KINDS = ("BertModel", "BertForSequenceClassification", "GPT2LMHeadModel", "MarianMTModel")
# Loads, however little time there is, and how often the server does one.
_FEWEST = 20
_SERVED_EVERY = 20
_SERVER_MODEL = HIDDEN
_LOG = (r"failed to load|model_lifecycle|model_repository_manager|auto-complete|backend_model",)

_NUMBERS = (-1, 0, 1, 2, 3, 17, 1000, 2**31, 2**40, 10**17, 10**18, 2**63, 2**64, 10**400)
_WORDS = (
    "", " ", "0x10", "1e3", "1.5", "+1", "-0", "٣", "NaN", "inf", "null", "true", "TRUE", "yes", "[]", "{}", "a" * 9000,
    "1%", "0%", "100%", "101%", "1 %", "5 ", "\n", "\0", "../..", "é", "auto", "none", "cuda", "fp16", "int8",
    "generate", "embed", "hidden", "classify", "translate", "optimistic", "padded", "lazy", "debug",
)  # fmt: skip
# Sections of the server's config; those that change answers are refused.
_SECTIONS: tuple[dict[str, Any], ...] = (
    {"max_batch_size": 0},
    {"max_batch_size": 100000},
    {"dynamic_batching": {}},
    {"sequence_batching": {}},
    {"response_cache": {"enable": True}},
    {"model_transaction_policy": {"decoupled": True}},
    {"instance_group": [{"count": 3, "kind": "KIND_CPU"}]},
    {"instance_group": [{"count": 1, "kind": "KIND_MODEL"}]},
    {"input": [{"name": "text", "data_type": "TYPE_FP32", "dims": [1]}]},
    {
        "input": [
            {"name": "text", "data_type": "TYPE_STRING", "dims": [1], "reshape": {"shape": []}}
        ]
    },
    {"output": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}]},
)


def wrong_settings(campaign: Campaign, report: Report, seconds: float) -> None:
    """Change a few settings at a time until the time is over."""
    folder = campaign.scratch / "configured"
    checkpoints = [save_checkpoint(folder / kind, kind) for kind in _KINDS]
    with (
        attacked_server(campaign, report, (CACHED, HIDDEN), allowed_log=_LOG) as target,
        Loader(campaign.scratch) as loader,
    ):
        for checkpoint in checkpoints:
            end = loader.load(checkpoint, _FIXED)
            report.check(holds=end.end == "served", problem=f"refused as it is: {end.text}")
        # loaded again below
        unload(target.server, _SERVER_MODEL)
        # loads of settings as they are do not count
        number, until = 0, time.monotonic() + seconds
        while number < _FEWEST or (time.monotonic() < until and number < campaign.requests):
            name = f"{campaign.seed} settings {number}"
            draw = random.Random(name)
            parameters = _wrong_parameters(draw)
            if number % _SERVED_EVERY == _SERVED_EVERY - 1:
                _load_served(draw, report, target, parameters, name)
            else:
                end = loader.load(draw.choice(checkpoints), {**_FIXED, **parameters})
                report.ledger.add(name, "load", end.ending(str(parameters)))
            number += 1
        report.ledger.check_least({"load": {"refused": 0.1, "answered": 0.0}})


def _wrong_parameters(draw: random.Random) -> dict[str, str]:
    chosen = draw.sample(sorted(SETTINGS), draw.choice((1, 1, 1, 2, 3)))
    # a folder of any name would be made
    found = {name: _value(draw, SETTINGS[name]) for name in chosen if name != "cache_folder"}
    if draw.random() < 0.1:
        found[draw.choice(("max_batch_token", "", "x" * 5000, "MAX_BATCH_TOKENS", "é"))] = "1"
    return found


def _value(draw: random.Random, setting: Parameter) -> str:
    if setting.choices and draw.random() < 0.5:
        return draw.choice(setting.choices)
    if setting.lowest is not None and draw.random() < 0.7:
        return str(draw.choice(_NUMBERS))
    return draw.choice(_WORDS)


def _load_served(
    draw: random.Random, report: Report, target: Target, parameters: Mapping[str, str], name: str
) -> None:
    """Load in the server, with sections of config.pbtxt that may be wrong too."""
    every = {**_FIXED, **parameters}
    config: dict[str, Any] = {
        "name": _SERVER_MODEL,
        "backend": "varlen",
        "parameters": {key: {"string_value": value} for key, value in every.items()},
    }
    if draw.random() < 0.4:
        config |= draw.choice(_SECTIONS)
    reason = load(target.server, _SERVER_MODEL, config)
    if reason is not None:
        end: End = "wrong" if "log says why" in reason else "refused"
        text = f"{parameters}: {reason}" if end == "wrong" else reason
        report.ledger.add(name, "load_served", Ending(end, message=text))
        return
    try:
        target.grpc.infer(_SERVER_MODEL, texts("word1 word2"))
    except AnswerError as error:
        # a limit of one byte or token
        report.count(f"served, and refused a request as {error.code}")
    report.ledger.add(name, "load_served", Ending("answered"))
    unload(target.server, _SERVER_MODEL)
