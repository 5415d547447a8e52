"""From files to packed batches: `documents` reads, `cache` stores tokens, `rows` packs and shuffles, `batches` deals to
ranks.
"""
