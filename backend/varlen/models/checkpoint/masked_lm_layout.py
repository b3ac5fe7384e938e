"""The head of a masked language model: its tensors in a checkpoint.

A dense layer, an activation and a norm make a row of each token; its product with a table gives a logit for each term
of the vocabulary. Mostly that table is the one of the token embeddings.
"""

from collections.abc import Container
from dataclasses import dataclass

from varlen.errors import CheckpointError
from varlen_kernels import Activation


@dataclass(frozen=True, slots=True)
class MaskedLMNames:
    """Names of the head's tensors.

    Attributes:
        dense, norm: the layers in front of the product.
        decoder: the product; its weight is stored if it is not the table of embeddings.
        biases: names that the bias of the product may have; the last one is its own, if the table is too.
        activation: activation between dense layer and norm; None for the encoder's.
    """

    dense: str
    norm: str
    decoder: str
    biases: tuple[str, ...]
    activation: Activation | None = None


@dataclass(frozen=True, slots=True)
class MaskedLMLayout:
    """The head of one checkpoint.

    Attributes:
        features: features of a row in front of the product.
        activation: between dense layer and norm.
        norm_eps: added to the variance.
        is_tied: whether the product reads the table of token embeddings.
        has_dense_bias, has_norm_bias, has_bias: whether dense layer, norm and product have a bias.
    """

    names: MaskedLMNames
    hidden: int
    features: int
    vocabulary: int
    activation: Activation
    norm_eps: float
    is_tied: bool
    has_dense_bias: bool = True
    has_norm_bias: bool = True
    has_bias: bool = True

    def bias_name(self, stored: Container[str]) -> str | None:
        """Return the name of the product's bias, None if it has none.

        Raises:
            CheckpointError: it is missing.
        """
        if not self.has_bias:
            return None
        names = self.names.biases if self.is_tied else self.names.biases[::-1]
        found = next((name for name in names if name in stored), None)
        if found is None:
            raise CheckpointError(f'the checkpoint has no tensor "{self.names.biases[0]}"')
        return found
