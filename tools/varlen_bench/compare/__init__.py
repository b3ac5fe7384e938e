"""Engines beside each other on one machine: systems, rounds in turn, results, rows and tables."""
