"""A published model on every rank: `NAME TOKENS.json GOLDEN.npz COUNT QUESTION PROMPT...`.

Rank 0 prints one JSON object: the texts whose ids are not the golden ones, perplexity and mean KL divergence of the
first COUNT golden ids, a chat by the model's own template, and greedy texts after the prompts.
"""

import functools
import json
import sys
import time

import numpy as np

from ckdist import LLM, SamplingParams


def log_sums(logits: np.ndarray) -> np.ndarray:
    """log(sum(exp(logits))) of float32 (tokens, vocab): float64 (tokens, 1); logits less it are log-probabilities."""
    top = logits.max(1, keepdims=True)
    return top + np.log(np.exp(logits - top).sum(1, dtype=np.float64, keepdims=True))


def kl_of(own: np.ndarray, golden: np.ndarray) -> np.ndarray:
    """KL divergence from the golden distribution, (tokens,), over its 64 most likely ids and one bucket for all others.

    `own` and `golden`: the log-probabilities of those ids, (tokens, 64). Joining ids in a bucket can only make the
    divergence smaller: tests/models/test_real_models.py says by how much.
    """
    rest, own_rest = (np.maximum(1e-12, 1 - np.exp(part).sum(1)) for part in (golden, own))
    return (np.exp(golden) * (golden - own)).sum(1) + rest * np.log(rest / own_rest)


def score(llm: LLM, golden, count: int) -> tuple[float, float]:
    """Perplexity of `count` golden ids, and the mean KL divergence over those that have golden log-probabilities."""
    ids = golden["ids"][:count]
    top_ids, top = golden["top_ids"].astype(np.int64), golden["top_logprobs"].astype(np.float64)
    scores, divergences, at = [], [], 0
    for logits in llm.engine.logits(ids.tolist()):
        sums = log_sums(logits)
        following = ids[at + 1 : at + 1 + len(logits), None].astype(np.int64)
        scores.append((np.take_along_axis(logits[: len(following)], following, 1) - sums[: len(following)])[:, 0])
        shown = slice(at, min(at + len(logits), len(top)))
        if count := max(0, shown.stop - at):
            divergences.append(kl_of(np.take_along_axis(logits[:count], top_ids[shown], 1) - sums[:count], top[shown]))
        at += len(logits)
    return float(np.exp(-np.concatenate(scores).mean())), float(np.concatenate(divergences).mean())


def main(name: str, tokens_file: str, golden_file: str, count: str, question: str, *prompts: str) -> None:
    begin = time.perf_counter()
    llm = LLM(
        name, threads=1, comm_timeout=60, ctx_size=2048, ubatch_size=128, parallel=len(prompts) + 1, prefill="token"
    )
    loaded = time.perf_counter()
    with llm, open(tokens_file) as file:
        cases = json.load(file)
        ids_of = functools.partial(llm.tokenizer.encode, add_special=False)
        parsed = [case["text"] for case in cases if ids_of(case["text"]) != case["ids_special"]]
        plain = [case["text"] for case in cases if ids_of(case["text"], parse_special=False) != case["ids"]]
        perplexity, kl = score(llm, np.load(golden_file), int(count))
        scored = time.perf_counter()
        asked = [llm.tokenizer.encode(prompt) for prompt in prompts]
        rendered = llm.tokenizer.chat_template and llm.tokenizer.chat_template.render(
            [{"role": "user", "content": question}]
        )
        if rendered:
            asked.append(llm.tokenizer.encode(rendered, add_special=False))
        answers = [c.text for c in llm.generate(asked, SamplingParams(max_tokens=12, temperature=0))]
        seconds = {"load": loaded - begin, "score": scored - loaded, "answers": time.perf_counter() - scored}
        print(
            json.dumps(
                {
                    "texts": len(cases),
                    "wrong": parsed + plain,
                    "perplexity": perplexity,
                    "kl": kl,
                    "chat_prompt": rendered,
                    "answers": answers,
                    "seconds": seconds,
                }
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
