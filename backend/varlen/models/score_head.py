"""The classifier on a decoder: one linear layer of the last or of every token.

Source of the names: decoders as saved by Hugging Face transformers.
"""

import torch

from varlen.models.checkpoint import Checkpoint
from varlen.models.decoder_fields import SCORE
from varlen.models.heads import Heads
from varlen.models.layers import LayerReader
from varlen.models.weights import CheckpointWeights


def load_score(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Heads:
    """Return the classifier of a checkpoint, if it has one.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or its values are no plain floats.
    """
    if not checkpoint.num_labels:
        return Heads()
    is_sequence = checkpoint.task == "classify"
    with CheckpointWeights(checkpoint.folder) as weights:
        # the row of a sequence is fp32
        read = LayerReader(weights, torch.float32 if is_sequence else dtype, device)
        layer = read.linear(
            [SCORE], checkpoint.hidden_size, [checkpoint.num_labels], bias=not is_sequence
        )
    return Heads(pooling="last", classifier=layer)
