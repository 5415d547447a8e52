"""`ckdist status`."""

import re
import urllib.parse
from dataclasses import dataclass

from ckdist.config.options import CommandSettings, option
from ckdist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StatusConfig(CommandSettings):
    """`ckdist status`: show the state, load and ranks of a running server."""

    url: str = option("http://127.0.0.1:8080", "url", metavar="URL", help="the server (default: http://127.0.0.1:8080)")
    api_key: str | None = option(
        None, metavar="KEY", secret=True, help="API key for the server; ps shows it, so prefer CKDIST_API_KEY"
    )
    once: bool = option(False, help="print the table once, as without a terminal")
    json: bool = option(False, help="print one JSON object")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url(self.url)


def check_url(url: str, name: str = "the URL") -> None:
    """Raises ConfigError, which begins with `name`, if this is no URL of a server."""
    try:
        is_url = re.fullmatch(r"https?://[^/\s]+(/\S*)?", url) and urllib.parse.urlsplit(url).port != 0
    except ValueError:  # a bracket is missing, or the port is no number up to 65535
        is_url = False
    if not is_url:
        raise ConfigError(f"{name} ({url}) must be http://HOST:PORT or https://HOST:PORT")
