"""Decoders and drafters as Flax modules, and the readers that fill them."""
