"""What makes requests over TLS trustworthy, read once per process."""

import ssl
from functools import cache

import httpx2


@cache
def trusted() -> ssl.SSLContext:
    """Verifies servers by the system's or certifi's certificates; to load them takes 15 ms."""
    return httpx2.create_ssl_context()


def trusted_for(url: str) -> ssl.SSLContext | bool:
    """What verifies the servers of an address; nothing is loaded for one without TLS."""
    return trusted() if url.startswith("https:") else False
