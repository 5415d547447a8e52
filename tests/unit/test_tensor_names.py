"""The rules that map names of stored tensors to weights, and back."""

import pytest

from ckdist.models.registry import family


@pytest.mark.parametrize(
    ("name", "stored", "weights"),
    [
        ("bert", "bert.encoder.layer.3.output.LayerNorm.bias", ["model.layers.4.input_layernorm.bias"]),
        ("bart", "model.encoder.layers.3.fc1.weight", ["encoder.layers.3.mlp.up_proj.weight"]),
        ("bart", "final_logits_bias", ["lm_head.bias"]),
        ("phi3", "model.layers.12.mlp.gate_up_proj.weight", ["mlp.gate_proj", "mlp.up_proj"]),
        ("llama", "model.language_model.norm.weight", ["model.norm.weight"]),
        ("roberta", "roberta.pooler.dense.weight", []),
        ("nomic_bert", "encoder.layers.01.norm1.weight", []),
        ("nomic_bert", "encoder.layers.{}.norm1.weight", []),
    ],
)
def test_a_rule_finds_the_weights_of_a_stored_name(name: str, stored: str, weights: list[str]) -> None:
    whole = [w if w.rpartition(".")[2] in ("weight", "bias") else f"model.layers.12.{w}.weight" for w in weights]
    assert list(family(name).safetensors.weights_of(stored)) == whole


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "deepseek_v3", "qwen3next", "minimax-m2", "olmo2"])
@pytest.mark.parametrize("form", ["safetensors", "gguf_names"])
def test_names_for_writing_are_read_as_the_same_weights(name: str, form: str) -> None:
    names = getattr(family(name), form)
    rules = [target for target in names.rules.values() if target]
    targets = [one for target in rules for one in ([target] if isinstance(target, str) else target)]
    stems = [target.format(7) for target in targets]
    weights = [stem if "dt_bias" in stem or "A_log" in stem or "sinks" in stem else f"{stem}.weight" for stem in stems]
    for stored, of in names.stored(weights).items():
        assert names.weights_of(stored) == of
