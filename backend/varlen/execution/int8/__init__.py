"""Models in int8: calibration, quantization and the quality of their answers."""
