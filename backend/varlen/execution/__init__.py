"""How a batch runs on a device: packing, placement, worker threads and CUDA graphs."""
