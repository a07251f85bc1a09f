"""Benches: python -m fastgrpo_jax.bench SUITE --out=FILE.json [--model=M] [--quick] ..."""
