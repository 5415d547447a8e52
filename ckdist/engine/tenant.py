"""The tenant of a request: requests of different tenants share no blocks of the cache."""

import hashlib

ONE_TENANT = b""  # of all requests that name none


def adapted_tenant(tenant: bytes | None, digest: bytes) -> bytes | None:
    """The tenant of requests of `tenant` with the adapter of this digest. None stays None."""
    if tenant is None:
        return None
    return hashlib.blake2b(digest + tenant, digest_size=32, person=b"ckdist adapter").digest()
