"""What the tests of the HTTP process share: a byte tokenizer in a folder, and a server over a fake rank 0."""

import contextlib
import json
import tempfile
import time
from pathlib import Path

import httpx
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from ckdist.config.serve_config import ServeConfig
from ckdist.serve.addresses import listen
from ckdist.serve.process import HttpProcess
from ckdist.tokens.tried import remember
from tests.support.fake_engine import FakeEngine

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"
    "{% if shout %}!{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
LONGEST_SLEEP, SLEEP_PER_CALL = 0.1, 8.0  # seconds, and times the seconds of a call
VOCAB = 260  # two special tokens, 256 bytes, and rows of the model that stand for no text


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A folder whose tokenizer has one token per byte; `<|end|>` is token 1."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|begin|>": 0, "<|end|>": 1, **{letter: 2 + i for i, letter in enumerate(alphabet)}}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<|begin|>", special=True), AddedToken("<|end|>", special=True)])
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )
    return folder


@contextlib.contextmanager
def serving(
    engine_options: dict | None = None,
    template: str | None = TEMPLATE,
    metrics=None,
    listeners=None,
    insecure=False,
    **flags,
):
    """A FakeEngine and an HttpProcess over it, ready. `metrics`: the socket of --metrics-port."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_tokenizer(Path(name), template)
        remember(folder)  # so that the HTTP process does not try it
        endpoint = f"ipc://{name}/engine"
        with FakeEngine(endpoint, VOCAB, **(engine_options or {})) as engine:
            first, *more = listeners or [listen("127.0.0.1", 0)]
            http = HttpProcess.start(
                ServeConfig(port=0, **flags), endpoint, str(folder), "bytes", first, metrics, more=more
            )
            try:
                wait_healthy(http.url, insecure=insecure)
                yield engine, http
            finally:
                http.stop()


def healthy(url: str, insecure: bool = False) -> bool:
    """Whether the server there answers that it serves."""
    try:
        return httpx.get(url + "/health", verify=not insecure).status_code == 200
    except httpx.TransportError:
        return False


def wait_healthy(url: str, seconds: float = 60.0, insecure: bool = False) -> None:
    """Until the server there answers that it serves."""
    wait_for(lambda: healthy(url, insecure), seconds, every=0.05)


def wait_for(condition, seconds: float = 15.0, every: float = 0.01) -> None:
    """Calls `condition` until it is true. Sleeps `every` seconds in between, or longer if a call takes long."""
    end = time.monotonic() + seconds
    while True:
        begun = time.monotonic()
        if condition():
            return
        assert begun < end, "it did not happen in time"
        time.sleep(max(every, min(LONGEST_SLEEP, SLEEP_PER_CALL * (time.monotonic() - begun))))
