"""A tokenizer as GGUF has it, that llama.cpp loads."""


def byte_vocabulary(folder, size):
    """A vocabulary of bytes and nothing else, which llama.cpp loads."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += [f"▁{i}" for i in range(size - len(tokens))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (size - 259)]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.0] * size,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
