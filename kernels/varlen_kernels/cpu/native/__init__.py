"""What compiled functions are made of: vectors, threads and the CPU they are compiled for."""
