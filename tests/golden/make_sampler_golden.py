"""Makes tests/golden/sampler.npz: what llama.cpp's own samplers leave of fixed logits.

    ckdist export --gguf --type q4_k ckdist/models/bundled bundled.gguf
    pip install llama-cpp-python==0.3.36 && python tests/golden/make_sampler_golden.py bundled.gguf

Of each case: its SamplingParams as JSON, which row of logits it is about, its prompt and output, the state of mirostat
before it, and the probability of every token after the last sampler, 0 where it was removed. The model gives the
vocabulary of the breakers of DRY.
"""

import ctypes
import json
import pathlib
import sys

import llama_cpp as llama
import numpy as np

CONTEXT = 4096
DEFAULT_ORDER = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
REPEATING = [5, 6, 7, 8, 9, 5, 6, 7, 8, 30, 6, 7, 8, 9, 40, 8, 2, 5, 6, 7, 8]

# The last number chooses the row of logits: of 300 tokens, of 300 with many equal, of 3000, flat over the vocabulary.
CASES = [
    ({"typical_p": 0.5}, 0),
    ({"typical_p": 0.9}, 0),
    ({"typical_p": 0.2, "temperature": 1.7}, 0),
    ({"typical_p": 0.3, "min_keep": 9}, 0),
    ({"typical_p": 0.95}, 2),
    ({"top_n_sigma": 0.8, "top_k": 200}, 1),
    ({"typical_p": 0.6, "top_k": 25}, 2),
    ({"top_n_sigma": 1.0}, 0),
    ({"top_n_sigma": 0.5, "temperature": 0.6}, 0),
    ({"top_n_sigma": 2.0, "top_k": 40}, 2),
    ({"top_n_sigma": 1.5, "top_p": 0.8, "dynatemp_range": 0.4}, 2),
    ({"xtc_probability": 1.0, "xtc_threshold": 0.05}, 0),
    ({"xtc_probability": 1.0, "xtc_threshold": 0.02, "temperature": 1.4}, 0),
    ({"xtc_probability": 1.0, "xtc_threshold": 0.01, "min_keep": 297}, 0),
    ({"xtc_probability": 1.0, "xtc_threshold": 0.01, "min_keep": 200, "top_k": 210}, 0),
    ({"xtc_probability": 1.0, "xtc_threshold": 0.5}, 0),
    ({"xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 6}, 0),
    ({"xtc_probability": 1.0, "xtc_threshold": 0.1, "top_k": 6, "temperature": 0.7}, 2),
    ({"dynatemp_range": 0.5}, 0),
    ({"dynatemp_range": 0.5, "dynatemp_exponent": 2.5, "temperature": 0.8}, 2),
    ({"dynatemp_range": 3.0, "top_k": 30, "temperature": 1.2}, 0),
    ({"dynatemp_range": 0.3, "dynatemp_exponent": 0.0, "min_p": 0.01}, 2),
    ({"min_p": 0.9, "min_keep": 5, "samplers": DEFAULT_ORDER}, 0),
    ({"top_p": 0.1, "min_keep": 7, "samplers": DEFAULT_ORDER}, 0),
    ({"top_p": 0.95, "min_keep": 500, "samplers": DEFAULT_ORDER}, 2),
    ({"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8, "samplers": DEFAULT_ORDER}, 0),
    ({"top_k": 40, "top_p": 0.95, "min_p": 0.05, "temperature": 0.8, "samplers": DEFAULT_ORDER}, 2),
    ({"top_p": 0.7, "min_p": 0.02, "temperature": 1.6, "samplers": ["temperature", "min_p", "top_p"]}, 2),
    ({"top_k": 50, "typical_p": 0.8, "temperature": 0.5, "samplers": ["typ_p", "temperature", "top_k"]}, 2),
    (
        {
            "top_k": 30,
            "repetition_penalty": 1.5,
            "repeat_last_n": 64,
            "samplers": ["top_k", "temperature", "penalties"],
            "temperature": 1.3,
        },
        0,
    ),
    ({"top_k": 9, "samplers": []}, 0),
    ({"top_k": 9, "temperature": 0.5, "samplers": ["top_k"]}, 0),
    ({"repetition_penalty": 1.4, "repeat_last_n": 6}, 0),
    (
        {
            "repetition_penalty": 0.8,
            "presence_penalty": 0.7,
            "frequency_penalty": 0.4,
            "repeat_last_n": 12,
            "temperature": 0.9,
        },
        0,
    ),
    ({"presence_penalty": 0.7, "frequency_penalty": -0.4, "repeat_last_n": 64, "top_k": 20}, 0),
    ({"frequency_penalty": 0.5, "repeat_last_n": 1}, 0),
    ({"frequency_penalty": 0.25, "repetition_penalty": 1.1, "repeat_last_n": -1}, 1),
    ({"repetition_penalty": 1.9, "repeat_last_n": 0, "presence_penalty": 1.0}, 0),
    ({"dry_multiplier": 0.8, "dry_sequence_breakers": []}, 0),
    ({"dry_multiplier": 0.8, "dry_sequence_breakers": [], "top_k": 50, "temperature": 0.7}, 0),
    ({"dry_multiplier": 0.3, "dry_base": 1.2, "dry_allowed_length": 1, "dry_sequence_breakers": []}, 0),
    ({"dry_multiplier": 0.3, "dry_base": 1.0, "dry_allowed_length": 0, "dry_sequence_breakers": []}, 0),
    ({"dry_multiplier": 0.5, "dry_allowed_length": 3, "dry_penalty_last_n": 12, "dry_sequence_breakers": []}, 0),
    ({"dry_multiplier": 0.5, "dry_allowed_length": 4, "dry_penalty_last_n": 5, "dry_sequence_breakers": []}, 0),
    (
        {
            "dry_multiplier": 0.2,
            "dry_allowed_length": 1,
            "repetition_penalty": 1.2,
            "repeat_last_n": 8,
            "dry_sequence_breakers": [],
        },
        0,
    ),
    ({"mirostat": 2, "mirostat_tau": 1.5, "temperature": 1.0}, 0),
    ({"mirostat": 2, "mirostat_tau": 2.5, "mirostat_eta": 0.3, "temperature": 0.8}, 0),
    ({"mirostat": 2, "mirostat_tau": 0.1}, 0),
    ({"mirostat": 2, "mirostat_tau": 30.0}, 0),
    ({"mirostat": 2, "mirostat_tau": 4.0, "temperature": 1.5}, 2),
    ({"mirostat": 1, "mirostat_tau": 1.0, "temperature": 1.0}, 0),
    ({"mirostat": 1, "mirostat_tau": 2.0, "mirostat_eta": 0.5, "temperature": 0.8}, 0),
    ({"mirostat": 1, "mirostat_tau": 3.0, "temperature": 2.0}, 2),
    ({"mirostat": 1, "mirostat_tau": 5.0}, 2),
    ({"mirostat": 1, "mirostat_tau": 7.0, "temperature": 0.6}, 0),
]

TEXTS = [
    "one two: three four. one two: three four. one two: three",
    'She said "yes" and he said "no" and she said "yes" and he said',
    "the end of the end of the end of the end\nof the end of the end of",
    "def f(x):\n    return x\n\ndef g(x):\n    return x\n\ndef h(x):\n    return",
    "alpha beta gamma delta alpha beta gamma delta epsilon alpha beta gamma delta",
]
BREAKERS = [
    [],
    ["\n", ":", '"', "*"],
    ["beta gamma"],
    [" two: thr", "turn"],
    ["said", "é", " of th"],
    ["    re", "lta al", "end of t"],
]


class Vocabulary:
    def __init__(self, path: str):
        params = llama.llama_model_default_params()
        params.vocab_only = True
        self.model = llama.llama_model_load_from_file(path.encode(), params)
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.size = llama.llama_vocab_n_tokens(self.vocab)

    def tokens(self, text: str) -> list[int]:
        ids = (llama.llama_token * 1000)()
        n = llama.llama_tokenize(self.vocab, text.encode(), len(text.encode()), ids, 1000, False, False)
        return list(ids[:n])


def samplers_of(p: dict, vocabulary: Vocabulary, n_vocab: int) -> list:
    """As llama.cpp's tools make them of the same parameters."""
    keep, temperature = p.get("min_keep", 0), p.get("temperature", 1.0)
    breakers = [text.encode() for text in p.get("dry_sequence_breakers", [])]
    last_n = {None: 0, -1: CONTEXT}.get(
        p.get("repeat_last_n"), p.get("repeat_last_n")
    )  # the tools put the context for -1
    make = {
        "penalties": lambda: llama.llama_sampler_init_penalties(
            n_vocab,
            last_n,
            p.get("repetition_penalty", 1.0),
            p.get("frequency_penalty", 0.0),
            p.get("presence_penalty", 0.0),
        ),
        "dry": lambda: llama.llama_sampler_init_dry(
            vocabulary.vocab,
            p.get("dry_multiplier", 0.0),
            p.get("dry_base", 1.75),
            p.get("dry_allowed_length", 2),
            p.get("dry_penalty_last_n", CONTEXT),
            (ctypes.c_char_p * len(breakers))(*breakers),
            len(breakers),
        ),
        "top_n_sigma": lambda: llama.llama_sampler_init_top_n_sigma(p.get("top_n_sigma", -1.0)),
        "top_k": lambda: llama.llama_sampler_init_top_k(p.get("top_k", 0)),
        "typ_p": lambda: llama.llama_sampler_init_typical(p.get("typical_p", 1.0), keep),
        "top_p": lambda: llama.llama_sampler_init_top_p(p.get("top_p", 1.0), keep),
        "min_p": lambda: llama.llama_sampler_init_min_p(p.get("min_p", 0.0), keep),
        "xtc": lambda: llama.llama_sampler_init_xtc(
            p.get("xtc_probability", 0.0), p.get("xtc_threshold", 0.1), keep, 1
        ),
        "temperature": lambda: llama.llama_sampler_init_temp_ext(
            temperature, p.get("dynatemp_range", 0.0), p.get("dynatemp_exponent", 1.0)
        ),
    }
    if p.get("mirostat"):
        tau, eta = p["mirostat_tau"], p.get("mirostat_eta", 0.1)
        first, second = llama.llama_sampler_init_mirostat, llama.llama_sampler_init_mirostat_v2
        last = second(3, tau, eta) if p["mirostat"] == 2 else first(n_vocab, 3, tau, eta, 100)
        return [llama.llama_sampler_init_temp(temperature), last]
    return [make[name]() for name in p.get("samplers", DEFAULT_ORDER)]


def apply(samplers: list, logits: np.ndarray) -> tuple[np.ndarray, int]:
    """(vocab,) probabilities that the samplers leave, and the token that one of them chose, or -1."""
    n = len(logits)
    data = (llama.llama_token_data * n)()
    for i, logit in enumerate(logits.tolist()):
        data[i].id, data[i].logit = i, logit
    array = llama.llama_token_data_array(data, n, -1, False)
    for sampler in samplers:
        llama.llama_sampler_apply(sampler, ctypes.byref(array))
    kept = [(array.data[i].id, array.data[i].logit) for i in range(array.size)]
    largest = max(logit for _, logit in kept)
    out = np.zeros(n)
    for token, logit in kept:
        out[token] = np.exp(logit - largest)
    return out / out.sum(), array.data[array.selected].id if array.selected >= 0 else -1


def main(path: str) -> None:
    vocabulary = Vocabulary(path)
    rng = np.random.default_rng(20)
    rows = [
        rng.normal(size=300) * 2,
        np.round(rng.normal(size=300)),
        rng.normal(size=3000) * 2.5,
        np.zeros(vocabulary.size),
    ]
    rows = [row.astype(np.float32) for row in rows]
    cases = [(params, row, REPEATING) for params, row in CASES]
    for text in TEXTS:
        for breakers in BREAKERS:
            params = {
                "dry_multiplier": 0.4,
                "dry_allowed_length": 1,
                "dry_base": 1.3,
                "dry_sequence_breakers": breakers,
            }
            cases.append((params, 3, vocabulary.tokens(text)))
    entries, arrays = [], []
    for params, row, history in cases:
        samplers = samplers_of(params, vocabulary, len(rows[row]))
        for sampler in samplers:
            for token in history:
                llama.llama_sampler_accept(sampler, token)
        mu = 2 * params.get("mirostat_tau", 0.0)
        for _ in range(2 if params.get("mirostat") else 1):
            probabilities, chosen = apply(samplers, rows[row])
            entries.append({"params": params, "row": row, "history": history, "mu": mu})
            arrays.append(probabilities)
            if chosen >= 0:
                mu -= params.get("mirostat_eta", 0.1) * (-np.log2(probabilities[chosen]) - params["mirostat_tau"])
    target = pathlib.Path(__file__).parent / "sampler.npz"
    logits = {f"row{i}": row for i, row in enumerate(rows)}
    kept = {f"kept{i}": array.astype(np.float32) for i, array in enumerate(arrays)}
    np.savez_compressed(target, cases=np.array(json.dumps(entries)), **logits, **kept)
    print(f"{target}: {len(entries)} cases, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
