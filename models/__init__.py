"""A Flax NNX decoder with real weights: configs, checkpoints, tokenizers, chat templates.

The parts are imported by name; `models.loading.load_model` is the front door.
"""
