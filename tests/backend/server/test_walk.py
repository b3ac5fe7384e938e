"""The files that one step passes, and that a reader opens too.

A call counts with its file, a comprehension does not. A change of file is a call in another file than the call before.
"""

import json
import threading
from collections import defaultdict
from itertools import chain, pairwise
from pathlib import Path
from statistics import median_low

import pytest

import varlen
import varlen_kernels
from tests.backend.model_configs import model_config
from tests.backend.requests import text

_MODELS = Path(__file__).parents[3] / "model_repository"
_OURS = tuple(f"{each}/" for module in (varlen, varlen_kernels) for each in module.__path__)
_ENGINE = "scheduling/engine.py"

# Most files and changes of file: the figures of 2026-11-28 plus 10 %.
_BOUNDS = {
