"""A small language model with DeepSeek-V2's attention, trained from scratch, and its data."""
