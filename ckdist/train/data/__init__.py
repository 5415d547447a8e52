"""From a person's files to packed batches: `documents` reads, `cache` keeps tokens, `rows` cuts and shuffles,
`batches` deals to ranks.
"""
