"""The certificate of --ssl-certfile, checked before anything is loaded."""

import ssl

from ckdist.errors import ConfigError


def check_certificate(certificate: str | None, key: str | None) -> None:
    """Raises ConfigError unless both files are there and belong together, or none is given."""
    if certificate is None and key is None:
        return
    if certificate is None or key is None:
        missing = "--ssl-certfile" if certificate is None else "--ssl-keyfile"
        raise ConfigError(f"TLS needs a certificate and its key: {missing} is missing")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(f"--ssl-certfile {certificate} with --ssl-keyfile {key} cannot be used: {reason}") from None
