"""`ckdist evaluate FILE... -m MODEL`: the mean loss of the tokens that a training learns, by the engine of a server."""

import json
import math

import numpy as np

from ckdist.cli.perplexity import log_likelihoods
from ckdist.cli.scored_data import ScoredData, learned_logits, learned_tokens, scored_data
from ckdist.config.distill_config import EvaluateConfig
from ckdist.engine.sampler import Sampler
from ckdist.program.ops.teacher_loss import divergence
from ckdist.progress import ProgressBar
from ckdist.train.data.teacher_file import TeacherFile

ROWS = 128  # of logits in float64 at once


def run(config: EvaluateConfig) -> int:
    """Prints the loss. Returns 0."""
    with scored_data(config) as data:
        if data is None:
            return 0
        result = measured(config, data)
        text = (
            f"loss {result['loss']:.5f} (perplexity {result['perplexity']:.4f}) over {result['tokens']} learned tokens"
        )
        if "divergence" in result:
            text += f"; divergence from the teacher {result['divergence']:.5f}"
        print(json.dumps(result) if config.json else text)
    return 0


def measured(config: EvaluateConfig, data: ScoredData) -> dict[str, float]:
    """The loss, its exponential, the learned tokens, and the divergence from a teacher."""
    cache, teacher = data.cache, TeacherFile(config.teacher) if config.teacher else None
    if teacher is not None:
        teacher.verify(cache, data.tokenizer)
    loss = apart = 0.0
    tokens, sampler = 0, Sampler(data.model.executable.vocab_size)
    total = sum(int(learned_tokens(cache, index, config.max_length)[1][1:].sum()) for index in range(cache.documents))
    with ProgressBar(total, "token", "evaluating", lines=True) as bar:
        for _, logits, targets in learned_logits(data.model.executable, cache, 0, config.max_length):
            loss -= float(log_likelihoods(sampler, logits, targets).sum())
            if teacher is not None:
                records = teacher.records[tokens : tokens + len(targets)]
                for at in range(0, len(targets), ROWS):
                    apart += _divergence(logits[at : at + ROWS], records[at : at + ROWS], teacher.header.temperature)
            tokens += len(targets)
            bar.update(len(targets))
    mean = loss / max(tokens, 1)
    result = {"loss": mean, "perplexity": math.exp(min(mean, 700)), "tokens": tokens, "sequences": cache.documents}
    return result | ({"divergence": apart / max(tokens, 1)} if teacher is not None else {})


def _divergence(logits: np.ndarray, records: np.ndarray, temperature: float) -> float:
    """The sum of the divergences from the teacher's records, without the temperature's square."""
    z = logits.astype(np.float64) / temperature
    top = z.max(axis=1, keepdims=True)
    z -= top + np.log(np.exp(z - top).sum(axis=1, keepdims=True))
    return float(divergence(records["logprobs"].astype(np.float64), np.take_along_axis(z, records["ids"], 1))[0].sum())
