"""Thin command-line mains over the library: `python scripts` lists them."""
