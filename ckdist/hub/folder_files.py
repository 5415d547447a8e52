"""Names of the files in a folder with a model."""

CONFIG, SINGLE_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
BESIDE = (  # files of a folder that may be missing
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model",
    "tiktoken.model", "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "spiece.model", "source.spm", "target.spm", "modules.json", "1_Pooling/config.json",
    "sentence_bert_config.json", INDEX_FILE, "quantize_config.json", "quant_config.json", "hf_quant_config.json",
    *(f"{i}_Dense/{file}" for i in (2, 3) for file in (CONFIG, SINGLE_FILE)),
)  # fmt: skip
