"""Checkpoints in the formats of the peers, exported once and kept in a cache folder.

The ONNX graph has opset 23, where attention is one operator: onnxruntime runs it a quarter faster than the graph of
single matrix products. An export runs in a worker process: it prints much and keeps memory.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from varlen_bench.harness.machine import cpu_count
from varlen_bench.harness.worker import Message, WorkerError, ask_once, run_once
from varlen_bench.peers.checkpoints import load_encoder
from varlen_bench.peers.engines import EngineName, Precision, pad
from varlen_bench.peers.pooling import PoolingMode, pool_padded
from varlen_bench.workloads import token_ids
from varlen_kernels.cache_files import CacheFolder, cache_home

_MODULE = "varlen_bench.peers.exports"
_OPSET = 23
_TOOLS = {
    "onnxruntime": ("torch", "transformers", "onnx", "onnxruntime"),
    "ctranslate2": ("transformers", "ctranslate2"),
    "openvino": ("torch", "transformers", "openvino", "nncf"),
}
# Sequences of random tokens that show OpenVINO's quantization the range of activations.
_SAMPLES, _SHORTEST, _LONGEST = 128, 5, 500


def exported(
    model: Path, engine: EngineName, precision: Precision, pooling: PoolingMode = "mean"
) -> Path:
    """Return a checkpoint in the format of an engine: `model` itself, or a cached export.

    Raises:
        RuntimeError: the export failed; the message ends with its last line.
    """
    if engine not in _TOOLS:
        return model

    def make(folder: Path) -> None:
        argument = {"model": str(model), "target": str(folder), "engine": engine}
        argument |= {"precision": precision, "pooling": pooling}
        try:
            ask_once(_MODULE, argument, folder.with_name("log"), threads=cpu_count())
        except WorkerError as error:
            raise RuntimeError(f"export for {engine} failed: {error}") from error

    return cached(f"{_key(model, engine)}-{engine}-{precision}-{pooling}", make)


def _embedder(model: Path, pooling: PoolingMode) -> tuple[Any, dict[str, Any]]:
    """Return a module that embeds, and an example of its inputs.

    It makes pooled normalized vectors of ids and mask.
    """
    import torch

    class Embedder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = load_encoder(model, torch.float32, torch.device("cpu"), "sdpa")

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
            pooled = pool_padded(hidden, attention_mask, pooling)
            return torch.nn.functional.normalize(pooled, dim=-1)

    input_ids = torch.arange(14).reshape(2, 7)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, 5:] = 0
    return Embedder().eval(), {"input_ids": input_ids, "attention_mask": attention_mask}


def export_onnx(model: Path, folder: Path, precision: Precision, pooling: PoolingMode) -> None:
    """Write model.onnx: token ids and mask in, pooled normalized vectors out.

    int8 is onnxruntime's dynamic quantization of linear layers; int8-blocks has 8-bit weights with a scale for each
    block of them, MatMulNBits, at accuracy level 4: int8 products.
    """
    import torch

    from varlen.models.checkpoint_folder import Checkpoint

    embedder, inputs = _embedder(model, pooling)
    dims = {
        0: torch.export.Dim("batch", min=1, max=4096),
        1: torch.export.Dim("length", min=1, max=Checkpoint.open(model).position_limit),
    }
    folder.mkdir()
    plain = folder / "plain.onnx"
    torch.onnx.export(
        embedder,
        tuple(inputs.values()),
        str(plain),
        input_names=list(inputs),
        output_names=["sentence_embedding"],
        dynamo=True,
        opset_version=_OPSET,
        dynamic_shapes=dict.fromkeys(inputs, dims),
        external_data=False,
        verbose=False,
    )
    if precision == "int8":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(
            plain,
            folder / "model.onnx",
            # onnxruntime has an operator of its own that is also named Attention
            op_types_to_quantize=["MatMul"],
            weight_type=QuantType.QInt8,
            per_channel=True,
        )
        plain.unlink()
    elif precision == "int8-blocks":
        import onnx
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

        quantizer = MatMulNBitsQuantizer(onnx.load(plain), bits=8, block_size=32, accuracy_level=4)
        quantizer.process()
        quantizer.model.save_model_to_file(str(folder / "model.onnx"))
        plain.unlink()
    else:
        plain.rename(folder / "model.onnx")


def export_openvino(model: Path, folder: Path, precision: Precision, pooling: PoolingMode) -> None:
    """Write model.xml and model.bin: token ids and mask in, pooled normalized vectors out.

    int8 is NNCF's quantization after training of weights and activations, for transformers.
    """
    import openvino

    embedder, inputs = _embedder(model, pooling)
    converted = openvino.convert_model(embedder, example_input=inputs)
    if precision == "int8":
        import nncf

        converted = nncf.quantize(
            converted,
            nncf.Dataset(_samples(model), _as_inputs),
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=_SAMPLES,
        )
    openvino.save_model(converted, folder / "model.xml", compress_to_fp16=False)


def _samples(model: Path) -> list[list[int]]:
    from varlen.models.checkpoint_folder import Checkpoint

    checkpoint = Checkpoint.open(model)
    longest = min(_LONGEST, checkpoint.position_limit)
    lengths = np.linspace(min(_SHORTEST, longest), longest, _SAMPLES).astype(int).tolist()
    return token_ids(lengths, checkpoint.vocab_size, seed=0)


def _as_inputs(ids: list[int]) -> dict[str, npt.NDArray[np.int64]]:
    return dict(zip(("input_ids", "attention_mask"), pad([ids]), strict=True))


def convert_ctranslate2(model: Path, folder: Path, precision: Precision) -> None:
    """Write the CTranslate2 folder of a checkpoint."""
    from ctranslate2.converters import TransformersConverter
    from transformers import PretrainedConfig

    # the converter reads this field, which transformers 5 no longer has: all positions are absolute now
    if not hasattr(PretrainedConfig, "position_embedding_type"):
        PretrainedConfig.position_embedding_type = "absolute"
    quantization = "int8" if precision == "int8" else None
    TransformersConverter(str(model)).convert(str(folder), quantization=quantization)


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache of exports and random checkpoints; `make` writes it once."""
    target = cache_home() / "varlen" / "bench_encoder" / name
    CacheFolder(target.parent).make()
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            make(Path(scratch, "made"))
            shutil.move(Path(scratch, "made"), target)
    return target


def _key(model: Path, engine: EngineName) -> str:
    """Return a hash of the checkpoint's files, the versions of the tools and this file."""
    files = [*sorted(model.glob("*.safetensors")), model / "config.json"]
    stamps = [f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    tools = [f"{tool} {_version(tool)}" for tool in _TOOLS[engine]]
    source = Path(__file__).read_text(encoding="utf-8")
    return hashlib.sha256("\n".join([*stamps, *tools, source]).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        message = "install the extra bench of varlen: pip install '.[bench]'"
        raise RuntimeError(f"{package} is not installed; {message}") from error


def export(argument: Message) -> Message:
    """Write the export that `exported` asks for."""
    model, target = Path(argument["model"]), Path(argument["target"])
    engine, precision = argument["engine"], argument["precision"]
    if engine == "ctranslate2":
        convert_ctranslate2(model, target, precision)
    else:
        write = export_onnx if engine == "onnxruntime" else export_openvino
        write(model, target, precision, argument["pooling"])
    return {}


if __name__ == "__main__":
    run_once(export)
