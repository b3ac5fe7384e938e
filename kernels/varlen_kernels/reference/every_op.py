# mypy: implicit-reexport
# ruff: noqa: F403  # the ops
"""The names of all ops: each group says which ones it has."""

from varlen_kernels.reference.attention import *
from varlen_kernels.reference.beam import *
from varlen_kernels.reference.beam_search import *
from varlen_kernels.reference.extraction import *
from varlen_kernels.reference.few_rows import *
from varlen_kernels.reference.groups import *
from varlen_kernels.reference.linear_layers import *
from varlen_kernels.reference.logit_edits import *
from varlen_kernels.reference.norm import *
from varlen_kernels.reference.paged import *
from varlen_kernels.reference.pooling import *
from varlen_kernels.reference.ranks import *
from varlen_kernels.reference.sampling import *
from varlen_kernels.reference.vocabulary import *
from varlen_kernels.vector_ops import *
