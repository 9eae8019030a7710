"""The check of a real accelerator: `python scripts device check`."""
