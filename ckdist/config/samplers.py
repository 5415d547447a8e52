"""The samplers by name, in the order that they are applied in."""

# Under llama.cpp's names, in llama.cpp's default order.
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")

DRY_BREAKERS = ("\n", ":", '"', "*")


def sampler_list(text: str) -> tuple[str, ...]:
    """`top_k;temperature` as ("top_k", "temperature"); empty: no sampler."""
    names = tuple(part.strip() for part in text.split(";")) if text else ()
    for name in names:
        if name not in SAMPLERS:
            raise ValueError(f"has the unknown sampler '{name}'; the known ones are {', '.join(SAMPLERS)}")
    return names
