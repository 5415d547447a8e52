"""The names of the samplers, in their default order."""

# llama.cpp's names and default order.
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")

DRY_BREAKERS = ("\n", ":", '"', "*")


def sampler_list(text: str) -> tuple[str, ...]:
    """Parses `top_k;temperature` as ("top_k", "temperature"). An empty text means no sampler."""
    names = tuple(part.strip() for part in text.split(";")) if text else ()
    for name in names:
        if name not in SAMPLERS:
            raise ValueError(f"has the unknown sampler '{name}'; the known ones are {', '.join(SAMPLERS)}")
    return names
