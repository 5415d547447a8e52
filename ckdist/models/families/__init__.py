"""The families of models, one file each. `ckdist.models.registry` finds them."""
