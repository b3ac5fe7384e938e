"""The functions that become machine code, by op."""
