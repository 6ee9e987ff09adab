"""One client's connection: bounds on size, speed and number.

The HTTP parser and the server are uvicorn's. `Connection` counts bytes before the parser gets them,
because the parser joins the parts of a header at a cost that grows with the square of their number.
`Edge.sweep_once` checks all connections once a second and ends those that exceed a deadline.
"""

import asyncio
import logging
from collections import Counter, deque
from enum import Enum
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.protocols.utils import get_remote_addr

from tenuto.api.edge import problems
from tenuto.api.edge.connection_limits import ConnectionTable, Deadlines, ReadProgress
from tenuto.api.edge.forwarded import Networks, address_key, client_address, is_in_networks
from tenuto.clock import Clock
from tenuto.model.errors import Invalid, TenutoError, Unavailable

log = logging.getLogger("tenuto.api")

MAX_HEAD_BYTES = 64 * 1024
"""Maximum bytes of a request line with its headers, or of anything else that is not a body."""
MAX_HEADERS = 100
MAX_PIPELINED = 16
"""Maximum requests on one connection that wait for the responses before them."""
MAX_LINGER_BYTES = 16 * 1024 * 1024
"""Bytes that a refused client may still send before its connection is aborted."""
ADMITTED = "tenuto.admitted"
"""Extension in a request's scope; `request_body` calls it when the token is valid."""
REPORT_S = 60.0
"""Seconds between log lines about refusals: untrusted clients must not fill the log."""


class Phase(Enum):
    """State of a connection: the next thing expected of the client."""

    NEW = 0
    """A first request; nothing was received yet."""
    IDLE = 1
    """Another request, or nothing: all requests so far are answered."""
    HEAD = 2
    BODY = 3
    RESPONSE = 4
    """To read the response: its request is complete."""
    REFUSED = 5
    """To close the connection: the refusal was sent, and all further data is discarded."""


class Edge:
    """State shared by all connections of a server: table, deadlines and counts of refusals."""

    def __init__(
        self,
        clock: Clock,
        table: "ConnectionTable[Connection]",
        proxies: Networks = (),
        deadlines: Deadlines | None = None,
    ) -> None:
        self.clock = clock
        self.table = table
        self.proxies = proxies
        self.deadlines = deadlines or Deadlines()
        self.connections: set[Connection] = set()
        self._refused: Counter[str] = Counter()
        self._reported = clock.elapsed()

    def build_refusal(self, error: TenutoError) -> bytes:
        """Returns the complete HTTP response for a refused request, and counts the refusal."""
        self._refused[error.code] += 1
        problem, headers = problems.problem_of(error)
        body = msgspec.json.encode(problem)
        headers |= {
            "content-type": problems.MEDIA_TYPE,
            "content-length": str(len(body)),
            "x-content-type-options": "nosniff",
            "cache-control": "no-store",
            "connection": "close",
        }
        lines = [f"{name}: {value}\r\n".encode() for name, value in headers.items()]
        return b"".join([STATUS_LINE[problem.status], *lines, b"\r\n", body])

    async def sweep_once(self) -> int:
        """Ends connections beyond a deadline; returns how many. Once a minute, logs refusals."""
        now = self.clock.elapsed()
        ended = sum(connection.end_if_overdue(now) for connection in list(self.connections))
        if self._refused and now - self._reported >= REPORT_S:
            counts = ", ".join(f"{code} {count}" for code, count in self._refused.most_common())
            log.warning("requests refused before routing in the last minute: %s", counts)
            self._refused.clear()
        if not self._refused:
            self._reported = now
        return ended


class _CountingTransport:
    """A transport that counts the bytes written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written = 0

    def write(self, data: bytes) -> None:
        """Writes the data and counts its bytes."""
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """A connection that ends if its client sends too much, sends too slowly or reads too slowly."""

    def __init__(self, edge: Edge, **options: Any) -> None:
        super().__init__(**options)
        self._edge = edge
        self._phase = Phase.NEW
        self._phase_started = 0.0
        """When the phase started; like all times here, seconds of the monotonic clock."""
        self._received = 0
        """Bytes of the body received so far; after a refusal, bytes discarded."""
        self._last_data_at = 0.0
        """When a part of the body last arrived, or the server last kept the client from sending."""
        self._undelivered = 0
        """Bytes passed to the parser since it last delivered headers or a part of a body."""
        self._refusal: TenutoError | None = None
        self._read_progress = ReadProgress()
        self._behind_proxy = False
        self._open: deque[RequestResponseCycle] = deque()
        """Requests without a complete response, in the order of their responses."""
        self._is_admitted = False
        """True if the first open request has a valid token."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Adds the connection to the table, aborting a closable one if needed, or refuses it."""
        address, _ = get_remote_addr(transport) or ("-", 0)
        edge = self._edge
        self._behind_proxy = is_in_networks(edge.proxies, address)
        decision = edge.table.add(self, None if self._behind_proxy else address_key(address))
        if not decision.accepted:
            self.transport = transport
            error = Unavailable(
                f"too many connections to this server, or from {address};"
                " close some, or try again later",
                "too_many_connections",
            )
            transport.write(edge.build_refusal(error))
            transport.close()
            return
        if decision.closed is not None:
            decision.closed.transport.abort()
        counted: Any = _CountingTransport(transport)
        super().connection_made(counted)
        self._phase_started = edge.clock.elapsed()
        edge.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Removes the connection and tells all its open requests that the client is gone."""
        self._edge.table.remove(self)
        self._edge.connections.discard(self)
        for cycle in self._open:  # uvicorn notifies only the last request
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Passes data to the parser, refusing too long headers; after a refusal, discards data."""
        self._unset_keepalive_if_required()
        if self._phase in (Phase.NEW, Phase.IDLE):
            self._enter_phase(Phase.HEAD)
        while data and not self.transport.is_closing():
            if self._is_refused():
                self._discard(len(data))
                return
            max_bytes = MAX_HEAD_BYTES - self._undelivered
            chunk, data = data[:max_bytes], data[max_bytes:]
            self._undelivered += len(chunk)
            self._feed_parser(chunk)
            if self._undelivered >= MAX_HEAD_BYTES and not self._is_refused():
                self._refuse(
                    Invalid(
                        f"request line and headers exceed the limit of {MAX_HEAD_BYTES:,} bytes",
                        "headers_too_large",
                    )
                )

    def _feed_parser(self, chunk: bytes) -> None:
        """Passes bytes to the parser; refuses the request if the parser or a callback raises."""
        try:
            self.parser.feed_data(chunk)
        except httptools.HttpParserUpgrade:
            # No other protocol is supported. What follows on the connection may be in one.
            if self.cycle is not None:
                self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self._refuse(self._refusal or Invalid("not a valid HTTP request", "invalid_request"))

    def on_message_begin(self) -> None:
        """Starts the time limit for the headers of a pipelined request."""
        if self._phase is not Phase.HEAD:
            self._enter_phase(Phase.HEAD)  # a request that arrived together with the one before it
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Refuses too many headers or pipelined requests; otherwise starts the request."""
        self._undelivered = 0
        if len(self.headers) > MAX_HEADERS:
            self._abort_parsing(
                Invalid(f"the request has more than {MAX_HEADERS} headers", "headers_too_large")
            )
        if len(self.pipeline) >= MAX_PIPELINED:
            self._abort_parsing(
                Invalid(f"more than {MAX_PIPELINED} requests wait for responses", "invalid_request")
            )
        if self._behind_proxy:
            self.scope["client"] = client_address(self.client, self.headers, self._edge.proxies)
        self.scope["extensions"] = {ADMITTED: {"call": self._on_admitted}}
        super().on_headers_complete()
        self._open.append(self.cycle)
        self.headers = []  # the parser reports trailers as headers; they must not reach the request
        self._received = 0
        self._enter_phase(Phase.BODY)
        self._mark_served_or_closable()

    def _abort_parsing(self, error: TenutoError) -> None:
        """Raises the error in the parser; the request is then refused with this error."""
        self._refusal = error
        raise error

    def on_body(self, body: bytes) -> None:
        """Counts the received bytes and restarts the time limit for the next ones."""
        self._undelivered = 0
        self._received += len(body)
        self._last_data_at = self._edge.clock.elapsed()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Changes the phase to RESPONSE if a response is still open, otherwise to IDLE."""
        self._undelivered = 0
        super().on_message_complete()
        if self._open:
            self._phase = Phase.RESPONSE
        else:
            self._enter_phase(Phase.IDLE)
        self._mark_served_or_closable()

    def on_response_complete(self) -> None:
        """Enters IDLE after the last open response, unless another request has begun."""
        self._open.popleft()
        self._is_admitted = False
        super().on_response_complete()
        if self._phase is Phase.RESPONSE and not self._open:
            self._enter_phase(Phase.IDLE)
        self._mark_served_or_closable()

    def _on_admitted(self) -> None:
        """Marks the connection as served: the token of its first open request is valid."""
        self._is_admitted = True
        self._mark_served_or_closable()

    def _mark_served_or_closable(self) -> None:
        """Marks the connection in the table as served (never closed for another) or as closable.

        Served: its first open request has a valid token, or is complete and waits for this server.
        Any other connection may be closed for a new one, because sending only headers, or not
        reading responses, costs an untrusted client nothing.
        """
        open_, paused = self._open, self.flow.write_paused
        if open_ and (self._is_admitted or (not open_[0].more_body and not paused)):
            self._edge.table.mark_served(self)
        else:
            self._edge.table.mark_closable(self)

    def pause_writing(self) -> None:
        """Makes the connection closable unless its token is valid: the client does not read."""
        super().pause_writing()
        self._mark_served_or_closable()

    def resume_writing(self) -> None:
        """Marks the connection as served again if its request is complete: the client reads."""
        super().resume_writing()
        self._mark_served_or_closable()

    def _enter_phase(self, phase: Phase) -> None:
        """Sets the phase and restarts its time limit."""
        self._phase = phase
        self._phase_started = self._last_data_at = self._edge.clock.elapsed()

    def _is_refused(self) -> bool:
        """True once an error was sent and further input is discarded."""
        return self._phase is Phase.REFUSED

    def end_if_overdue(self, now: float) -> bool:
        """Closes, aborts or refuses a connection beyond a deadline; returns True if it did."""
        deadlines = self._edge.deadlines
        if self._reads_too_slowly(now):
            self.transport.abort()
            return True
        if self._is_refused():
            is_over = not self._open and now - self._phase_started >= deadlines.linger_s
            if is_over:
                self.transport.close()
            return is_over
        if self._is_unused(now):
            self.transport.close()
            return True
        if not self._is_late(now):
            return False
        self._refuse(Invalid("the request did not arrive in time", "request_timeout"))
        return True

    def _is_unused(self, now: float) -> bool:
        """True if the client sent no request in time; such a connection is closed, not refused."""
        if self._phase is Phase.NEW:
            return now - self._phase_started >= self._edge.deadlines.head_s
        # Uvicorn's keep-alive timer misses bodies that end after their response.
        return self._phase is Phase.IDLE and now - self._phase_started > self.timeout_keep_alive + 1

    def _is_late(self, now: float) -> bool:
        """True if headers or body are overdue. Resets the idle limit while the client must wait."""
        deadlines = self._edge.deadlines
        if self.transport.is_closing():
            return False
        if self.flow.read_paused or (self._open and self._open[-1].waiting_for_100_continue):
            self._last_data_at = now  # the client cannot send before the server continues
        if self.flow.read_paused:
            return False
        if self._phase is Phase.HEAD:
            return not self._open and now - self._phase_started >= deadlines.head_s
        deadline = deadlines.body_deadline(self._phase_started, self._received, self._last_data_at)
        return self._phase is Phase.BODY and now >= deadline

    def _reads_too_slowly(self, now: float) -> bool:
        """True if responses stayed unread for too long; stores the progress for the next call."""
        transport: Any = self.transport
        unsent = transport.get_write_buffer_size()
        return self._read_progress.is_too_slow(now, transport.written, unsent, self._edge.deadlines)

    def _refuse(self, error: TenutoError) -> None:
        """Sends the refusal unless a response is open or has begun, and discards all further data.

        Reading on lets the client read the refusal. Requests before it are still answered; then the
        connection closes.
        """
        refused_request = self._open.pop() if self._is_body_open() else None
        self._enter_phase(Phase.REFUSED)
        self._received = 0
        if self._open:
            self._close_after_responses(refused_request)
            return
        if refused_request is not None:
            refused_request.disconnected = True
            refused_request.message_event.set()
            self._mark_served_or_closable()
            if refused_request.response_started:
                self.transport.close()
                return
        self.transport.write(self._edge.build_refusal(error))
        self.transport.write_eof()
        self.flow.resume_reading()

    def _is_body_open(self) -> bool:
        """True if the last request has neither a complete body nor a complete response."""
        return self._phase is Phase.BODY and bool(self._open) and self._open[-1] is self.cycle

    def _close_after_responses(self, refused_request: RequestResponseCycle | None) -> None:
        """Drops the refused request; the connection closes after the responses before it.

        A refusal would look like one of those responses.
        """
        if refused_request is not None:
            self.pipeline.popleft()  # it has not started
            self.cycle = self._open[-1]
        self.cycle.keep_alive = False

    def _discard(self, count: int) -> None:
        """Counts discarded bytes; closes the connection at once if there are too many."""
        self._received += count
        if self._received > MAX_LINGER_BYTES:
            self.transport.abort()
