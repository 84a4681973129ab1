"""Attaching a method to the attention of any Transformers model with Multi-head Latent Attention."""
