"""The device and the dtype that a model gets on this machine."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Thread

import torch

from varlen.config import Device, DType, EngineConfig
from varlen.errors import ConfigError
from varlen.memory.arena import memory_errors
from varlen.tasks import TASKS, Task
