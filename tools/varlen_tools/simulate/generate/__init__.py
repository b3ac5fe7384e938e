"""The simulator of generation: the iteration scheduler and KV blocks on a virtual clock."""
