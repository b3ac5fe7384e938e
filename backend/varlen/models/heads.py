"""The head of each task: the ops on top of an encoder's last hidden state."""

from dataclasses import dataclass

from varlen.config import Task
from varlen.models import inputs
from varlen.models.layers import Linear
from varlen.models.post_norm_family import HeadActivation
from varlen.program.program import Value
from varlen.program.recorder import Recorder
from varlen_kernels import Pooling


@dataclass(frozen=True, slots=True)
class Heads:
    """The layers that a checkpoint has on top of its encoder.

    Attributes:
        dense: the layer of a first token, in front of a classifier of sequences.
        activation: after that layer.
        classifier: `[hidden, labels]`, of sequences or of tokens.
    """

    dense: Linear | None = None
    activation: HeadActivation = "tanh"
    classifier: Linear | None = None


def record_head(ops: Recorder, task: Task, heads: Heads, hidden: Value, pooling: Pooling) -> Value:
    """Record the head of `task` and return its fp32 output.

    Args:
        ops: has recorded the encoder.
        task: the task of the model.
        heads: the layers that the checkpoint has.
        hidden: `[tokens, hidden]`, the encoder's last hidden state.
        pooling: how `embed` makes one vector of a sequence.

    Returns:
        embed `[sequences, hidden]`; hidden `[tokens, hidden]`; classify, rerank `[sequences, labels]`;
        token_classify `[tokens, labels]`.
    """
    if task == "hidden":
        return ops.to_fp32(hidden)
    if task == "embed":
        return ops.pool(hidden, inputs.cu_seqlens(ops), inputs.normalize(ops), mode=pooling)
    # Checkpoint.check_task has refused checkpoints without these layers
    assert heads.classifier is not None
    if task == "token_classify":
        return ops.to_fp32(heads.classifier.record(ops, hidden))
    assert heads.dense is not None
    first = ops.first_tokens(hidden, inputs.cu_seqlens(ops))
    x = heads.dense.record(ops, first)
    x = ops.tanh(x) if heads.activation == "tanh" else ops.activate(x, kind=heads.activation)
    return ops.to_fp32(heads.classifier.record(ops, x))
