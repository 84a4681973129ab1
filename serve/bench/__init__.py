"""Measures serving against BF16, and proves it: speed, parity, tensor parallelism, load and faults."""
