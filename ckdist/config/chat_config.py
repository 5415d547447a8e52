"""`ckdist chat`."""

from dataclasses import dataclass

from ckdist.config.options import option
from ckdist.config.sampling_config import SamplingConfig
from ckdist.config.status_config import check_url
from ckdist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ChatConfig(SamplingConfig):
    """`ckdist chat`: chat on the terminal with a model in this process or on a server."""

    n_predict: int = option(1024, "-n", within=(1, 1 << 24), help="most tokens of an answer")
    system: str | None = option(None, metavar="TEXT", help="system message before the chat")
    url: str | None = option(None, metavar="URL", help="use this server, e.g. http://127.0.0.1:8080, and load no model")
    api_key: str | None = option(None, metavar="KEY", secret=True, help="API key for the server at --url")

    special_tokens_in_text: bool = option(False, help="keep control tokens in the text of messages; not with --url")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url is not None:
            check_url(self.url, "--url")
        if self.url is not None and self.model is not None:
            raise ConfigError(
                "--url and --model were both given, and the server has its own model: leave one of them out"
            )
        if self.url is not None and self.special_tokens_in_text:
            raise ConfigError("--special-tokens-in-text is a flag of the server at --url; leave it out here")

    @property
    def runs_model(self) -> bool:
        """False if a server runs the model."""
        return self.url is None
