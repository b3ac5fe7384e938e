"""What a checkpoint folder holds, read without importing torch."""
