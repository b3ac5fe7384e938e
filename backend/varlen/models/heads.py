"""What stands on top of an encoder: records the ops of a task's head."""

from varlen.config import Task
from varlen.errors import CheckpointError
from varlen.models.encoder import EncoderInputs
from varlen.models.families import EncoderWeights
from varlen.program.program import Recorder, Value
from varlen_kernels import Pooling


def apply_head(
    ops: Recorder,
    task: Task,
    weights: EncoderWeights,
    inputs: EncoderInputs,
    hidden: Value,
    pooling: Pooling,
) -> Value:
    """Record the head of `task` and return its fp32 output.

    Args:
        hidden: `[tokens, hidden]`, the encoder's last hidden state.
        pooling: how `embed` makes one vector of a sequence.

    Returns:
        embed `[sequences, hidden]`; hidden `[tokens, hidden]`; classify, rerank `[sequences, labels]`;
        token_classify `[tokens, labels]`.

    Raises:
        CheckpointError: the checkpoint lacks the layers of the task's head.
    """
    if task == "hidden":
        return ops.to_fp32(hidden)
    if task == "embed":
        return ops.pool(hidden, inputs.cu_seqlens, inputs.normalize, mode=pooling)
    classifier = weights.classifier
    if classifier is None:
        raise CheckpointError(f'task "{task}" needs a classifier, which the checkpoint lacks')
    if task == "token_classify":
        return ops.to_fp32(ops.linear(hidden, classifier.weight, classifier.bias))
    if weights.pooler is None:
        raise CheckpointError(f'task "{task}" needs a pooler, which the checkpoint lacks')
    first = ops.first_tokens(hidden, inputs.cu_seqlens)
    pooled = ops.tanh(ops.linear(first, weights.pooler.weight, weights.pooler.bias))
    return ops.to_fp32(ops.linear(pooled, classifier.weight, classifier.bias))
