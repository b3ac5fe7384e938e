"""Memory that really runs out, in a process of its own: the batch runs in parts, and every answer comes."""

import json
import subprocess
import sys

# One core, so that no library starts threads later; batches much larger than the warm-up, so that they need memory.
SCRIPT = """
import json, resource, sys
import numpy as np
from varlen import Encoder

encoder = Encoder.from_pretrained(
    sys.argv[1], device="cpu", dtype="fp32", threads=1, max_batch_tokens=200_000
)
numbers = np.random.default_rng(0)
rows = [numbers.integers(5, 50, length) for length in numbers.integers(1, 64, 4000)]
alone = np.stack([encoder.embed([row])[0] for row in rows[:50]])
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (16 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
answers = encoder.embed(rows)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
again = encoder.embed(rows)
encoder.close()
print(json.dumps({
    "rows": len(answers),
    "from_alone": float(abs(answers[:50] - alone).max()),
    "from_again": float(abs(answers - again).max()),
}))
"""


def test_a_batch_that_finds_no_memory_is_answered_in_parts(make_checkpoint):
    folder = make_checkpoint(hidden_size=96, num_hidden_layers=1)

    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "too little memory for a batch of 4000 sequences" in done.stderr
    found = json.loads(done.stdout)
    assert found["rows"] == 4000
    assert found["from_alone"] < 1e-6
    assert found["from_again"] < 1e-6
