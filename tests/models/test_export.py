"""Export as GGUF: the gguf package and llama.cpp read it, and both continue a text as ckdist does."""

import dataclasses
import importlib
import importlib.util
import json
import os
import pathlib
import shutil
from statistics import NormalDist

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, normalizers, trainers

from ckdist import LLM, SamplingParams
from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import BUNDLED, load_model
from ckdist.engine.single import SingleSequence
from ckdist.errors import ArchitectureError, ConfigError, EngineError, ModelFileError
from ckdist.models.decoder import weight_shapes
from ckdist.models.registry import family as family_of
from ckdist.models.registry import spec_from_config
from ckdist.tokens.tokenizer_folder import load_tokenizer
from ckdist.tokens.tokenizer_from_gguf import tokenizer_from_gguf
from ckdist.tokens.tokenizer_source import tokenizer_of
from ckdist.tokens.tokenizer_to_gguf import PROBES, tokenizer_metadata
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.gguf_export import export_gguf, write_model
from ckdist.weights.gguf_writer import write_gguf
from tests.support.byte_vocabulary import byte_vocabulary
from tests.support.llama_cpp_peer import load_peer
from tests.support.paths import GOLDEN

MIXTURES = ["bailing_moe_v2", "dots1", "ernie4_5_moe", "exaone_moe", "granitemoe", "hunyuan_v1_moe", "hy_v3", "mellum"]
MIXTURES += ["mistral4", "qwen3vlmoe", "afmoe", "laguna", "step3p5", "minimax_m3", "dots3_note"]
DENSE = ["cohere2", "ernie4_5", "exaone4", "gemma", "gemma3n", "hunyuan_v1_dense", "ministral3", "qwen25vl", "qwen3vl"]
DENSE += ["seed_oss", "arcee", "granite_swa", "jais2"]
HYBRID = ["granite4h", "granite4h_dense", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"]
HYBRID += ["jamba", "falcon_mamba", "glm5_next"]
# Of prompts whose greedy tokens are no near ties: the engines round activations differently, which moves logits by some
# hundredths.
PROMPTS = ["try:\n    import", "    def __init__(self", "What does json.dumps do?"]


@pytest.fixture(scope="module", params=["f16", "q8_0", "q4_k"])
def exported(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / f"{request.param}.gguf"
    assert export_gguf(str(BUNDLED), str(path), request.param) == path.stat().st_size
    return request.param, path


def test_what_is_written_is_the_model(exported):
    kind, path = exported
    before, after = open_checkpoint(BUNDLED), open_checkpoint(path)
    assert (
        after.spec.max_position == before.spec.max_position
        and after.spec.tie_embeddings
        and after.spec.layers == before.spec.layers
    )
    frequencies = [one.spec.ropes["global"].inverse_frequencies for one in (after, before)]
    np.testing.assert_allclose(*frequencies, rtol=1e-6)
    for name in (
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.norm.weight",
    ):
        a, b = read_tensor(before.tensors[name]), read_tensor(after.tensors[name])
        assert np.linalg.norm(a - b) <= {"f16": 4e-4, "q8_0": 6e-3, "q4_k": 0.09}[kind] * np.linalg.norm(a), name
    ours, theirs = load_tokenizer(BUNDLED), tokenizer_of(path)
    assert all(ours.encode(text) == theirs.encode(text) for text in [*PROBES, *PROMPTS])
    assert ours.eos_token_ids == theirs.eos_token_ids and theirs.chat_template.sources == ours.chat_template.sources
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    assert (
        len(reader.tensors) == len(before.tensors) - 1 and reader.fields["general.architecture"].contents() == "llama"
    )


def test_llama_cpp_continues_with_the_same_text(exported, monkeypatch):
    _, path = exported
    peer, own = load_peer(path, monkeypatch, n_ctx=256), LLM(str(path), threads=1)
    texts = [result.text for result in own.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0))]
    assert [peer(prompt, max_tokens=24, temperature=0)["choices"][0]["text"] for prompt in PROMPTS] == texts
    assert any(texts)


@pytest.mark.parametrize(
    "family", ["llama2", "llama3", "gemma2", "gemma3", "mixtral", "qwen2", "qwen3", *DENSE, *MIXTURES, *HYBRID]
)
def test_every_family_comes_back_as_it_was(family, tmp_path, monkeypatch):
    monkeypatch.setattr("ckdist.weights.gguf_export.tokenizer_metadata", lambda *_: {})  # the golden models have none
    before = open_checkpoint(GOLDEN / family)
    try:
        export_gguf(str(GOLDEN / family), str(tmp_path / "m.gguf"), "f32")
    except ArchitectureError as error:
        assert "has no GGUF form" in str(error)
        return
    after = open_checkpoint(tmp_path / "m.gguf")
    assert list(after.spec.ropes) == list(before.spec.ropes)
    for name, rope in before.spec.ropes.items():
        again = after.spec.ropes[name]
        np.testing.assert_allclose(again.inverse_frequencies, rope.inverse_frequencies, rtol=1e-5)
        assert again.magnitude == pytest.approx(rope.magnitude) and again.interleaved == rope.interleaved
        assert (again.long is None) == (rope.long is None) and again.original_context == rope.original_context
    for name, source in before.tensors.items():
        again, wanted = read_tensor(after.tensors[name]), read_tensor(source)
        exact = not name.endswith("A_log")  # GGUF has -exp(A_log)
        np.testing.assert_allclose(again, wanted, rtol=0 if exact else 1e-6, atol=0 if exact else 2e-7, err_msg=name)
    assert rounded(dataclasses.replace(after.spec, ropes={})) == rounded(dataclasses.replace(before.spec, ropes={}))


def test_kimi_k3_has_products_of_vectors_and_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr("ckdist.weights.gguf_export.tokenizer_metadata", lambda *_: {})
    folder, path, again = GOLDEN / "kimi_k3", tmp_path / "m.gguf", tmp_path / "again.gguf"
    export_gguf(str(folder), str(path), "f32")
    write_model(open_checkpoint(path), str(again), "f32")
    assert open_checkpoint(again).spec.layers == open_checkpoint(path).spec.layers
    types = {"cache_type_k": "f32", "cache_type_v": "f32"}
    model = load_model(EngineConfig(model=str(again), threads=1, ctx_size=64, **types), SingleWorld())
    logits = SingleSequence(model.executable).feed(np.load(folder / "ids.npy"), outputs="all")
    model.close()
    np.testing.assert_allclose(logits, np.load(folder / "logits.npy"), atol=1e-4)  # llama.cpp's


def rounded(value):
    """A spec whose numbers have the digits that float32 keeps."""
    if dataclasses.is_dataclass(value):
        return tuple(rounded(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, tuple):
        return tuple(map(rounded, value))
    return float(np.float32(value)) if isinstance(value, float) else value


def changed(tmp_path, **fields) -> pathlib.Path:
    """The bundled model with other fields in its config.json."""
    folder = shutil.copytree(BUNDLED, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_yarn_is_llama_cpps(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "attention_factor": 1.3}
    folder, path = changed(tmp_path, rope_scaling=scaling), tmp_path / "yarn.gguf"
    export_gguf(str(folder), str(path), "f32")
    before, after = (open_checkpoint(at).spec.ropes["global"] for at in (folder, path))
    np.testing.assert_allclose(after.inverse_frequencies, before.inverse_frequencies, rtol=1e-6)
    assert after.magnitude == pytest.approx(before.magnitude, rel=1e-6) == pytest.approx(1.3)
    with pytest.raises(ArchitectureError, match="truncate false"):
        export_gguf(str(changed(tmp_path / "finer", rope_scaling=scaling | {"truncate": False})), str(path), "f32")
    llama_cpp = pytest.importorskip("llama_cpp")
    peer, own = (
        llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, verbose=False, logits_all=True),
        LLM(str(path), threads=1),
    )
    prompt = own.tokenizer.encode("import os\n\nclass Foo(object):\n    def main(self):\n" * 6)
    (scored,) = own.generate([prompt], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    peer.eval(prompt)
    logits = np.asarray(peer.scores[: len(prompt)], np.float64)  # (tokens, vocab)
    expected = [
        row[token] - np.log(np.exp(row - row.max()).sum()) - row.max()
        for row, token in zip(logits[:-1], prompt[1:], strict=True)
    ]
    np.testing.assert_allclose([entry[0] for entry in scored.prompt_logprobs[1:]], expected, atol=0.005)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_windows_that_readers_would_not_honour_are_refused(family):
    spec = open_checkpoint(GOLDEN / "llama2").spec
    first, *others = spec.layers
    slides = dataclasses.replace(first, mixer=dataclasses.replace(first.mixer, window=64))
    spec = dataclasses.replace(spec, family=family, layers=(slides, *others))
    with pytest.raises(ArchitectureError, match=r"^here: .* sliding window \(64\).*; set "):
        family_of(family).gguf_form(spec, "here")


def test_a_sentencepiece_vocabulary(tmp_path):
    """Llama 2's kind: pieces with a visible space, bytes for what has none."""
    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_of = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *bytes_of], max_token_length=8, show_progress=False
    )
    made.train_from_iterator([pathlib.Path(__file__).read_text(), *PROBES[:2]], trainer)
    described = json.loads(made.to_str())
    # they are pieces like the others
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] not in bytes_of]
    described["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "LlamaTokenizer",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "add_bos_token": True,
            }
        )
    )
    tokenizer = load_tokenizer(tmp_path)
    metadata = tokenizer_metadata(tmp_path, 704)
    assert metadata["tokenizer.ggml.model"] == "llama" and len(metadata["tokenizer.ggml.scores"]) == 704
    again = tokenizer_from_gguf(metadata)
    for text in (*PROBES, *PROMPTS, " a  b", "日本語 🙂"):
        assert again.encode(text) == tokenizer.encode(text), text
    if llama_cpp := importlib.util.find_spec("llama_cpp") and importlib.import_module("llama_cpp"):
        form = family_of("llama").gguf_form(open_checkpoint(GOLDEN / "llama2").spec, "llama2")
        write_gguf(tmp_path / "v.gguf", {**form.metadata, **metadata}, [])
        peer = llama_cpp.Llama(str(tmp_path / "v.gguf"), vocab_only=True, verbose=False)
        for text in (*PROBES, *PROMPTS):
            assert peer.tokenize(text.encode(), add_bos=True, special=False) == tokenizer.encode(text), text


def test_mistakes(tmp_path):
    with pytest.raises(ConfigError, match="is a folder: name the file"):
        export_gguf(str(BUNDLED), str(tmp_path), "f16")
    os.mkfifo(fifo := tmp_path / "fifo")
    with pytest.raises(ConfigError, match="fifo: it is a FIFO, not a regular file"):
        export_gguf(str(BUNDLED), str(fifo), "f16")
    with pytest.raises(EngineError, match="could not be written: No such file"):
        export_gguf(str(BUNDLED), str(tmp_path / "none" / "m.gguf"), "f16")
    with pytest.raises(ModelFileError, match="the tokenizer has 4096 tokens, and the model 7"):
        tokenizer_metadata(BUNDLED, 7)


SIZES = {
    "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "num_hidden_layers": 4, "vocab_size": 300, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 5.0]}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 1.2079441541679836,
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
LATENT = {
    "kv_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
NEW = {
    "Phi3": {"original_max_position_embeddings": 64, "partial_rotary_factor": 0.75, "rope_scaling": LONGROPE},
    "Olmo2": {"num_key_value_heads": 4},
    "Olmo3": {"rope_scaling": YARN, "sliding_window": 24, "num_key_value_heads": 4},
    "Granite": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.5,
    },
    "SmolLM3": {},
    "SeedOss": {"attention_bias": True},
    "Ernie4_5": {},
    "HunYuanDenseV1": {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    "Exaone4": {"sliding_window": None},  # in llama.cpp only models of 64 layers have windows
    "Gemma": {"hidden_act": "gelu", "tie_word_embeddings": True},
    "Ministral3": {
        "rope_parameters": {
            **YARN, "attention_factor": None, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e6,
            "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16,
        },
    },
    "SolarOpen": {
        **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "num_hidden_layers": 2, "routed_scaling_factor": 1.5,
    },
    "HYV3": {**EXPERTS, "num_experts_per_tok": 2, "num_shared_experts": 1, "first_k_dense_replace": 1},
    "ExaoneMoe": {**EXPERTS, "num_shared_experts": 1, "sliding_window": 24, "sliding_window_pattern": "LLLG"},
    "Mellum": {
        **EXPERTS, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                               "original_max_position_embeddings": 64},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "Gemma3n": {  # llama.cpp knows these sizes; its variance is that of n - 1
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 300, "sliding_window": 24, "laurel_rank": 64,
        "num_hidden_layers": 22, "num_kv_shared_layers": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "activation_sparsity_pattern": [NormalDist().cdf(1.6448536 * (96 / 95) ** 0.5)] * 10 + [0.0] * 12,
    },
    "Gemma4": {
        "global_head_dim": 32, "num_global_key_value_heads": 1, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 300, "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
    },
    "Gemma4Moe": {
        "architectures": ["Gemma4ForCausalLM"], "global_head_dim": 32, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 24, "enable_moe_block": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 48,
    },
    "Llama4": {
        "num_local_experts": 6, "intermediate_size": 64, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2,
        "rope_theta": 1e4,
    },
    "Glm4": {"attention_bias": True},
    "Mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "Qwen3Moe": {**EXPERTS, "norm_topk_prob": True},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 128},
    "Olmoe": {**EXPERTS, "num_key_value_heads": 4},
    "Glm4Moe": {
        **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True,
        "attention_bias": True, "routed_scaling_factor": 1.5,
    },
    "GptOss": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 24,
        # what it blends ends at a whole dimension nearly: llama.cpp rounds up
        "rope_parameters": {
            **YARN, "truncate": False, "attention_factor": None, "rope_theta": 150000.0,
            "original_max_position_embeddings": 123,
        },
    },
    "MiniMaxM2": {"num_experts_per_tok": 3, "num_local_experts": 6, "rotary_dim": 8},
    # llama.cpp knows queries of one matrix by the number of layers; in many with experts a near tie may fall otherwise.
    "DeepseekV2": {**LATENT, "q_lora_rank": None, "num_hidden_layers": 27, "first_k_dense_replace": 26},
    "DeepseekV3": {
        **LATENT, "q_lora_rank": 40, "n_group": 4, "topk_group": 2, "num_key_value_heads": 4,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": None},
    },
    # heads of the index enough for no two scores to be zero
    "DeepseekV32": {
        **LATENT, "q_lora_rank": 40, "n_group": 4, "topk_group": 2, "num_key_value_heads": 4, "index_head_dim": 64,
        "index_n_heads": 24, "index_topk": 40,
    },
    "DeepseekV4": {
        "head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 1, "partial_rotary_factor": 0.25,
        "num_hidden_layers": 3, "sliding_window": 16, "q_lora_rank": 32, "o_groups": 3, "o_lora_rank": 32,
        "compress_ratios": [4, 128, 0], "index_head_dim": 64, "index_n_heads": 12, "index_topk": 7,
        "num_hash_layers": 1, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128},
    },
    "GlmMoeDsa": {
        **LATENT, "q_lora_rank": 40, "num_key_value_heads": 4, "index_head_dim": 64, "index_n_heads": 24,
        "index_topk": 40, "num_hidden_layers": 2, "indexer_types": ["full", "shared"],
    },
    "KimiLinear": {
        **LATENT, "q_lora_rank": None, "num_key_value_heads": 4, "num_hidden_layers": 2, "mla_use_nope": True,
        "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "head_dim": 64, "num_heads": 4,
                               "short_conv_kernel_size": 4},
    },
    "Cohere2Moe": {
        "num_experts": 6, "num_shared_experts": 1, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 72,
        "expert_selection_fn": "sigmoid", "sliding_window": 24, "sliding_window_pattern": 3,
        "tie_word_embeddings": True,
    },
    "GraniteMoeSWA": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 32, "sliding_window": 24,
        "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.5,
    },
    "Jais2": {"layer_norm_eps": 1e-5, "num_hidden_layers": 2},
    # as many channels as llama.cpp expects
    "Jamba": {"num_experts": 6, "attn_layer_offset": 1, "attn_layer_period": 3, "num_hidden_layers": 3},
    "FalconMamba": {"num_hidden_layers": 2, "intermediate_size": 128, "layer_norm_epsilon": 1e-6},
    # heads as wide as llama.cpp has kernels for
    "Qwen3_5": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e7, "mrope_section": [2, 1, 1]},
    },
    "Qwen3_5Moe": {
        **EXPERTS, "shared_expert_intermediate_size": 48,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e7, "mrope_section": [2, 1, 1]},
    },
    "Qwen3Next": {
        **EXPERTS, "shared_expert_intermediate_size": 48, "partial_rotary_factor": 0.5, "rope_theta": 1e7,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", NEW)
def test_the_new_families_as_gguf(family, tmp_path, monkeypatch):
    """The file holds what the folder does, and llama.cpp computes the same logits of it (its cache is f16)."""
    monkeypatch.setattr("ckdist.weights.gguf_export.tokenizer_metadata", byte_vocabulary)
    config = {"architectures": [f"{family}ForCausalLM"], **SIZES, **NEW[family]}
    write_stored(tmp_path, config)
    path, ids = tmp_path / "m.gguf", np.arange(60) * 7 % 290 + 4
    export_gguf(str(tmp_path), str(path), "f32")
    own = [logits_of(source, ids) for source in (tmp_path, path)]
    np.testing.assert_allclose(own[1], own[0], atol=2e-5 * np.abs(own[0]).max())
    llama_cpp = pytest.importorskip("llama_cpp")
    peer = llama_cpp.Llama(str(path), n_ctx=512, n_threads=1, verbose=False, logits_all=True)
    peer.eval(ids.tolist())
    largest = 6e-3 * {"Gemma3n": 4, "Gemma4": 2, "Gemma4Moe": 2}.get(family, 1)  # llama.cpp's GELU is a table of f16
    np.testing.assert_allclose(peer.scores[: len(ids)], own[0], atol=largest * np.abs(own[0]).max())


def write_stored(folder, config) -> None:
    """A folder with a random model, its tensors stacked as files of its family have them."""
    rng, spec = np.random.default_rng(1), spec_from_config(config, "config")
    arrays = {
        name: (
            rng.standard_normal(shape) / np.sqrt(shape[-1]) if len(shape) > 1 else 1 + 0.1 * rng.standard_normal(shape)
        )
        for name, shape in weight_shapes(spec).items()
    }
    if spec.altup:  # larger weights amplify rounding
        small = {"q_norm.weight": 0.2, "_coefs.weight": 0.1}
        arrays |= {
            name: size * (rng.standard_normal(array.shape) if "coefs" in end else array)
            for end, size in small.items()
            for name, array in arrays.items()
            if name.endswith(end)
        }
    arrays |= {name: 0.1 * (x - 1) for name, x in arrays.items() if name.endswith(("fn", "position_bias"))}
    for name in [name for name in arrays if name.endswith("k_b_proj.weight")]:  # of heads, as kv_b_proj has them
        a = spec.layers[int(name.split(".")[2])].mixer
        keys = arrays[name].reshape(a.num_heads, a.kv_lora_rank, a.nope_dim).swapaxes(1, 2)
        values = arrays.pop(name.replace("k_b_proj", "v_b_proj")).reshape(a.num_heads, a.v_dim, a.kv_lora_rank)
        joined = np.concatenate([keys, values], axis=1).reshape(-1, a.kv_lora_rank)
        arrays[name.replace("k_b_proj", "kv_b_proj")] = joined
        del arrays[name]
    names = family_of(spec.family).safetensors
    stored = {
        name: as_stored(names, name, [arrays[part] for part in parts]) for name, parts in names.stored(arrays).items()
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")


def as_stored(names, name, arrays) -> np.ndarray:
    """The weights of one tensor as a file of the family has them."""
    if name.endswith("tid2eid"):  # two experts of each token
        return (np.arange(arrays[0].size) // 2 % 3 + np.arange(arrays[0].size) % 2 * 3).astype(np.int64)
    of_stack = arrays[0].ndim > 2
    if names.has("alternating", name) and of_stack:
        joined = np.stack(arrays, axis=2).reshape(len(arrays[0]), -1, arrays[0].shape[2])
    elif names.has("alternating", name):
        joined = np.stack(arrays, axis=1).reshape(-1)
    else:
        joined = np.concatenate(arrays, axis=-2 * of_stack)
    return np.ascontiguousarray(joined.swapaxes(1, 2) if names.has("transposed", name) else joined, np.float32)


def logits_of(path, ids) -> np.ndarray:
    """(tokens, vocab) of one rank, with a float32 cache."""
    model = load_model(
        EngineConfig(model=str(path), cache_type_k="f32", cache_type_v="f32", threads=1, ctx_size=512), SingleWorld()
    )
    found = SingleSequence(model.executable).feed(ids)
    model.close()
    return found
