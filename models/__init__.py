"""A Flax NNX decoder with real weights: configs, checkpoints, tokenizers, chat templates.

The parts are imported by name; `jaxkv.models.loading.load_model` is the front door.
"""
