"""Finds the client address of forwarded requests: `X-Forwarded-For`, from known proxies only."""

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

Networks = Sequence[IPv4Network | IPv6Network]
Peer = tuple[str, int]
"""Address and port; port 0 if it is unknown."""


def is_in_networks(networks: Networks, address: str) -> bool:
    """True if one of the networks contains the address; False for a text that is no address."""
    if not networks:
        return False
    try:
        ip = ip_address(address)
    except ValueError:
        return False
    if ip.version == 6 and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return any(ip in network for network in networks)


def address_key(address: str) -> str:
    """Returns the key for limits per address: the /64 network of an IPv6 address, else the text.

    One subscriber has a whole /64 network. An IPv4 address mapped to IPv6 counts as IPv4.
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return address
    if ip.version == 4:
        return address
    return str(ip.ipv4_mapped or ip_network((ip, 64), strict=False))


def client_address(
    peer: Peer | None, headers: Iterable[tuple[bytes, bytes]], proxies: Networks
) -> Peer | None:
    """Returns the client behind a proxy: the rightmost forwarded address that is no known proxy.

    Without the header it is the peer. Addresses left of it may have been written by the client
    itself. A text that is not an address ends the search: the proxy that sent it is returned.
    """
    values = [value for name, value in headers if name == b"x-forwarded-for"]
    client = peer
    for part in reversed(b",".join(values).decode("latin-1").split(",")):
        try:
            client = (str(ip_address(part.strip())), 0)
        except ValueError:
            return client
        if not is_in_networks(proxies, client[0]):
            return client
    return client
