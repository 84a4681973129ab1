"""Hydra configs: one file per command, one folder per group."""
