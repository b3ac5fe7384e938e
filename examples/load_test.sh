#!/usr/bin/env bash
# Loads the demo models with perf_analyzer, as `make setup` installs it: closed loops of 1, 4 and 16 requests at a time.
# docs/operating/load_tests.md has genai-perf and aiperf, and says what the figures leave out.
#
#   examples/load_test.sh                      # ADDRESS=127.0.0.1:8001 WINDOW_MS=5000
set -euo pipefail

prompts=$(mktemp --suffix .json)
trap 'rm -f "$prompts"' EXIT
printf '{"data": [{"text_input": ["The list of"]}, {"text_input": ["A function that"]}]}' > "$prompts"

# The mean of three windows, however much they differ: -s 999.
load() {
    perf_analyzer -i grpc -u "${ADDRESS:-127.0.0.1:8001}" -p "${WINDOW_MS:-5000}" -s 999 "$@" | grep -E '  Throughput|p50|p99'
}

for concurrency in 1 4 16; do
    echo "minilm, $concurrency at a time"
    load -m minilm --concurrency-range "$concurrency"
    echo "tiny_gpt2, $concurrency at a time, streamed"
    load -m tiny_gpt2 --concurrency-range "$concurrency" --async --streaming --input-data "$prompts"
done
