"""The benchmark of faults: what callers of two replicas see of a killed process."""
