"""Writes a stock ensemble: a tokenizer and an ONNX encoder, with dynamic batching."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer

from varlen.models.checkpoint.files import TOKENIZER, read_bytes
from varlen.models.checkpoint_folder import Checkpoint

NAME = "stock"
_TOKENIZER_MODEL = Path(__file__).with_name("tokenizer_model.py")
# The batcher joins requests of equal shape: texts that were tokenized, and so padded, together.
_BATCHING = """max_batch_size: 16
dynamic_batching { }
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
_TOKENIZER = (
    'backend: "python"\n'
    + _BATCHING
    + """input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [
  { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }
]
"""
)
_ENCODER = 'platform: "onnxruntime_onnx"\n' + _BATCHING
_ENSEMBLE = """platform: "ensemble"
max_batch_size: 16
input [ {{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "sentence_embedding" data_type: TYPE_FP32 dims: [ {hidden} ] }} ]
ensemble_scheduling {{ step [
  {{ model_name: "tokenizer" model_version: -1
    input_map {{ key: "TEXT" value: "TEXT" }}
    output_map {{ key: "input_ids" value: "ids" }}
    output_map {{ key: "attention_mask" value: "mask" }} }},
  {{ model_name: "encoder" model_version: -1
    input_map {{ key: "input_ids" value: "ids" }}
    input_map {{ key: "attention_mask" value: "mask" }}
    output_map {{ key: "sentence_embedding" value: "sentence_embedding" }} }}
] }}
"""


def write_stock_ensemble(repository: Path, checkpoint: Checkpoint, onnx: Path) -> None:
    """Write the ensemble and its two steps.

    Args:
        repository: an empty folder, or one that is not there.
        onnx: the encoder: token ids and mask in, `sentence_embedding` out.
    """
    for name, config in (
        ("tokenizer", _TOKENIZER),
        ("encoder", _ENCODER),
        (NAME, _ENSEMBLE.format(hidden=checkpoint.embedding_size)),
    ):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config, encoding="utf-8")
    shutil.copyfile(_TOKENIZER_MODEL, repository / "tokenizer/1/model.py")
    tokenizer = Tokenizer.from_buffer(read_bytes(checkpoint.folder, TOKENIZER))
    # the file may cut texts earlier than the model does
    tokenizer.enable_truncation(checkpoint.max_sequence_tokens)
    tokenizer.save(str(repository / "tokenizer/1" / TOKENIZER))
    (repository / "encoder/1/model.onnx").symlink_to(onnx.resolve())
