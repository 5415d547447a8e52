"""Limits of a grammar, for the process that checks it and for rank 0, which follows it."""

from llguidance import LLParserLimits

MAX_WHOLE = 512 << 10  # characters of a grammar, with the tools around it


def limits() -> LLParserLimits:
    """Limits of the work for one grammar and one token.

    They allow objects of 250 optional keys, or texts of some 10,000 counted characters. llguidance then keeps at most
    65 MB for one text.
    """
    return LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=25_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
