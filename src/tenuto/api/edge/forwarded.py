"""Whose request it is when a proxy forwards it: `X-Forwarded-For`, from configured proxies only."""

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

Networks = Sequence[IPv4Network | IPv6Network]
Peer = tuple[str, int]


def holds(networks: Networks, address: str) -> bool:
    """Whether one of the networks holds the address; what is no address is in none."""
    if not networks:
        return False
    try:
        found = ip_address(address)
    except ValueError:
        return False
    if found.version == 6 and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in network for network in networks)


def place_of(address: str) -> str:
    """What a limit per address counts: of IPv6 the network of 64 bits that one subscriber has."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if found.version == 4:
        return address
    return str(found.ipv4_mapped or ip_network((found, 64), strict=False))


def client_of(
    peer: Peer | None, headers: Iterable[tuple[bytes, bytes]], proxies: Networks
) -> Peer | None:
    """The client for whom a proxy asks: the rightmost forwarded address that is no proxy.

    Whatever stands left of it may have been written by the client itself. What is no address ends
    the search at the proxy that sent it.
    """
    lists = [value for name, value in headers if name == b"x-forwarded-for"]
    found = peer
    for part in reversed(b",".join(lists).decode("latin-1").split(",")):
        try:
            found = (str(ip_address(part.strip())), 0)
        except ValueError:
            return found
        if not holds(proxies, found[0]):
            return found
    return found
