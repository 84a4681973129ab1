"""RoLaQ: 2-bit latent KV caches for Multi-head Latent Attention models."""
