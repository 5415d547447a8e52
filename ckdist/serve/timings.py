"""llama-server's `timings` object, which its web page, dashboards and benchmarks read."""


def timings_of(
    prompt_tokens: int, cached_tokens: int, prompt_seconds: float, tokens: int, seconds: float
) -> dict[str, float]:
    """Returns the `timings` object.

    `prompt_seconds` last from submit to the first token, including waiting; `seconds` from there to the last token.
    """
    computed = max(0, prompt_tokens - cached_tokens)
    return {
        "cache_n": cached_tokens,
        **_speed("prompt", computed, prompt_seconds),
        **_speed("predicted", tokens, seconds),
    }


def _speed(name: str, tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds > 0 else 0.0,
    }
