"""The tenant of a request: requests of different tenants share no blocks of the cache."""

ONE_TENANT = b""  # of all requests that name none
