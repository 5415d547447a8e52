"""Reads requests: from the bytes of a body to token ids and sampling parameters for the engine.

All of it is a pure function of the body, the tokenizer and a few facts about the model. Nothing here knows HTTP,
sockets or the event loop, so that it can run in another process.
"""
