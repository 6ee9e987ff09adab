"""The URL guard: allowed targets, in every notation of an address."""

import asyncio
import socket
import threading
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tenuto.model.errors import Invalid
from tenuto.settings import load
from tenuto.webhooks.url_guard import UrlGuard, parse

PUBLIC = "93.184.216.34"
NAMES = {
    "example.com": [PUBLIC],
    "two.example.com": [PUBLIC, "2606:2800:220:1::1"],
    "xn--bcher-kva.example": [PUBLIC],
    "my_service.example": [PUBLIC],
    "nat64.example": [f"64:ff9b::{PUBLIC}"],
    "mapped.example": [f"::ffff:{PUBLIC}"],
    "localhost": ["127.0.0.1", "::1"],
    "localhost.localdomain": ["127.0.0.1"],
    "intranet": ["10.1.2.3"],
    "half.example": [PUBLIC, "192.168.1.1"],
    "zone.example": ["fe80::1%eth0"],
    "metadata.google.internal": ["169.254.169.254"],
    "metadata6.internal": ["fd00:ec2::254"],
    "meta64.example": ["64:ff9b::a9fe:a9fe"],
    "wire64.example": ["64:ff9b::168.63.129.16"],
    "metamapped.example": ["::ffff:169.254.169.254"],
    "nothing.example": [],
}


async def answers(host: str, port: int) -> list[str]:
    """A resolver that knows `NAMES`, and reads numbers as liberally as any C library."""
    if host in NAMES:
        return NAMES[host]
    raise OSError(f"no address for {host}:{port}")


async def refusal(url: str, *allow: str) -> str:
    with pytest.raises(Invalid) as caught:
        await UrlGuard(allow, answers).resolve_allowed(url)
    assert "\n" not in caught.value.message
    return caught.value.code


FORBIDDEN = """
https://127.0.0.1/ https://127.0.0.1./ https://127.255.255.254/ https://localhost/
https://LOCALHOST/ https://localhost./ https://localhost.localdomain/ https://intranet/
https://10.0.0.1/ https://10.255.255.255:8443/ https://172.16.0.1/ https://172.31.255.255/
https://192.168.0.1/ https://100.64.0.1/ https://100.127.255.255/ https://169.254.0.1/
https://169.254.169.254/latest/meta-data/ https://metadata.google.internal/computeMetadata/v1/
https://metadata6.internal/ https://100.100.100.200/ https://168.63.129.16/ https://192.0.0.192/
https://0.0.0.0/ https://0.1.2.3/ https://255.255.255.255/ https://240.0.0.1/ https://224.0.0.1/
https://239.255.255.255/ https://192.0.2.1/ https://198.51.100.7/ https://203.0.113.9/
https://198.18.0.1/ https://198.19.255.255/ https://192.88.99.1/ https://192.0.0.8/
https://[::1]/ https://[::]/ https://[0:0:0:0:0:0:0:1]/ https://[0000::0001]:8443/
https://[::ffff:127.0.0.1]/ https://[::ffff:7f00:1]/ https://[0:0:0:0:0:FFFF:7F00:0001]/
https://[::ffff:169.254.169.254]/ https://[::ffff:10.0.0.1]/ https://[::ffff:0:127.0.0.1]/
https://[::127.0.0.1]/ https://[::7f00:1]/ https://[::8.8.8.8]/ https://[64:ff9b::127.0.0.1]/
https://[64:ff9b::a9fe:a9fe]/ https://[64:ff9b::10.0.0.1]/ https://[64:ff9b:1::8.8.8.8]/
https://[2002:7f00:1::]/ https://[2002:a9fe:a9fe::1]/ https://[2002:808:808::1]/
https://[2001:0:53aa:64c:0:0:80ff:fffe]/ https://[2001::1]/ https://[2001:db8::1]/
https://[2001:2::1]/ https://[2001:10::1]/ https://[3fff::1]/ https://[fc00::1]/
https://[fd00:ec2::254]/ https://[fd12:3456::1]/ https://[fe80::1]/ https://[febf::1]/
https://[fec0::1]/ https://[ff02::1]/ https://[ff0e::1]/ https://[100::1]/ https://[5f00::1]/
https://half.example/ https://zone.example/ https://meta64.example/ https://wire64.example/
https://metamapped.example/ https://\u24db\u24de\u24d2\u24d0\u24db\u24d7\u24de\u24e2\u24e3/
https://127\u30020\u30020\u30021/ https://127\uff0e0\uff0e0\uff0e1/
https://\u2460\u2461\u2466.\u24ea.\u24ea.\u2460/ https://\uff11\uff12\uff17.0.0.1/
http://example.com/ https://example.com:22/ https://example.com:25/ https://example.com:1023/
""".split()

MALFORMED = [
    *"""
https://2130706433/ https://017700000001/ https://0177.0.0.1/ https://0x7f.0.0.1/
https://0x7f000001/ https://0x7f.1/ https://127.1/ https://127.0.1/ https://0/ https://0x/
https://127.0.0.1.1/ https://127.0.0.01/ https://127.0.0.0x1/ https://0xa9fea9fe/
https://2852039166/ https://0251.0376.0251.0376/ https://169.254.43518/ https://1.2.3.4.5/
https://256.0.0.1/ https://127.0.0.1.. https://foo.0x7f/ https://127.0.0.1%2f@example.com/
https://[fe80::1%eth0]/ https://[fe80::1%25eth0]/ https://[::1 https://::1/ https://[]/
https://[::ffff:127.0.0.1.1]/ https://[::1]x/ https://[127.0.0.1]/ https://[v1.fe80::1]/
https://user@example.com/ https://user:pw@example.com/ https://example.com@127.0.0.1/
https://127.0.0.1#@example.com/ https://example.com#frag https://example.com/#
https://example.com:0/ https://example.com:65536/ https://example.com:443443/
https://example.com:+443/ https://example.com:/ https://example.com:80:443/
ftp://example.com/ file:///etc/passwd gopher://127.0.0.1/ javascript:alert(1) data:,x
//example.com/ example.com example.com/hook https:example.com https:/example.com https:///example.com
https://.example.com/ https://example..com/ https://-a.example/ https://a-.example/ https://.
https://example.com\\@127.0.0.1/ https:\\\\example.com/ https://example.com\\.evil/
https://exa%6dple.com/ https://example.com%00.evil/ https://a,b/ https://*.example.com/
https://example.com/%zz https://example.com/\u00fc https://nothing.example/ https://unknown.example/
https://a\u200bb.example/ https://\u00ad/ https://xn--/ https://\ud800.example/
""".split(),
    "",
    " https://example.com/",
    "https://example.com/ ",
    "https://exa mple.com/",
    "https://example.com/a b",
    "https://example.com\r\nX: y/",
    "https://example.com/\r\nX: y",
    "https://example.com\t/",
    "https://example.com\x00/",
    "https://example.com\u00a0/",
    "ht\ntps://example.com/",
    f"https://example.com/{'a' * 2000}",
    f"https://{'a' * 64}.example/",
    f"https://{'a.' * 127}aa/",
    "https://" + "\u00fc" * 200 + ".example/",
]


@pytest.mark.parametrize("url", FORBIDDEN)
async def test_address_that_is_not_public_is_refused(url: str) -> None:
    assert await refusal(url) in ("url_forbidden", "url_invalid")


@pytest.mark.parametrize("url", MALFORMED)
async def test_ambiguous_url_is_refused(url: str) -> None:
    assert await refusal(url) == "url_invalid"


def test_table_of_urls_is_long_enough() -> None:
    assert len({*FORBIDDEN, *MALFORMED}) > 160


@pytest.mark.parametrize(
    ("url", "host", "port", "path", "authority"),
    [
        ("https://example.com", "example.com", 443, "/", "example.com"),
        ("HTTPS://Example.COM:8443/Hook", "example.com", 8443, "/Hook", "example.com:8443"),
        ("https://example.com.?a=b%20c&d=/", "example.com", 443, "/?a=b%20c&d=/", "example.com"),
        ("https://B\u00fccher.example/x", "xn--bcher-kva.example", 443, "/x", None),
        ("https://my_service.example", "my_service.example", 443, "/", None),
        (f"https://{PUBLIC}/", PUBLIC, 443, "/", PUBLIC),
        ("https://[2606:2800:220:1:0::1]:444/", "2606:2800:220:1::1", 444, "/", None),
        ("http://example.com:80/", "example.com", 80, "/", "example.com"),
    ],
)
def test_url_is_parsed_once(
    url: str, host: str, port: int, path: str, authority: str | None
) -> None:
    target = parse(url)
    assert (target.host, target.port, target.path) == (host, port, path)
    assert authority in (None, target.authority)


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("https://example.com/", [PUBLIC]),
        ("https://two.example.com:8443/", [PUBLIC, "2606:2800:220:1::1"]),
        (f"https://{PUBLIC}/", [PUBLIC]),
        ("https://[2606:2800:220:1::1]/", ["2606:2800:220:1::1"]),
        ("https://nat64.example/", ["64:ff9b::5db8:d822"]),
        ("https://mapped.example/", [PUBLIC]),
    ],
)
async def test_public_address_is_allowed(url: str, addresses: list[str]) -> None:
    checked = await UrlGuard((), answers).resolve_allowed(url)
    assert [str(address) for address in checked.addresses] == addresses


@pytest.mark.parametrize(
    ("allow", "url"),
    [
        ("intranet", "https://intranet/"),
        ("intranet", "http://intranet:8080/"),
        ("Intranet.", "http://INTRANET/"),
        ("intranet:8080", "http://intranet:8080/"),
        ("10.0.0.0/8", "http://intranet/"),
        ("10.0.0.0/8", "https://10.1.1.1:81/"),
        ("10.1.2.3", "http://10.1.2.3/"),
        ("10.1.2.3:99", "http://10.1.2.3:99/"),
        ("localhost", "http://localhost:1234/"),
        ("::1", "https://[::1]/"),
        ("[::1]:8080", "http://[::1]:8080/"),
        ("example.com", "http://example.com/"),
        ("169.254.0.0/16", "https://169.254.1.1/"),
    ],
)
async def test_private_host_can_be_allowed_by_the_operator(allow: str, url: str) -> None:
    assert await refusal(url) == "url_forbidden"
    assert (await UrlGuard([allow], answers).resolve_allowed(url)).addresses


@pytest.mark.parametrize(
    ("allow", "url"),
    [
        ("intranet:8080", "http://intranet/"),
        ("intranet", "https://localhost/"),
        ("10.0.0.0/8", "https://half.example/"),
        ("10.0.0.0/8", "http://example.com/"),
        ("192.168.0.0/16", "http://half.example/"),
        ("192.168.0.0/16", "https://half.example:22/"),
        ("example", "https://intranet/"),
        ("zone.example", "https://zone.example/"),
        ("metadata.google.internal", "https://metadata.google.internal/"),
        ("metadata6.internal", "https://metadata6.internal/"),
        ("169.254.0.0/16", "https://169.254.169.254/"),
        ("fd00::/8", "https://[fd00:ec2::254]/"),
        ("100.64.0.0/10", "https://100.100.100.200/"),
        ("meta64.example", "https://meta64.example/"),
    ],
)
async def test_private_host_without_permission_stays_forbidden(allow: str, url: str) -> None:
    assert await refusal(url, allow) == "url_forbidden"


@pytest.mark.parametrize("entry", ["10.0.0.1/8", "a b", "http://x", "x/y", "user@x", "0x7f.1", "*"])
def test_invalid_allowed_host_is_refused(entry: str) -> None:
    with pytest.raises(Invalid, match="webhook_allow"):
        UrlGuard([entry])


async def test_name_lookup_has_a_timeout() -> None:
    async def silent(host: str, port: int) -> list[str]:
        await asyncio.Event().wait()
        return [host, str(port)]

    with pytest.raises(Invalid, match="cannot be resolved"):
        await UrlGuard((), silent, timeout_s=0.05).resolve_allowed("https://example.com/")


@pytest.mark.parametrize("seconds", [0, -1, 30.5])
def test_timeout_beyond_the_lease_is_refused(seconds: float) -> None:
    with pytest.raises(Invalid, match="webhook_timeout_s"):
        load({"webhook_timeout_s": seconds})


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
@example(ip_address("::ffff:10.0.0.1"))
async def test_only_global_addresses_of_the_registries_are_public(address: object) -> None:
    existing = ip_address(str(address))
    host = f"[{existing}]" if existing.version == 6 else str(existing)
    matches = []
    with suppress(Invalid):
        matches = list((await UrlGuard().resolve_allowed(f"https://{host}/")).addresses)
    assert all(item.is_global and not item.is_multicast for item in matches)


async def test_slow_name_lookup_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, answer = list[str](), threading.Event()

    def getaddrinfo(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        if host == "silent.example" and not answer.wait(30):
            raise OSError
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (PUBLIC, port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    guard = UrlGuard(timeout_s=5)
    patient = asyncio.create_task(guard.resolve_allowed("https://silent.example/"))
    impatient = UrlGuard(timeout_s=0.01)
    silent = [
        impatient.resolve_allowed(f"https://silent.example/{number}") for number in range(100)
    ]
    refused = await asyncio.gather(*silent, return_exceptions=True)
    assert {type(item) for item in refused} == {Invalid}
    assert (await guard.resolve_allowed("https://example.com/")).addresses == (ip_address(PUBLIC),)
    async with asyncio.timeout(5):
        await asyncio.to_thread(lambda: None)
    answer.set()
    assert (await patient).addresses == (ip_address(PUBLIC),)
    assert asked == ["silent.example", "example.com"]
    await guard.resolve_allowed("https://example.com/")
    assert asked[2:] == ["example.com"], "an answer is not kept"
