"""Workers of a CPU: threads, or processes whose faults stay theirs."""
