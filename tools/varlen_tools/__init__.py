"""Tools around varlen: set up a server, fetch checkpoints, demo, benchmarks; nothing imports them."""
