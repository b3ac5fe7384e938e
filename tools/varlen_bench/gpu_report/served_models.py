"""The models of the server of a GPU report: random checkpoints in a model repository."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from varlen_bench.fidelity.tokenizers import write_tokenizer
from varlen_bench.gpu_report.decoders import save_random_llama
from varlen_bench.gpu_report.figures import Figure, figure
from varlen_bench.kernels.machine import Budget
from varlen_bench.peers.checkpoints import (
    BERT_BASE,
    GPT2_SMALL,
    MINILM,
    EncoderShape,
    GeneratorShape,
    save_random_checkpoint,
    save_random_decoder,
    save_random_translator,
)
from varlen_tools.bundle import sources_hash
from varlen_tools.unbundle import read_manifest

DeviceType: TypeAlias = Literal["cuda", "cpu"]
Task: TypeAlias = Literal["embed", "generate", "translate"]
BIG = "big"
# Transformer-big models on one card: LightSeq's claim for a T4.
EIGHT = 8
_POSITIONS = 512
# Sizes of a rehearsal on a CPU.
_TINY_ENCODER = EncoderShape("tiny", hidden=32, layers=1, heads=2, features=64, vocabulary=300)
_TINY_GENERATOR = GeneratorShape("tiny", 32, 1, 2, positions=256, vocabulary=300)
_TINY_LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": 300,
}
_TRANSFORMER_BIG = GeneratorShape("big", 1024, 6, 16, positions=_POSITIONS, vocabulary=32_000)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of the repository.

    Attributes:
        save: saves its checkpoint in a folder.
        settings: parameters of its config.pbtxt, beside the common ones.
        kind: kind of its instance; with KIND_CPU the setting `device` names the GPU.
    """

    task: Task
    save: Callable[[Path], None]
    settings: Mapping[str, str] = field(default_factory=dict)
    kind: str = "KIND_CPU"


@dataclass(frozen=True, slots=True)
class Served:
    """What the stages of a server share.

    Attributes:
        folder: the model repository, the environment of the bundle, and answers of the server.
        device: "cpu": a rehearsal with small shapes and short loads.
        bundle: file of `make bundle`; None: this Python's own environment has the server.
    """

    folder: Path
    device: DeviceType
    budget: Budget
    bundle: Path | None = None

    @property
    def repository(self) -> Path:
        """The folder of the models."""
        return self.folder / "models"

    @property
    def environment(self) -> Path:
        """The folder that the bundle is unpacked into."""
        return self.folder / "environment"

    @property
    def answers(self) -> Path:
        """The file with answers of the server, which are compared with transformers."""
        return self.folder / "answers.json"

    @property
    def is_small(self) -> bool:
        """Whether this is a rehearsal."""
        return self.device == "cpu"

    @property
    def dtype(self) -> str:
        """The dtype of all models."""
        return "fp32" if self.is_small else "bf16"


def served_models(device: DeviceType) -> dict[str, ServedModel]:
    """Return the models by name, the most important first."""
    tiny = device == "cpu"

    def encoder(shape: EncoderShape) -> Callable[[Path], None]:
        return partial(_save_encoder, _TINY_ENCODER if tiny else shape)

    def generator(
        save: Callable[[GeneratorShape, Path], None], shape: GeneratorShape
    ) -> Callable[[Path], None]:
        return partial(save, _TINY_GENERATOR if tiny else shape)

    gpt2 = generator(save_random_decoder, GPT2_SMALL)
    lengths = {} if tiny else {"max_sequence_tokens": "1024"}
    return {
        "minilm": ServedModel("embed", encoder(MINILM)),
        "gpt2_small": ServedModel("generate", gpt2, lengths),
        "llama_1b": ServedModel(
            "generate",
            partial(save_random_llama, device=device, **(_TINY_LLAMA if tiny else {})),
            {"max_sequence_tokens": "256" if tiny else "1024"},
        ),
        "bert_base": ServedModel("embed", encoder(BERT_BASE)),
        BIG: ServedModel("translate", generator(save_random_translator, _TRANSFORMER_BIG)),
        # models of their own, so that a fault costs nothing else
        "minilm_growing": ServedModel("embed", encoder(MINILM), {"growing_arena": "true"}),
        "gpt2_of_server": ServedModel(
            "generate", gpt2, lengths, "KIND_CPU" if tiny else "KIND_GPU"
        ),
    }


def write_repository(served: Served) -> Iterator[Figure]:
    """Write all models, and unpack the bundle meanwhile; yield what each took.

    Raises:
        RuntimeError: the bundle has other sources than this tree, or cannot be unpacked here.
    """
    began = time.perf_counter()
    unpacking = _unpack(served)
    for name, model in served_models(served.device).items():
        start = time.perf_counter()
        checkpoint = served.repository / name / "1"
        checkpoint.mkdir(parents=True)
        model.save(checkpoint)
        config = config_of(model, served)
        (served.repository / name / "config.pbtxt").write_text(config, encoding="utf-8")
        if name == BIG:
            _copy_by_link(served.repository, config)
        yield figure("models", name, "checkpoint", time.perf_counter() - start, "s")
    if unpacking is not None:
        said, _ = unpacking.communicate()
        if unpacking.returncode:
            raise RuntimeError(said.strip())
        yield figure("models", "bundle", "ready after", time.perf_counter() - began, "s")


def config_of(model: ServedModel, served: Served) -> str:
    """Return the config.pbtxt of a model; the server completes its tensors."""
    settings = {
        "task": model.task,
        "device": served.device,
        "dtype": served.dtype,
        "warmup_seconds": "0" if served.is_small else "3",
        **({} if model.task == "embed" else _step_settings(served)),
        **model.settings,
    }
    lines = ['backend: "varlen"', f"instance_group [ {{ count: 1 kind: {model.kind} }} ]"]
    lines += [
        f'parameters {{ key: "{key}" value: {{ string_value: {json.dumps(value)} }} }}'
        for key, value in settings.items()
    ]
    return "\n".join(lines) + "\n"


def _step_settings(served: Served) -> dict[str, str]:
    # eight models share one GPU
    return {
        "kv_bytes": "2000000" if served.is_small else "4000000000",
        "max_running_sequences": "8" if served.is_small else "64",
    }


def _save_encoder(shape: EncoderShape, folder: Path) -> None:
    """Save a random BERT with a tokenizer whose words are tokens."""
    save_random_checkpoint(shape, folder, _POSITIONS, scale=2)
    write_tokenizer(folder, "wordpiece", {"model_max_length": _POSITIONS})


def _copy_by_link(repository: Path, config: str) -> None:
    """Add the same translator under further names."""
    for number in range(2, EIGHT + 1):
        other = repository / f"{BIG}_{number}"
        other.mkdir()
        (other / "1").symlink_to(Path("..", BIG, "1"))
        (other / "config.pbtxt").write_text(config, encoding="utf-8")


def _unpack(served: Served) -> subprocess.Popen[str] | None:
    """Start to unpack the bundle, if there is one."""
    if served.bundle is None:
        return None
    with zipfile.ZipFile(served.bundle) as archive:
        found = read_manifest(archive).get("sources")
    if found != sources_hash():
        raise RuntimeError(f"{served.bundle} has other sources than this tree: make bundle")
    command = [sys.executable, str(served.bundle), str(served.environment)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
