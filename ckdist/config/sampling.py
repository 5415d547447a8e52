"""How tokens are sampled, of the commands that generate text: `ckdist generate` and `ckdist chat`."""

from dataclasses import dataclass

from ckdist.config.engine import EngineConfig
from ckdist.config.options import escaped, integer, option, real
from ckdist.config.samplers import DRY_BREAKERS, sampler_list


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(EngineConfig):
    """How tokens are sampled, and when to end."""

    n_predict: int = option(
        128, "-n", "--n-predict", parse=integer, low=0, high=1 << 24, metavar="N", help="most tokens to generate"
    )
    temperature: float = option(
        0.8, "--temp", "--temperature", parse=real, low=0, high=100, metavar="T", help="0: always the most likely token"
    )
    top_k: int = option(
        40, "--top-k", parse=integer, low=0, high=1 << 24, metavar="K", help="sample among the K most likely; 0: off"
    )
    top_p: float = option(
        0.95,
        "--top-p",
        parse=real,
        low=0,
        high=1,
        metavar="P",
        help="sample among the fewest tokens with this probability in all; 1: off",
    )
    min_p: float = option(
        0.05,
        "--min-p",
        parse=real,
        low=0,
        high=1,
        metavar="P",
        help="drop tokens below this share of the most likely one; 0: off",
    )
    typical_p: float = option(
        1.0,
        "--typical",
        parse=real,
        low=0,
        high=1,
        metavar="P",
        help="sample among the tokens nearest to the entropy in surprise, with this probability in all; 1: off",
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
        help="how often the most likely tokens are excluded; 0: off",
    )
    xtc_threshold: float = option(
        0.1,
        "--xtc-threshold",
        parse=real,
        low=0,
        high=1,
        metavar="P",
        help="XTC excludes tokens from this probability on but the least likely of them; above 0.5: off",
    )
    repetition_penalty: float = option(
        1.0,
        "--repeat-penalty",
        parse=real,
        low=0.01,
        high=100,
        metavar="F",
        help="divides the logits of tokens seen; 1: off",
    )
    presence_penalty: float = option(
        0.0,
        "--presence-penalty",
        parse=real,
        low=-100,
        high=100,
        metavar="F",
        help="taken from the logits of tokens seen; 0: off",
    )
    frequency_penalty: float = option(
        0.0,
        "--frequency-penalty",
        parse=real,
        low=-100,
        high=100,
        metavar="F",
        help="the same for each time that they were seen; 0: off",
    )
    repeat_last_n: int | None = option(
        None,
        "--repeat-last-n",
        parse=integer,
        low=-1,
        high=(1 << 31) - 1,
        metavar="N",
        help=(
            "last tokens of prompt and output that the penalties look at; -1: all, 0: none (default: all for "
            "--repeat-penalty, the output for the others)"
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
        help="by which that grows with each token of the repetition",
    )
    dry_allowed_length: int = option(
        2,
        "--dry-allowed-length",
        parse=integer,
        low=0,
        high=(1 << 31) - 1,
        metavar="N",
        help="tokens of a repetition that are not penalized",
    )
    dry_penalty_last_n: int = option(
        -1,
        "--dry-penalty-last-n",
        parse=integer,
        low=-1,
        high=(1 << 31) - 1,
        metavar="N",
        help="last tokens in which repetitions are looked for; -1: all, 0: off",
    )
    dry_sequence_breakers: tuple[str, ...] = option(
        DRY_BREAKERS,
        "--dry-sequence-breaker",
        parse=escaped,
        repeat=True,
        metavar="TEXT",
        help=(
            r"DRY counts no repetition across this text; may be given several times, none: no text (default: \n, "
            r"colon, quote, asterisk)"
        ),
    )
    mirostat: int = option(
        0,
        "--mirostat",
        parse=integer,
        low=0,
        high=2,
        metavar="V",
        help="keep the surprise of tokens at a target, by version 1 or 2, in place of all cuts; 0: off",
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
        help="temperature minus to plus this, by the entropy; 0: off",
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
            "apply these samplers, in this order: names as in llama-cli (default: penalties, dry, temperature, "
            "top_k, top_p, min_p; with --typical, --top-nsigma, --xtc-probability or --dynatemp-range, "
            "temperature comes last)"
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
        help="same seed, same text (default: a new one)",
    )
    stop: tuple[str, ...] = option(
        (), "--stop", repeat=True, metavar="TEXT", help="end before this text; may be given several times"
    )
    ignore_eos: bool = option(False, "--ignore-eos", help="go on after the end-of-sequence token")
