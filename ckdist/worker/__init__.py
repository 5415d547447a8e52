"""The Python side of a rank: models that are loaded and unloaded while steps of others run."""
