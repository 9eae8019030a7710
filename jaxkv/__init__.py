"""The KV cache of transformer decoding, as a JAX array program.

The parts are imported by name: `jaxkv.cache` (device state), `jaxkv.attention` (reading it),
`jaxkv.prefix` (host tables, no jax), `jaxkv.engine` (serving a model), `jaxkv.ledger` (what the
cache of a model comes to; no jax).
"""
