"""Quantizer, rotations, methods, protection, adapters and the artifact: what every part agrees on."""
