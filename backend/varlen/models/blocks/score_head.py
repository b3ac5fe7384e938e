"""The classifier on a decoder: one linear layer, or the difference of two logits.

Source of the names: decoders as saved by Hugging Face transformers.
"""

import torch

from varlen.models.blocks.heads import Heads
from varlen.models.checkpoint.decoder_fields import SCORE
from varlen.models.checkpoint.layers import LayerReader, Linear
from varlen.models.checkpoint.logit_score import LogitScore
from varlen.models.checkpoint.weights import CheckpointWeights
from varlen.models.checkpoint_folder import Checkpoint
from varlen.models.llama_checkpoint import LlamaConfig, prefix_of


def load_score(checkpoint: Checkpoint, device: torch.device) -> Heads:
    """Return the classifier of a checkpoint in fp32, if it has one.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or its values are no plain floats.
    """
    if checkpoint.logit_score is not None:
        return _load_logit_score(checkpoint, checkpoint.logit_score, device)
    if not checkpoint.num_labels:
        return Heads()
    is_sequence = checkpoint.head_task == "classify"
    with CheckpointWeights(checkpoint.folder) as weights:
        read = LayerReader(weights, torch.float32, device)
        layer = read.linear(
            [SCORE], checkpoint.hidden_size, [checkpoint.num_labels], bias=not is_sequence
        )
    return Heads(pooling="last", classifier=layer)


def _load_logit_score(checkpoint: Checkpoint, score: LogitScore, device: torch.device) -> Heads:
    """Return the layer whose output is the difference of two logits of the last token."""
    config = LlamaConfig.read(checkpoint.config)
    with CheckpointWeights(checkpoint.folder) as weights:
        name = f"{prefix_of(weights)}embed_tokens.weight"
        if not config.has_tied_output:
            name = "lm_head.weight"
        matrix = weights.read(name, config.vocab_size, config.hidden)
        row = matrix[score.true_token].float()
        if score.false_token is not None:
            row = row - matrix[score.false_token].float()
        # a copy: the file is not mapped any longer than this
        weight = row.reshape(-1, 1).clone().to(device)
    return Heads(pooling="last", classifier=Linear(weight, None))
