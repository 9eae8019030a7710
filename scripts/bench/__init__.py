"""Benchmarks: `python scripts bench NAME`."""
