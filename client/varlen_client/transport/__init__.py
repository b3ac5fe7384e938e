"""Connections to a server, over gRPC and HTTP."""
