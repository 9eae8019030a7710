"""Studies of what compression costs: `python scripts tradeoff`, `heads` and `uptrain`."""
