"""The sender: one POST to the checked address, whatever the endpoint does."""

import datetime as dt
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.webhooks.receiver import Receiver, answer, drip, receiving, silent

from tenuto.webhooks.sender import MAX_READ, Sender
from tenuto.webhooks.url_guard import UrlGuard

HEADERS = {"webhook-id": "1"}
LOOPBACK = ["127.0.0.0/8"]


class Names:
    """A resolver that gives each question its next answer, and remembers the questions."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(f"{host}:{port}")
        return self.answers[len(self.asked) - 1]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as created:
        yield created


@pytest.fixture
def sender() -> Sender:
    return Sender(UrlGuard(LOOPBACK), deadline_s=5)


async def test_request_arrives_unchanged(receiver: Receiver, sender: Sender) -> None:
    sent = await sender.post(receiver.url, HEADERS, b'{"a": 1}')
    assert (sent.status, sent.error) == (204, None)
    [got] = receiver.got
    assert (got.line, got.body) == ("POST /hook?x=1 HTTP/1.1", b'{"a": 1}')
    assert got.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert got.headers["content-type"] == "application/json"
    assert got.headers["webhook-id"] == "1"
    assert not {"cookie", "authorization", "accept-encoding"} & {
        name for name, value in got.headers.items() if value != "identity"
    }


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
async def test_every_2xx_is_a_success(receiver: Receiver, sender: Sender, status: int) -> None:
    receiver.replies = [answer(status, b"" if status == 204 else b"thanks")]
    sent = await sender.post(receiver.url, HEADERS, b"{}")
    assert (sent.status, sent.error) == (status, None)


@pytest.mark.parametrize("status", [300, 304, 400, 404, 410, 429, 500, 503])
async def test_status_other_than_2xx_is_a_failure(
    receiver: Receiver, sender: Sender, status: int
) -> None:
    receiver.replies = [answer(status, b"" if status == 304 else b"no\x00 " + b"x" * 5000)]
    sent = await sender.post(receiver.url, HEADERS, b"{}")
    assert sent.status == status
    assert sent.error is not None
    assert sent.error.startswith(f"HTTP {status}")
    assert len(sent.error) <= 210
    assert "\x00" not in sent.error


async def test_redirect_is_not_followed(receiver: Receiver, sender: Sender) -> None:
    async with receiving() as elsewhere:
        receiver.replies = [answer(307, b"", f"location: {elsewhere.url}", "set-cookie: a=b")]
        for _ in range(2):
            sent = await sender.post(receiver.url, HEADERS, b"{}")
            assert (sent.status, sent.error) == (307, "HTTP 307")
        assert elsewhere.connections == 0
    assert [item.headers.get("cookie") for item in receiver.got] == [None, None]


async def test_proxy_of_the_environment_is_not_used(
    receiver: Receiver, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with receiving() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert (await sender.post(receiver.url, HEADERS, b"{}")).error is None
        assert proxy.connections == 0


async def test_slow_response_is_cut_off(receiver: Receiver) -> None:
    receiver.replies = [drip]
    sent = await Sender(UrlGuard(LOOPBACK), deadline_s=0.3).post(receiver.url, HEADERS, b"{}")
    assert (sent.status, sent.error) == (None, "no response within 0.3 s")


async def test_silent_endpoint_times_out(receiver: Receiver) -> None:
    receiver.replies = [silent()]
    sent = await Sender(UrlGuard(LOOPBACK), deadline_s=0.3).post(receiver.url, HEADERS, b"{}")
    assert (sent.status, sent.error) == (None, "no response within 0.3 s")


@pytest.mark.parametrize(("status", "error"), [(200, None), (500, "HTTP 500: par")])
async def test_status_counts_though_the_body_never_comes(
    receiver: Receiver, status: int, error: str | None
) -> None:
    head = f"HTTP/1.1 {status} x\r\ncontent-length: 99\r\n\r\npar"
    receiver.replies = [silent(head.encode())]
    sent = await Sender(UrlGuard(LOOPBACK), deadline_s=0.3).post(receiver.url, HEADERS, b"{}")
    assert (sent.status, sent.error) == (status, error)


async def test_huge_response_is_not_read(receiver: Receiver, sender: Sender) -> None:
    receiver.replies = [receiver.endless]
    assert (await sender.post(receiver.url, HEADERS, b"{}")).error is None
    # What the kernel holds for both sides comes on top of what was read.
    assert receiver.written < MAX_READ + 16 * 1024 * 1024


async def test_compressed_response_is_not_decompressed(receiver: Receiver, sender: Sender) -> None:
    receiver.replies = [answer(500, b"\x1f\x8b not gzip", "content-encoding: gzip")]
    sent = await sender.post(receiver.url, HEADERS, b"{}")
    assert sent.error is not None
    assert "not gzip" in sent.error


@pytest.mark.parametrize("output", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 2", b"\x00" * 200_000])
async def test_response_that_is_not_http_is_an_error(
    receiver: Receiver, sender: Sender, output: bytes
) -> None:
    async def reply(writer: object) -> None:
        writer.write(output)  # type: ignore[attr-defined]

    receiver.replies = [reply]
    sent = await sender.post(receiver.url, HEADERS, b"{}")
    assert sent.status is None
    assert sent.error is not None
    assert sent.error.startswith("cannot be reached: ")


async def test_closed_port_is_an_error(receiver: Receiver, sender: Sender) -> None:
    async with receiving() as gone:
        url = gone.url
    sent = await sender.post(url, HEADERS, b"{}")
    assert sent.status is None
    assert "cannot be reached" in (sent.error or "")


async def test_forbidden_url_is_never_connected_to(receiver: Receiver) -> None:
    for guard in (
        UrlGuard(),
        UrlGuard(["10.0.0.0/8"]),
        UrlGuard([f"127.0.0.1:{receiver.port + 1}"]),
    ):
        sent = await Sender(guard).post(receiver.url, HEADERS, b"{}")
        assert sent.status is None
        assert sent.error is not None
    assert receiver.connections == 0


async def test_name_is_resolved_once_per_delivery(receiver: Receiver) -> None:
    """The second answer leads to the trap; only the first, checked one may ever be used."""
    async with receiving() as trap:
        names = Names(["127.0.0.2"], ["127.0.0.1"], ["127.0.0.1"])
        guard = UrlGuard(["127.0.0.2", "rebind.example:1"], names)
        sent = await Sender(guard).post(f"http://rebind.example:{trap.port}/", HEADERS, b"{}")
        assert names.asked == [f"rebind.example:{trap.port}"]
        assert sent.status is None  # nobody listens on the address that was checked
        assert trap.connections == 0
        again = await Sender(guard).post(f"http://rebind.example:{trap.port}/", HEADERS, b"{}")
        assert "must begin with https" in (again.error or "")
        assert trap.connections == 0


async def test_name_with_one_forbidden_address_is_refused(receiver: Receiver) -> None:
    names = Names(["127.0.0.1", "169.254.169.254"])
    guard = UrlGuard(["several.example"], names)
    sent = await Sender(guard).post(f"http://several.example:{receiver.port}/", HEADERS, b"{}")
    assert "must not call" in (sent.error or "")
    assert receiver.connections == 0


async def test_next_address_is_tried_if_one_does_not_respond(receiver: Receiver) -> None:
    guard = UrlGuard(["several.example"], Names(["127.0.0.3", "127.0.0.1"]))
    sent = await Sender(guard).post(f"http://several.example:{receiver.port}/", HEADERS, b"{}")
    assert sent.status == 204
    assert receiver.got[0].headers["host"] == f"several.example:{receiver.port}"


async def test_request_accepted_by_one_address_is_sent_to_no_other(receiver: Receiver) -> None:
    async def hang_up(_writer: object) -> None: ...

    receiver.replies = [hang_up, answer(204)]
    guard = UrlGuard(["several.example"], Names(["127.0.0.1", "127.0.0.1"]))
    sent = await Sender(guard).post(f"http://several.example:{receiver.port}/", HEADERS, b"{}")
    assert sent.status is None
    assert len(receiver.got) == 1


def certificate(folder: Path, name: str) -> Path:
    """A self-signed certificate for a name, with its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    alternative = x509.SubjectAlternativeName(
        [x509.DNSName(name)] if not name[0].isdigit() else [x509.IPAddress(ip_address(name))]
    )
    created = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + dt.timedelta(days=36500))
        .add_extension(alternative, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = created.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = folder / f"{name}.pem"
    path.write_bytes(pem)
    return path


@asynccontextmanager
async def secure(pem: Path) -> AsyncIterator[Receiver]:
    """A receiver with TLS and that certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    async with receiving(context) as receiver:
        yield receiver


def trusting(pem: Path, name: str = "hooks.example") -> Sender:
    """A sender that trusts the certificate, for a name that leads to loopback."""
    guard = UrlGuard([name], Names(["127.0.0.1"]))
    return Sender(guard, tls=ssl.create_default_context(cafile=str(pem)))


async def test_certificate_must_match_the_name(tmp_path: Path) -> None:
    pem = certificate(tmp_path, "hooks.example")
    async with secure(pem) as receiver:
        url = f"https://hooks.example:{receiver.port}/in"
        sent = await trusting(pem).post(url, HEADERS, b"{}")
        assert (sent.status, sent.error) == (204, None)
        assert receiver.names == ["hooks.example"]
        [got] = receiver.got
        assert got.headers["host"] == f"hooks.example:{receiver.port}"
        assert got.line == "POST /in HTTP/1.1"


@pytest.mark.parametrize("name", ["other.example", "127.0.0.1"])
async def test_certificate_of_another_name_is_refused(tmp_path: Path, name: str) -> None:
    """One for the address, too: it is the name that was asked for."""
    pem = certificate(tmp_path, name)
    async with secure(pem) as receiver:
        url = f"https://hooks.example:{receiver.port}/"
        sent = await trusting(pem).post(url, HEADERS, b"{}")
        assert sent.status is None
        assert "certificate" in (sent.error or "").lower()
        assert receiver.got == []


async def test_untrusted_certificate_is_refused(tmp_path: Path) -> None:
    pem = certificate(tmp_path, "hooks.example")
    async with secure(pem) as receiver:
        url = f"https://hooks.example:{receiver.port}/"
        guard = UrlGuard(["hooks.example"], Names(["127.0.0.1"]))
        sent = await Sender(guard).post(url, HEADERS, b"{}")
        assert sent.status is None
        assert "certificate" in (sent.error or "").lower()
        assert receiver.got == []
