"""`python scripts` lists the commands: those of `jaxkv`, benchmarks, device checks and studies."""
