"""The families of models, a file each; `ckdist.models.registry` finds them."""
