"""The samplers, and the sampling parameters: each is declared once, for flags, requests and the native sampler."""

from dataclasses import dataclass
from typing import Any

from ckdist.config.options import escaped, option

# llama.cpp's names and default order.
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")

MAX_INTEGER = (1 << 31) - 1

DRY_BREAKERS = ("\n", ":", '"', "*")
MAX_BREAKERS = 64
MAX_BREAKER_BYTES = 40


def sampler_list(text: str) -> tuple[str, ...]:
    """Parses `top_k;temperature` as ("top_k", "temperature"). An empty text means no sampler."""
    names = tuple(part.strip() for part in text.split(";")) if text else ()
    for name in names:
        if name not in SAMPLERS:
            raise ValueError(f"has the unknown sampler '{name}'; the known ones are {', '.join(SAMPLERS)}")
    return names


def parameter(
    default: Any,
    *flags: str,
    help: str = "",
    also: tuple[str, ...] = (),
    props: str = "",
    step: str | None = None,
    native: str = "",
    neutral: float = 0.0,
    **limits: Any,
) -> Any:
    """Returns a dataclass field that describes a sampling parameter everywhere.

    Args:
        flags: See `option`. Without flags, no command has the parameter.
        also: Further names of the field in requests.
        props: Its name in llama-server's /props, if it has another one there.
        step: The native feature that uses it: a sampler, "mirostat" or "dynatemp"; "": all. None: it is not copied.
        native: Its name in struct ckdist_sampling, if it has another one there.
        neutral: Its native value if `step` is off.
        limits: Further arguments of `option`.
    """
    facets = {"also": also, "props": props, "step": step, "native": native, "neutral": neutral}
    return option(default, *flags, help=help, facets=facets, **limits)


@dataclass(frozen=True, kw_only=True)
class SamplingFields:
    """The sampling parameters that are flags of commands too."""

    # fmt: off
    temperature: float = parameter(
        1.0, "--temp", "--temperature", within=(0, 100), metavar="T", step="temperature", neutral=1.0,
        help="temperature; 0: always the most likely token",
    )
    top_k: int = parameter(
        0, "--top-k", within=(-1, MAX_INTEGER), metavar="K", step="top_k",
        help="sample among the K most likely tokens; 0 or -1: off",
    )
    top_p: float = parameter(
        1.0, "--top-p", within=(0, 1), metavar="P", step="top_p", neutral=1.0,
        help="sample among the fewest tokens whose probabilities add up to P; 1: off",
    )
    min_p: float = parameter(
        0.0, "--min-p", within=(0, 1), metavar="P", step="min_p",
        help="drop tokens with less than P times the probability of the most likely one; 0: off",
    )
    typical_p: float = parameter(
        1.0, "--typical", within=(0, 1), metavar="P", step="typ_p", also=("typ_p",),
        help="sample among the tokens whose surprise is nearest to the entropy, up to probability P; 1: off",
    )
    top_n_sigma: float = parameter(
        -1.0, "--top-nsigma", within=(-1, 1000), step="top_n_sigma", also=("nsigma",),
        help="drop logits more than N standard deviations below the largest; 0 or less: off",
    )
    xtc_probability: float = parameter(
        0.0, "--xtc-probability", within=(0, 1), metavar="P", step="xtc",
        help="probability of excluding the most likely tokens; 0: off",
    )
    xtc_threshold: float = parameter(
        0.1, "--xtc-threshold", within=(0, 1), metavar="P", step="xtc",
        help="XTC excludes all but the least likely of the tokens with at least this probability; above 0.5: off",
    )
    # The three penalties count tokens of `repeat_last_n`.
    repetition_penalty: float = parameter(
        1.0, "--repeat-penalty", within=(0.01, 100), metavar="F", step="penalties", neutral=1.0,
        also=("repeat_penalty",), props="repeat_penalty",
        help="divide positive logits of seen tokens by F, multiply negative ones; 1: off",
    )
    presence_penalty: float = parameter(
        0.0, "--presence-penalty", within=(-100, 100), metavar="F", step="penalties",
        help="subtract F from the logits of seen tokens; 0: off",
    )
    frequency_penalty: float = parameter(
        0.0, "--frequency-penalty", within=(-100, 100), metavar="F", step="penalties",
        help="subtract F from the logits of seen tokens once per occurrence; 0: off",
    )
    # None: the repetition penalty counts prompt and output, the other two only the output, as in the OpenAI API and
    # vLLM.
    repeat_last_n: int | None = parameter(
        None, "--repeat-last-n", kind=int, within=(-1, MAX_INTEGER),
        help="number of last tokens that the penalties count; -1: all, 0: none (default: all for --repeat-penalty, "
        "the output for the others)",
    )
    # logit -= multiplier * base^(n - allowed_length) if a token continues a repetition of n tokens.
    dry_multiplier: float = parameter(
        0.0, "--dry-multiplier", within=(0, 1000), metavar="F", step="dry",
        help="penalty on tokens that continue a repetition; 0: off",
    )
    dry_base: float = parameter(
        1.75, "--dry-base", within=(1, 1000), metavar="F", step="dry",
        help="growth of the DRY penalty with each token of the repetition",
    )
    dry_allowed_length: int = parameter(
        2, "--dry-allowed-length", within=(0, MAX_INTEGER), step="dry",
        help="longest repetition in tokens that DRY does not penalize",
    )
    dry_penalty_last_n: int = parameter(
        -1, "--dry-penalty-last-n", within=(-1, MAX_INTEGER), step="dry", native="dry_window",
        help="number of last tokens that DRY searches for repetitions; -1: all, 0: off",
    )
    dry_sequence_breakers: tuple[str, ...] = parameter(
        DRY_BREAKERS, "--dry-sequence-breaker", parse=escaped, repeat=True, metavar="TEXT",
        help=r"DRY counts no repetition across this text; may be repeated; none: no breaker (default: \n, colon, "
        "quote, asterisk)",
    )
    # Penalties, DRY and temperature come before mirostat (in llama.cpp only temperature). Truncating samplers, dynatemp
    # and `samplers` then have no effect.
    mirostat: int = parameter(
        0, "--mirostat", within=(0, 2), metavar="V", step="mirostat", also=("mirostat_mode",),
        help="keep the surprise of tokens at a target, with version 1 or 2, in place of other truncation; 0: off",
    )
    mirostat_eta: float = parameter(
        0.1, "--mirostat-lr", within=(0, 1), metavar="F", step="mirostat", help="learning rate of mirostat"
    )
    mirostat_tau: float = parameter(
        5.0, "--mirostat-ent", within=(0, 100), metavar="F", step="mirostat", help="target surprise of mirostat in bits"
    )
    dynatemp_range: float = parameter(
        0.0, "--dynatemp-range", within=(0, 100), metavar="F", step="dynatemp",
        help="vary the temperature by up to this much with the entropy; 0: off",
    )
    dynatemp_exponent: float = parameter(
        1.0, "--dynatemp-exp", within=(0, 100), metavar="F", step="dynatemp",
        help="exponent of the entropy in the dynamic temperature",
    )
    samplers: tuple[str, ...] | None = parameter(
        None, "--samplers", parse=sampler_list, metavar="A;B;C",
        help="apply these samplers in this order; names as in llama-cli (default: penalties, dry, temperature, "
        "top_k, top_p, min_p; temperature is last with --typical, --top-nsigma, --xtc-probability or "
        "--dynatemp-range)",
    )
    seed: int | None = parameter(
        None, "-s", "--seed", kind=int, within=(-(1 << 63), (1 << 64) - 1),
        help="seed; the same seed gives the same text (default: a new one)",
    )
    ignore_eos: bool = parameter(False, "--ignore-eos", help="continue after the end-of-sequence token")
    # fmt: on
