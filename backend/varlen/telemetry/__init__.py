"""Metrics, and spans of requests for the server's tracing."""
