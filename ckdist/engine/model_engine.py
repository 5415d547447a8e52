"""Rank 0's engine over a loaded model."""

import importlib
import math
import sys
from typing import TYPE_CHECKING

from ckdist.config.draft_config import DraftFlags
from ckdist.engine.engine import Engine
from ckdist.engine.grammars import Grammars
from ckdist.engine.loaded_model import Model
from ckdist.engine.sampler import Sampler
from ckdist.layouts.prefill_choice import PrefillChoice
from ckdist.program.executable import DECODE, PREFILL, Executable
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.tried import load_tried

if TYPE_CHECKING:
    from ckdist.engine.dry_breakers import DryBreakers

USUAL_DRAFTS = DraftFlags()


def make_engine(
    model: Model, drafts: DraftFlags = USUAL_DRAFTS, max_waiting: int = 512, max_step_seconds: float = math.inf
) -> tuple[Engine, Tokenizer]:
    """Makes rank 0's engine over a loaded model, and the model's tokenizer."""
    tokenizer = load_tried(model.checkpoint.path, model.checkpoint.overrides)
    executable = model.executable
    stats = lambda: {
        **prefill_stats(model.prefill, executable),
        **model.loader.filled.stats(),
        **(_expert_stats(executable) if executable.experts else {}),
    }
    draft = model.draft
    if draft is not None and not draft.spec.predicts:
        from ckdist.engine.draft_model import check_vocabularies

        check_vocabularies(tokenizer, load_tried(draft.checkpoint.path, {}), str(draft.checkpoint.path))
    lane = model.trace and model.trace.main
    engine = Engine(
        model.executable, Sampler(model.spec.vocab_size, model.executable.worker.pool), tokenizer.eos_token_ids,
        max_waiting=max_waiting, more_stats=stats, lane=lane, make_breakers=lambda: _breakers(tokenizer),
        grammars=Grammars(tokenizer, model.spec.vocab_size), start_tokens=model.spec.start_tokens,
        banned_tokens=model.spec.banned_tokens, max_step_seconds=max_step_seconds, disk=model.disk,
        adapters=model.adapters,
        make_drafting=lambda: importlib.import_module("ckdist.engine.drafting").make_drafting(drafts, model),
    )  # fmt: skip
    return engine, tokenizer


def prefill_stats(choice: PrefillChoice, executable: Executable) -> dict[str, float | str]:
    """Values for metrics: reason, threshold (0: none), and tokens of steps with prompts by layout."""
    counts = dict(enumerate(executable.prefill_tokens))
    return {
        "prefill_choice_info": choice.reason,
        "prefill_by_token_from": 0 if choice.from_tokens == sys.maxsize else choice.from_tokens,
        "prefill_by_token_tokens_total": counts.get(PREFILL, 0),
        "prefill_by_tensor_tokens_total": counts.get(DECODE, 0),
    }


def _expert_stats(executable: Executable) -> dict[str, float | str]:
    from ckdist.engine.expert_load import dispatch_stats, expert_stats

    sent = dispatch_stats(executable.dispatch_from, executable.dispatched_tokens) if executable.dispatches else {}
    return {**expert_stats(executable.expert_rows()), **sent}


def _breakers(tokenizer: Tokenizer) -> "DryBreakers":
    from ckdist.engine.dry_breakers import DryBreakers

    return DryBreakers(tokenizer)
