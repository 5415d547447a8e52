"""Converts text to token ids and back, and chats to text.

The `tokenizers` library does the work on vocabularies. Nothing here depends on the model.
"""
