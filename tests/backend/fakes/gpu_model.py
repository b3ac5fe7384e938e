"""A model on a virtual GPU: engine, scheduler, executor and packing are real."""

import math

from varlen.execution.cuda.runner import CudaRunner
from varlen.execution.executor import OverlappingExecutor, with_timeout
from varlen.request.request import Request, RequestOptions
from varlen.scheduling.engine import Engine
from varlen.telemetry.metrics import Stats

from ..requests import random_prompts
from ..scheduling.one_shot.waiting import cost_table, make_scheduler
from .engine_parts import FakeReply
from .virtual_gpu import SECONDS

MAX_TOKENS = 32
# Virtual time of a batch on the GPU, and of packing it.
RUN, COPY, PACK = 2e-3, 1e-4, 5e-4
NORMALIZED = RequestOptions(normalize=True)


class Launcher:
    """Starts batches on the virtual GPU; packing takes virtual time."""

    def __init__(self, state, gpu, slots=CudaRunner.slots):
        self.slots = slots
        self.state = state
        self.gpu = gpu
        self.batches = []

    def launch_batch(self, batch):
        self.gpu.clock.now += PACK
        self.batches.append(batch)
        prompts = [each.prompt for each in batch.sequences]
        return self.state.launch(prompts, [each.options for each in batch.sequences])

    def check(self):
        if self.gpu.lost:
            raise self.gpu.lost


class GpuModel:
    """An engine over the virtual GPU, stepped by hand."""

    def __init__(self, state, gpu, *, slots=2, seconds=RUN + 2 * COPY, timeout=0.0):
        self.gpu, self.clock = gpu, gpu.clock
        self.launcher = Launcher(state, gpu, slots)
        self.executor = with_timeout(OverlappingExecutor(self.launcher, gpu.clock), timeout)
        costs = cost_table(lambda *_: seconds, max_length=MAX_TOKENS)
        scheduler = make_scheduler(costs, MAX_TOKENS, policy="token_budget")
        self.engine = Engine(scheduler, self.executor, Stats(), gpu.clock)
        self.replies = []

    def submit(self, *lengths, seed=0):
        prompts = tuple(random_prompts(lengths, seed=seed, types=2))
        self.replies.append(FakeReply())
        self.engine.submit(Request(prompts, NORMALIZED), self.replies[-1])
        return prompts

    def play(self, arrivals=()):
        """Run until all is answered; arrivals are times and what to call then, in order."""
        arrivals = list(arrivals)
        while True:
            wake_at = self.engine.step()
            if self.drain():
                continue
            arrival = arrivals[0][0] if arrivals else math.inf
            wake_at = math.inf if wake_at is None else wake_at
            now = min(wake_at, arrival, *self.gpu.ends)
            if math.isinf(now):
                return
            self.clock.now = max(self.clock.now, now)
            while arrivals and arrivals[0][0] <= self.clock.now:
                arrivals.pop(0)[1]()
            self.gpu.run_until(self.clock.now)
            self.drain()

    def drain(self):
        """Pass on batches that ended; return whether there were any."""
        ended = self.engine._in_flight - len(self.gpu.ends)
        for _ in range(ended):
            self.engine._handle(self.engine._inbox.get(timeout=SECONDS))
        return ended > 0
