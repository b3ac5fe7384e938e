"""What every benchmark shares: provenance, CSV rows, worker processes, accuracy, memory and machine speed."""
