"""Sampling settings of the commands that generate text: `ckdist generate` and `ckdist chat`."""

from dataclasses import dataclass

from ckdist.config.engine import EngineConfig
from ckdist.config.options import escaped, integer, option, real
from ckdist.config.samplers import DRY_BREAKERS, sampler_list


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(EngineConfig):
    """Settings of sampling, and of the end of the output."""

    n_predict: int = option(
        128, "-n", "--n-predict", parse=integer, low=0, high=1 << 24, metavar="N", help="most tokens to generate"
    )
    temperature: float = option(
        0.8,
        "--temp",
        "--temperature",
        parse=real,
        low=0,
        high=100,
        metavar="T",
        help="temperature; 0: always the most likely token",
    )
    top_k: int = option(
        40,
        "--top-k",
        parse=integer,
        low=0,
        high=1 << 24,
        metavar="K",
        help="sample among the K most likely tokens; 0: off",
    )
    top_p: float = option(
        0.95,
        "--top-p",
        parse=real,
        low=0,
        high=1,
        metavar="P",
        help="sample among the fewest tokens whose probabilities add up to P; 1: off",
    )
    min_p: float = option(
        0.05,
        "--min-p",
        parse=real,
        low=0,
        high=1,
        metavar="P",
        help="drop tokens with less than P times the probability of the most likely one; 0: off",
    )
    typical_p: float = option(
        1.0,
        "--typical",
        parse=real,
        low=0,
        high=1,
        metavar="P",
        help="sample among the tokens whose surprise is nearest to the entropy, up to probability P; 1: off",
    )
    top_n_sigma: float = option(
        -1.0,
        "--top-nsigma",
        parse=real,
        low=-1,
        high=1000,
        metavar="N",
        help="drop logits more than N standard deviations below the largest; 0 or less: off",
    )
    xtc_probability: float = option(
        0.0,
        "--xtc-probability",
        parse=real,
        low=0,
        high=1,
        metavar="P",
        help="probability of excluding the most likely tokens; 0: off",
    )
    xtc_threshold: float = option(
        0.1,
        "--xtc-threshold",
        parse=real,
        low=0,
        high=1,
        metavar="P",
        help="XTC excludes all but the least likely of the tokens with at least this probability; above 0.5: off",
    )
    repetition_penalty: float = option(
        1.0,
        "--repeat-penalty",
        parse=real,
        low=0.01,
        high=100,
        metavar="F",
        help="divide positive logits of seen tokens by F, multiply negative ones; 1: off",
    )
    presence_penalty: float = option(
        0.0,
        "--presence-penalty",
        parse=real,
        low=-100,
        high=100,
        metavar="F",
        help="subtract F from the logits of seen tokens; 0: off",
    )
    frequency_penalty: float = option(
        0.0,
        "--frequency-penalty",
        parse=real,
        low=-100,
        high=100,
        metavar="F",
        help="subtract F from the logits of seen tokens once per occurrence; 0: off",
    )
    repeat_last_n: int | None = option(
        None,
        "--repeat-last-n",
        parse=integer,
        low=-1,
        high=(1 << 31) - 1,
        metavar="N",
        help=(
            "number of last tokens that the penalties count; -1: all, 0: none (default: all for --repeat-penalty, "
            "the output for the others)"
        ),
    )
    dry_multiplier: float = option(
        0.0,
        "--dry-multiplier",
        parse=real,
        low=0,
        high=1000,
        metavar="F",
        help="penalty on tokens that continue a repetition; 0: off",
    )
    dry_base: float = option(
        1.75,
        "--dry-base",
        parse=real,
        low=1,
        high=1000,
        metavar="F",
        help="growth of the DRY penalty with each token of the repetition",
    )
    dry_allowed_length: int = option(
        2,
        "--dry-allowed-length",
        parse=integer,
        low=0,
        high=(1 << 31) - 1,
        metavar="N",
        help="longest repetition in tokens that DRY does not penalize",
    )
    dry_penalty_last_n: int = option(
        -1,
        "--dry-penalty-last-n",
        parse=integer,
        low=-1,
        high=(1 << 31) - 1,
        metavar="N",
        help="number of last tokens that DRY searches for repetitions; -1: all, 0: off",
    )
    dry_sequence_breakers: tuple[str, ...] = option(
        DRY_BREAKERS,
        "--dry-sequence-breaker",
        parse=escaped,
        repeat=True,
        metavar="TEXT",
        help=(
            r"DRY counts no repetition across this text; may be repeated; none: no breaker (default: \n, colon, "
            r"quote, asterisk)"
        ),
    )
    mirostat: int = option(
        0,
        "--mirostat",
        parse=integer,
        low=0,
        high=2,
        metavar="V",
        help="keep the surprise of tokens at a target, with version 1 or 2, in place of other truncation; 0: off",
    )
    mirostat_eta: float = option(
        0.1, "--mirostat-lr", parse=real, low=0, high=1, metavar="F", help="learning rate of mirostat"
    )
    mirostat_tau: float = option(
        5.0, "--mirostat-ent", parse=real, low=0, high=100, metavar="F", help="target surprise of mirostat in bits"
    )
    dynatemp_range: float = option(
        0.0,
        "--dynatemp-range",
        parse=real,
        low=0,
        high=100,
        metavar="F",
        help="vary the temperature by up to this much with the entropy; 0: off",
    )
    dynatemp_exponent: float = option(
        1.0,
        "--dynatemp-exp",
        parse=real,
        low=0,
        high=100,
        metavar="F",
        help="exponent of the entropy in the dynamic temperature",
    )
    samplers: tuple[str, ...] | None = option(
        None,
        "--samplers",
        parse=sampler_list,
        metavar="A;B;C",
        help=(
            "apply these samplers in this order; names as in llama-cli (default: penalties, dry, temperature, "
            "top_k, top_p, min_p; temperature is last with --typical, --top-nsigma, --xtc-probability or "
            "--dynatemp-range)"
        ),
    )
    seed: int | None = option(
        None,
        "-s",
        "--seed",
        parse=integer,
        low=0,
        high=(1 << 63) - 1,
        metavar="N",
        help="seed; the same seed gives the same text (default: a new one)",
    )
    stop: tuple[str, ...] = option(
        (), "--stop", repeat=True, metavar="TEXT", help="end before this text; may be repeated"
    )
    ignore_eos: bool = option(False, "--ignore-eos", help="continue after the end-of-sequence token")
