"""What every benchmark shares: command line, provenance, CSV rows, worker processes, memory and machine speed."""
