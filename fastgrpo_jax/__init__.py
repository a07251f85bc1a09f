"""GRPO post-training in JAX with lossless, concurrency-aware speculative rollouts."""

__version__ = "0.1.0"
