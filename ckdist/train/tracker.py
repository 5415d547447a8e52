"""Trackers of experiments: TensorBoard, Weights & Biases, MLflow. Each is a package, imported if it is used."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckdist.errors import ConfigError

# name in `report_to` -> (module, extra of pip)
PACKAGES = {"tensorboard": ("tensorboardX", "train"), "wandb": ("wandb", "wandb"), "mlflow": ("mlflow", "mlflow")}


class Tracker(NamedTuple):
    """Takes numbers of steps until `close`."""

    log: Callable[[Mapping[str, float], int], object]  # adds the values of a step
    close: Callable[[], object]  # ends the run


def check_report_to(report_to: tuple[str, ...]) -> None:
    """Raises ConfigError if a package that `report_to` needs is not installed."""
    for name in report_to:
        module, extra = PACKAGES[name]
        try:
            is_missing = importlib.util.find_spec(module) is None
        except ValueError:  # the import is blocked
            is_missing = True
        if is_missing:
            raise ConfigError(f"report_to {name} needs {module}: pip install 'ckdist[{extra}]'")


def open_trackers(
    report_to: tuple[str, ...], output_dir: Path, start: int, settings: Mapping[str, Any]
) -> list[Tracker]:
    """Opens the trackers. A resumed training continues its run.

    Args:
        start: The step to resume from.
        settings: The training's settings, which are recorded.
    """
    kinds = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
    return [kinds[name](importlib.import_module(PACKAGES[name][0]), output_dir, start, settings) for name in report_to]


def _tensorboard(module: Any, output_dir: Path, start: int, _settings: Mapping[str, Any]) -> Tracker:
    # Steps of an earlier run after `start` are dropped.
    board = module.SummaryWriter(str(output_dir / "tensorboard"), purge_step=start + 1 if start else None)

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            board.add_scalar(name, value, step)

    return Tracker(log, board.close)


def _wandb(module: Any, output_dir: Path, _start: int, settings: Mapping[str, Any]) -> Tracker:
    """WANDB_PROJECT, WANDB_MODE and so on are the package's own variables."""
    name = _run_name(output_dir)
    run = module.init(name=name, id=name, resume="allow", dir=str(output_dir), config=dict(settings))
    return Tracker(lambda values, step: run.log(dict(values), step=step), run.finish)


def _mlflow(module: Any, output_dir: Path, start: int, settings: Mapping[str, Any]) -> Tracker:
    """MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME are the package's own variables."""
    path = output_dir / "mlflow_run"
    found = path.read_text().strip() if start and path.exists() else None
    run = module.start_run(run_id=found) if found else module.start_run(run_name=_run_name(output_dir))
    path.write_text(run.info.run_id)
    if not found:
        module.log_params({name: str(value)[:500] for name, value in settings.items()})
    return Tracker(lambda values, step: module.log_metrics(dict(values), step=step), module.end_run)


def _run_name(output_dir: Path) -> str:
    return "-".join(output_dir.resolve().parts[-2:])
