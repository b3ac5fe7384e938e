"""Processes of measured systems; each imports only the libraries of its engine."""
