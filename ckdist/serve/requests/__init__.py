"""What a request asks for: from the bytes of its body to token ids and sampling that the engine takes.

All of it is a pure function of the body, the tokenizer and a few facts about the model; nothing here knows HTTP,
sockets or the event loop, so that it can run in another process.
"""
