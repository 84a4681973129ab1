"""Evaluation: what a quantized cache costs in accuracy, all methods side by side."""
