"""The chat template that --chat-template-file puts in place of the model's."""

from jinja2 import TemplateSyntaxError

from ckdist.errors import ConfigError
from ckdist.text_file import read_text_file
from ckdist.tokens.sandbox import ChatEnvironment

MAX_BYTES = 96 << 10  # published templates have at most 30 KB


def read_template_file(path: str) -> str:
    """Returns the text of a template. Raises ConfigError if the file is unreadable or no template."""
    what = f"--chat-template-file {path}"
    text = read_text_file(path, what, MAX_BYTES)
    try:
        ChatEnvironment().parse(text)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{what} is no template: line {error.lineno}: {error.message}") from None
    return text
