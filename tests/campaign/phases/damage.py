"""Damaged checkpoints, calibrations and caches: refused with the reason, or served.

Most are loaded in a process of their own, as the server loads them; some by the server itself.
"""

import random
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.checkpoints import pooling_files, save_checkpoint
from tests.server.clients import AnswerError, texts
from tests.server.serving import add_model, load, unload
from varlen.errors import ConfigError
from varlen.execution.int8.calibration import file_name
from varlen.execution.int8.calibration_texts import TEXTS
from varlen.execution.int8.int8_model import calibrate, check_int8
from varlen.execution.int8.layer_inputs import CalibratedEncoder
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.loading import load_encoder

from ..attacks import good
from ..attacks.damage import damage
from ..code_cache import CodeCache
from ..drive import ALL_RIGHT, Bounds, Share, send_all
from ..endings import End, Ending
from ..loads import Load, Loader
from ..models import CACHED
from ..phase import Campaign, attacked_server
from ..report import Report
from ..target import Target

_FIXED: Mapping[str, str] = {
    "device": "cpu",
    "dtype": "fp32",
    "threads": "1",
    "warmup_seconds": "0",
}
# Measures costs, and layers, in a second.
_MEASURED: Mapping[str, str] = {**_FIXED, "warmup_seconds": "1", "max_batch_tokens": "64"}
_KINDS = (
    "BertModel",
    "BertForSequenceClassification",
    "RobertaModel",
    "ModernBertModel",
    "GPT2LMHeadModel",
    "Qwen3ForCausalLM",
    "MarianMTModel",
    "T5ForConditionalGeneration",
)
# Loads, however little time there is, and how often one is served or has damaged compiled code.
_FEWEST = 20
_SERVED_EVERY = 20
_CODE_EVERY = 15
_SERVER_MODEL = "damaged"
# A failed load is an error to the server, and its reason is logged.
_LOG = (
    r"failed to load|Failed to|model_lifecycle|model_repository_manager|auto-complete|backend_model",
)


def damaged(campaign: Campaign, report: Report, seconds: float) -> None:
    """Damage a file at a time until the time is over."""
    folder = campaign.scratch / "intact"
    intact = [_intact(folder, kind) for kind in _KINDS]
    calibrated = _calibrated(folder / "int8")
    draw = random.Random(f"{campaign.seed} damage")
    with (
        attacked_server(campaign, report, (CACHED,), allowed_log=_LOG) as target,
        Loader(campaign.scratch) as loader,
    ):
        for each in intact:
            end = loader.load(each, _FIXED)
            report.check(holds=end.end == "served", problem=f"{each.name} is refused: {end.text}")
        code = CodeCache(campaign.scratch, intact[0], _FIXED)
        # loads of intact checkpoints do not count
        number, until = 0, time.monotonic() + seconds
        while number < _FEWEST or (time.monotonic() < until and number < campaign.requests):
            name = f"{campaign.seed} damage {number}"
            chance = random.Random(name)
            if number % _SERVED_EVERY == _SERVED_EVERY - 1:
                _damage_served(chance, campaign, report, target, draw.choice(intact), name)
            elif number % _CODE_EVERY == _CODE_EVERY - 1:
                _add(report, name, "load_with_damaged_code", *code.damage_and_load(chance))
            elif chance.random() < 0.15:
                _damage_cache(chance, campaign, report, loader, intact, name)
            elif calibrated is not None and chance.random() < 0.15:
                copy, how = _damaged_copy(chance, campaign, calibrated, only=file_name(8))
                end = loader.load(copy, {**_FIXED, "dtype": "int8"})
                _add(report, name, "load_int8", how, end)
            else:
                copy, how = _damaged_copy(chance, campaign, chance.choice(intact))
                _add(report, name, "load", how, loader.load(copy, _FIXED))
            number += 1
        report.ledger.check_least({"load": {"refused": 0.1, "answered": 0.0}})
        # what the server refused or served beside it changed nothing
        mix, bounds = (Share(1, good.embed_cached, ALL_RIGHT),), Bounds(60.0, 24)
        send_all(target, mix, bounds, report.ledger, name=f"{campaign.seed} damage after")
        report.ledger.check_least({share.kind: share.least for share in mix})


def _intact(folder: Path, kind: str) -> Path:
    files = pooling_files(pooling_mode_mean_tokens=True) if kind == "BertModel" else {}
    return save_checkpoint(folder / kind, kind, files=files)


def _calibrated(folder: Path) -> Path | None:
    """Return a checkpoint with a stored calibration, or None where int8 does not run."""
    try:
        check_int8()
    except ConfigError:
        return None
    checkpoint = Checkpoint.open(_intact(folder, "BertModel"))
    calibrated = CalibratedEncoder(
        lambda dtype: load_encoder(checkpoint, dtype, torch.device("cpu")), checkpoint
    )
    calibrate(calibrated, TEXTS).save(checkpoint.folder)
    return checkpoint.folder


def _damaged_copy(
    draw: random.Random, campaign: Campaign, intact: Path, only: str = ""
) -> tuple[Path, str]:
    """Return a copy of a checkpoint with one file damaged, and how."""
    copy = campaign.scratch / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(intact, copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    file = copy / only if only else draw.choice(files)
    return copy, f"{intact.name}: {damage(draw, file)}"


def _damage_cache(
    draw: random.Random,
    campaign: Campaign,
    report: Report,
    loader: Loader,
    intact: Sequence[Path],
    name: str,
) -> None:
    """Measure costs into a cache, damage it, and load again, which must work."""
    cache = campaign.scratch / "costs"
    shutil.rmtree(cache, ignore_errors=True)
    settings = {**_MEASURED, "cache_folder": str(cache)}
    first = loader.load(intact[0], settings)
    files = [path for path in cache.glob("*") if path.is_file()]
    if not files:
        report.ledger.report(f"{name}: no costs were stored: {first.text}")
        return
    how = damage(draw, draw.choice(files))
    end = loader.load(intact[0], settings)
    _add(report, name, "load_with_damaged_costs", how, end.must_serve(first))


def _damage_served(
    draw: random.Random, campaign: Campaign, report: Report, target: Target, intact: Path, name: str
) -> None:
    """Load a damaged checkpoint in the server; ask the model if it is served."""
    copy, how = _damaged_copy(draw, campaign, intact)
    repository = target.server.model_repository
    shutil.rmtree(repository / _SERVER_MODEL, ignore_errors=True)
    add_model(repository, _SERVER_MODEL, copy)
    reason = load(target.server, _SERVER_MODEL)
    if reason is not None:
        # the folder's name is in no message of ours
        end: End = (
            "wrong" if str(campaign.scratch) in reason or "log says why" in reason else "refused"
        )
        report.ledger.add(name, "load_served", Ending(end, message=f"{how}: {reason}"))
        return
    try:
        target.grpc.infer(_SERVER_MODEL, texts("the cat"))
    except AnswerError:
        report.count("served, and refused a request")
    report.ledger.add(name, "load_served", Ending("answered"))
    unload(target.server, _SERVER_MODEL)


def _add(report: Report, name: str, kind: str, how: str, end: Load) -> None:
    report.ledger.add(name, kind, end.ending(how))
