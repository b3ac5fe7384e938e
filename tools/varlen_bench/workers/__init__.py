"""Processes that each run one measured system; a process imports only the libraries of its engine."""
