"""The scheduler on a virtual clock: the engine's own code, with a model that takes the time a cost table says."""
