"""Text files that a user names on the command line, of a bounded size. A pipe is accepted, a device is not."""

from ckdist.errors import ConfigError
from ckdist.regular_file import open_regular


def read_text_file(path: str, what: str, most_bytes: int, errors: str = "strict") -> str:
    """Reads a UTF-8 text file of at most `most_bytes`. `errors` is that of bytes.decode.

    Raises ConfigError that begins with "cannot read" and the given name of the file.
    """
    try:
        with open_regular(path, pipes=True) as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise ConfigError(f"cannot read {what}: it has more than the {most_bytes >> 10} KiB that are allowed")
        return data.decode("utf-8", errors)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path, or it is not UTF-8
        raise ConfigError(f"cannot read {what}: {getattr(error, 'strerror', None) or error}") from None
