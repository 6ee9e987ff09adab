"""A small OTLP/HTTP collector on loopback that accepts only valid requests."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PROTOBUF = "application/x-protobuf"


class Arrived(NamedTuple):
    """A span, and the service that sent it."""

    service: str
    name: str
    trace: str
    number: str
    parent: str
    """Empty for the first span of a trace."""
    attributes: dict[str, str]


class Collector:
    """What arrived, and why requests were refused."""

    def __init__(self) -> None:
        self.spans: list[Arrived] = []
        self.refused: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        """Read one request as the protocol has it; answers the status of the reply."""
        self.headers.append(headers)
        if path != "/v1/traces" or headers.get("content-type") != PROTOBUF:
            self.refused.append(f"{path}: {headers.get('content-type')}")
            return 404 if path != "/v1/traces" else 415
        try:
            plain = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
            request = ExportTraceServiceRequest.FromString(plain)
        except (OSError, EOFError, DecodeError) as error:
            self.refused.append(str(error))
            return 400
        self.spans += _spans(request)
        return 200


def _spans(request: ExportTraceServiceRequest) -> Iterator[Arrived]:
    for resource in request.resource_spans:
        about = {
            attribute.key: attribute.value.string_value
            for attribute in resource.resource.attributes
        }
        for scope in resource.scope_spans:
            for span in scope.spans:
                assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
                yield Arrived(
                    about["service.name"],
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    {attribute.key: attribute.value.string_value for attribute in span.attributes},
                )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port until the block ends."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status = collector.take(self.path, headers, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(status)
            self.send_header("content-type", PROTOBUF)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            """Drops the log lines of the HTTP server."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
