"""The memory that a model needs, as a process predicts it before the first load."""

import asyncio
import subprocess

import msgspec

from ckdist.config.given_elsewhere import environment_without
from ckdist.config.serve_config import ServeConfig
from ckdist.errors import ConfigError
from ckdist.python_words import module_words

MOST_SECONDS = 120.0  # of a prediction


class PredictedMemory(msgspec.Struct, frozen=True):
    """Bytes of all ranks of a model, for sequences of `context` tokens."""

    fixed: int
    per_token: int
    context: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.fixed + self.context * self.per_token

    def remedy(self, room: int) -> str:
        """Returns the advice on a model that does not fit in `room` bytes."""
        tokens = (room - self.fixed) // self.per_token if self.per_token else 0
        return f"its --ctx-size {tokens} would fit" if tokens > 0 else "a smaller quantisation might fit"


async def predict_memory(words: tuple[str, ...]) -> PredictedMemory:
    """Returns the prediction for a model with these flags. Raises a CkdistError with the reason if it is wrong."""
    process = await asyncio.create_subprocess_exec(
        *module_words("ckdist.cli.model_memory", "serve", *words),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment_without(ServeConfig),
    )  # fmt: skip
    try:
        output, errors = await asyncio.wait_for(process.communicate(), MOST_SECONDS)
    except asyncio.TimeoutError:  # before Python 3.11 it is not TimeoutError
        raise ConfigError(f"its size is not known after {MOST_SECONDS:g} seconds: give its `memory`") from None
    finally:
        if process.returncode is None:
            process.kill()
    try:
        return msgspec.json.decode(output, type=PredictedMemory)
    except msgspec.MsgspecError:
        lines = errors.decode(errors="replace").strip().splitlines()
        reason = lines[-1].removeprefix("ckdist: ") if lines else f"it ended with code {process.returncode}"
        raise ConfigError(reason) from None
