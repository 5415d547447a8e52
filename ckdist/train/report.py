"""Shows a training: a progress bar, a line of JSON per logged step, trackers if wanted, and a picture at the end."""

import contextlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckdist.errors import ConfigError
from ckdist.figure import new_figure, save_figure
from ckdist.progress import ProgressBar
from ckdist.regular_file import replace_text
from ckdist.train.tracker import open_trackers

log = logging.getLogger(__name__)

METRICS, PICTURE = "metrics.jsonl", "loss.svg"


@dataclass(frozen=True)
class StepReport:
    """The results of one step over all ranks.

    `loss` is the mean cross-entropy over the tokens with a target. `peak_fraction` is gflops / peak_gflops. It is 0 if
    the peak was not measured, or was measured too low on a busy machine.
    """

    step: int  # from 1
    steps: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    skipped: bool
    tokens: int  # of this step, with a target
    all_tokens: int  # of sequences with a target; padding sequences do not count
    seconds: float
    tokens_per_second: float  # of all_tokens
    target_tokens_per_second: float
    gflops: float
    peak_gflops: float  # rate of matrix products of all ranks, measured at start
    peak_fraction: float
    eval_loss: float | None = None
    aux_loss: float | None = None  # load-balancing loss of experts, without its coefficient; not in `loss`
    bubble: float | None = None  # waiting time of stages / their computing time
    bubble_formula: float | None = None  # (S - 1) / (M V) for S stages, V chunks per stage, M batches
    spike: str | None = None  # describes one of the loss or gradient (ckdist/train/guards.py)
    metrics: Mapping[str, float] | None = None  # of preferences, by the names of TRL

    @property
    def is_lost(self) -> bool:
        """True if the step had targets and could not learn. A model that has broken down has a gradient of 0."""
        return self.tokens > 0 and (self.skipped or (self.grad_norm == 0 and self.loss > 0))

    @property
    def reason(self) -> str:
        """The reason why the step was skipped or lost."""
        if not self.tokens:
            return "it has no token with a target"
        if self.spike is not None:
            return self.spike
        return f"its gradient's norm is {self.grad_norm}" if math.isfinite(self.loss) else f"its loss is {self.loss}"


class Report:
    """Rank 0's output. Its owner closes it.

    Args:
        start: The step to resume from. Later lines of an earlier run are dropped.
        steps: Number of steps.
        settings: The training's settings. Its `report_to` names trackers.

    Raises:
        OSError: metrics.jsonl cannot be written.
    """

    def __init__(self, output_dir: Path, start: int, steps: int, settings: Mapping[str, Any]) -> None:
        self.folder = output_dir
        kept = [line for line in self._lines() if line.get("step", 0) <= start]
        replace_text(output_dir / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = open(output_dir / METRICS, "a", buffering=1)  # noqa: SIM115, until `close`
        self._trackers = open_trackers(tuple(settings["report_to"]), output_dir, start, settings)
        self._bar = ProgressBar(steps, "step", "training", leave=True, start=start)

    def _lines(self) -> list[dict[str, Any]]:
        """The lines of earlier runs. Lines that a full disk or a kill cut off are left out."""
        lines = []
        path = self.folder / METRICS
        for text in path.read_text().splitlines() if path.exists() else []:
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
        return lines

    def show(self, r: StepReport) -> None:
        """Shows a step on the bar."""
        self._bar.note(f"loss {r.loss:.4f}, {_speed(r)}, {r.gflops:.1f} GFLOP/s{_peak(r)}")
        self._bar.update(1)
        if r.skipped:
            self.say(f"step {r.step} is skipped: {r.reason}, and nothing was changed")
        elif r.spike is not None:
            self.say(f"step {r.step} is a spike: {r.spike}; set on_spike to skip such steps")

    def write(self, r: StepReport) -> None:
        """Writes a line of metrics, and a line of text if there is no bar on a terminal."""
        line = {
            k: (None if isinstance(v, float) and not math.isfinite(v) else v)
            for k, v in asdict(r).items()
            if v is not None
        }
        line.pop("metrics", None)
        line |= r.metrics or {}
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:  # training goes on; the next checkpoint fails if the disk is still full
            self.say(f"{METRICS} has no line of step {r.step}: {error.strerror}")
        if not self._bar.shown:
            more = (("aux", r.aux_loss), ("eval", r.eval_loss))
            ahead = "".join(f" {name} loss {value:.4f}" for name, value in more if value is not None)
            ahead += "".join(f" {name} {value:.3f}" for name, value in (r.metrics or {}).items())
            stages = "" if r.bubble is None else f" bubble {r.bubble:.0%} ({r.bubble_formula:.0%} by formula)"
            log.info(
                "step %d of %d loss %.4f%s lr %.2e norm %.3f %s %.1f GFLOP/s%s%s",
                r.step, r.steps, r.loss, ahead, r.learning_rate, r.grad_norm, _speed(r), r.gflops, _peak(r), stages,
            )  # fmt: skip
        speeds = ("tokens_per_second", "target_tokens_per_second", "gflops", "bubble")
        names = ("loss", "aux_loss", "eval_loss", "learning_rate", "grad_norm", *speeds)
        values = {name: getattr(r, name) for name in names} | dict(r.metrics or {})
        finite = {f"train/{name}": v for name, v in values.items() if v is not None and math.isfinite(v)}
        for tracker in self._trackers:
            tracker.log(finite, r.step)

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if not self._bar.shown:
            log.info("%s", text)
        else:
            self._bar.say(text)

    def close(self) -> None:
        """Ends the bar and the files, and draws the picture."""
        self._bar.close()
        with contextlib.suppress(OSError):  # the buffer could not be written before either
            self._file.close()
        for tracker in self._trackers:
            tracker.close()
        self._draw()

    def _draw(self) -> None:
        try:
            figure = new_figure(8, 5)
        except ImportError:
            log.info("no picture of the loss: pip install 'ckdist[train]' for one; %s has the numbers", METRICS)
            return
        lines = self._lines()
        axes = figure.subplots()
        for name, style in (("loss", "-"), ("eval_loss", "o-")):
            points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    label={"loss": "training", "eval_loss": "validation"}[name],
                    linewidth=1,
                    markersize=3,
                )
        axes.set_xlabel("step")
        axes.set_ylabel("loss, nats per token")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
        try:
            save_figure(figure, self.folder / PICTURE)
        except ConfigError as error:
            log.warning("%s", error)


def _speed(r: StepReport) -> str:
    """Tokens per second, and those with a target if they are fewer, as in chats."""
    few = r.tokens < 0.9 * r.all_tokens
    return f"{r.tokens_per_second:.0f} tokens/s" + (f" ({r.target_tokens_per_second:.0f} with a target)" if few else "")


def _peak(r: StepReport) -> str:
    """The fraction of the measured peak, and the peak."""
    if r.peak_fraction:
        return f" ({r.peak_fraction:.0%} of {r.peak_gflops:.1f} measured at start)"
    return f" (above the {r.peak_gflops:.1f} measured at start)" if r.peak_gflops else ""
