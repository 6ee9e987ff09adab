"""One client's connection: bounds on what it may send, how slowly, and how many there may be.

The parser and the server are uvicorn's. This counts bytes before the parser gets them, because the
parser joins the pieces of a header at a cost that grows with the square, and looks at all
connections once a second for those whose time is over.
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
from tenuto.api.edge.connection_limits import ConnectionTable, Deadlines, Reading
from tenuto.api.edge.forwarded import Networks, client_of, holds, place_of
from tenuto.clock import Clock
from tenuto.model.errors import Invalid, TenutoError, Unavailable

log = logging.getLogger("tenuto.api")

HEAD_BYTES = 64 * 1024
"""Bytes of a request line with its headers, or of anything else that is no body."""
HEADERS = 100
PIPELINED = 16
"""Requests that may wait for the answers before them."""
LINGER_BYTES = 16 * 1024 * 1024
"""Bytes that a refused client may go on sending before it is cut off."""
ADMITTED = "tenuto.admitted"
"""The extension of a request's scope by which the gate says that the token is good."""
REPORT_S = 60.0
"""Seconds between lines of the log about refusals: strangers must not fill it."""


class Phase(Enum):
    """What is expected of the client."""

    NEW = 0
    """A first request: nothing has come yet."""
    IDLE = 1
    """A next request, perhaps."""
    HEAD = 2
    BODY = 3
    ANSWER = 4
    """To read: its request is complete."""
    REFUSED = 5
    """To close: it has been told why, and whatever else it sends is thrown away."""


class Edge:
    """What all connections of a server share: the table, the deadlines, the count of refusals."""

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

    def refusal(self, error: TenutoError) -> bytes:
        """The whole answer to a request that no handler sees; counts it."""
        self._refused[error.code] += 1
        problem, headers = problems.of(error)
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
        """Ends the connections whose time is over; answers how many."""
        now = self.clock.elapsed()
        ended = sum(connection.look(now) for connection in list(self.connections))
        if self._refused and now - self._reported >= REPORT_S:
            told = ", ".join(f"{code} {count}" for code, count in self._refused.most_common())
            log.warning("refused before any route in the last minute: %s", told)
            self._refused.clear()
        if not self._refused:
            self._reported = now
        return ended


class _Counted:
    """A transport that counts what is written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written = 0

    def write(self, data: bytes) -> None:
        """Writes, and counts."""
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """A connection that ends when its client sends too much, too slowly, or reads too little."""

    def __init__(self, edge: Edge, **given: Any) -> None:
        super().__init__(**given)
        self._edge = edge
        self._phase = Phase.NEW
        self._since = 0.0
        """When the phase began."""
        self._received = 0
        """Bytes of the body so far; of a refused client, bytes thrown away."""
        self._heard = 0.0
        """When the last part of the body came, or could not come because of this side."""
        self._undelivered = 0
        """Bytes since the parser last delivered headers or a part of a body."""
        self._refusal: TenutoError | None = None
        self._reading = Reading()
        self._behind_proxy = False
        self._open: deque[RequestResponseCycle] = deque()
        """Requests that are not answered yet, in the order of their answers."""
        self._is_admitted = False
        """True if the first of them has a good token."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        address, _ = get_remote_addr(transport) or ("-", 0)
        edge = self._edge
        self._behind_proxy = holds(edge.proxies, address)
        decision = edge.table.add(self, None if self._behind_proxy else place_of(address))
        if not decision.accepted:
            self.transport = transport
            error = Unavailable(
                f"the server has as many connections as it holds, or {address} has as many as"
                " one address may have; close some",
                "too_many_connections",
            )
            transport.write(edge.refusal(error))
            transport.close()
            return
        if decision.closed is not None:
            decision.closed.transport.abort()
        counted: Any = _Counted(transport)
        super().connection_made(counted)
        self._since = edge.clock.elapsed()
        edge.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._edge.table.remove(self)
        self._edge.connections.discard(self)
        for cycle in self._open:  # uvicorn tells the last request alone
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser no more than may be undelivered."""
        self._unset_keepalive_if_required()
        if self._phase in (Phase.NEW, Phase.IDLE):
            self._enter(Phase.HEAD)
        while data and not self.transport.is_closing():
            if self._is_refused():
                self._throw_away(len(data))
                return
            room = HEAD_BYTES - self._undelivered
            piece, data = data[:room], data[room:]
            self._undelivered += len(piece)
            self._feed(piece)
            if self._undelivered >= HEAD_BYTES and not self._is_refused():
                self._refuse(
                    Invalid(
                        f"a request line with its headers has at most {HEAD_BYTES:,} bytes",
                        "headers_too_large",
                    )
                )

    def _feed(self, piece: bytes) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            # No other protocol is spoken here. What follows on the connection may be in one.
            if self.cycle is not None:
                self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self._refuse(self._refusal or Invalid("this is no HTTP request", "invalid_request"))

    def on_message_begin(self) -> None:
        if self._phase is not Phase.HEAD:
            self._enter(Phase.HEAD)  # a request that came together with the one before it
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Refuse too many headers, and start the request."""
        self._undelivered = 0
        if len(self.headers) > HEADERS:
            self._stop(Invalid(f"a request has at most {HEADERS} headers", "headers_too_large"))
        if len(self.pipeline) >= PIPELINED:
            self._stop(Invalid(f"at most {PIPELINED} requests wait for answers", "invalid_request"))
        if self._behind_proxy:
            self.scope["client"] = client_of(self.client, self.headers, self._edge.proxies)
        self.scope["extensions"] = {ADMITTED: {"call": self._admit}}
        super().on_headers_complete()
        self._open.append(self.cycle)
        self.headers = []  # trailers are headers to the parser; they must not reach the request
        self._received = 0
        self._enter(Phase.BODY)
        self._note_place()

    def _stop(self, error: TenutoError) -> None:
        """Makes the parser stop, which leads to the refusal."""
        self._refusal = error
        raise error

    def on_body(self, body: bytes) -> None:
        self._undelivered = 0
        self._received += len(body)
        self._heard = self._edge.clock.elapsed()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._undelivered = 0
        super().on_message_complete()
        if self._open:
            self._phase = Phase.ANSWER
        else:
            self._enter(Phase.IDLE)
        self._note_place()

    def on_response_complete(self) -> None:
        self._open.popleft()
        self._is_admitted = False
        super().on_response_complete()
        if self._phase is Phase.ANSWER and not self._open:
            self._enter(Phase.IDLE)
        self._note_place()

    def _admit(self) -> None:
        """The gate found the token of the first open request good."""
        self._is_admitted = True
        self._note_place()

    def _note_place(self) -> None:
        """Keep the place of a connection that has a good token, or waits for this server.

        Any other may be closed for a new one: headers alone, or answers that nobody reads, cost a
        stranger nothing.
        """
        open_, paused = self._open, self.flow.write_paused
        if open_ and (self._is_admitted or (not open_[0].more_body and not paused)):
            self._edge.table.serve(self)
        else:
            self._edge.table.wait(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._note_place()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_place()

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._since = self._heard = self._edge.clock.elapsed()

    def _is_refused(self) -> bool:
        return self._phase is Phase.REFUSED

    def look(self, now: float) -> bool:
        """Ends the connection if its time is over; answers whether it was."""
        deadlines = self._edge.deadlines
        if self._reads_too_little(now):
            self.transport.abort()
            return True
        if self._is_refused():
            over = not self._open and now - self._since >= deadlines.linger_s
            if over:
                self.transport.close()
            return over
        if self._is_unused(now):
            self.transport.close()
            return True
        if not self._is_late(now):
            return False
        self._refuse(Invalid("the request did not arrive in time", "request_timeout"))
        return True

    def _is_unused(self, now: float) -> bool:
        """Whether the client has begun no request for too long: there is nothing to refuse."""
        if self._phase is Phase.NEW:
            return now - self._since >= self._edge.deadlines.head_s
        # Uvicorn's timer does not know bodies that outlast their answer.
        return self._phase is Phase.IDLE and now - self._since > self.timeout_keep_alive + 1

    def _is_late(self, now: float) -> bool:
        deadlines = self._edge.deadlines
        if self.transport.is_closing():
            return False
        if self.flow.read_paused or (self._open and self._open[-1].waiting_for_100_continue):
            self._heard = now  # it cannot send before this side goes on
        if self.flow.read_paused:
            return False
        if self._phase is Phase.HEAD:
            return not self._open and now - self._since >= deadlines.head_s
        by = deadlines.body_by(self._since, self._received, self._heard)
        return self._phase is Phase.BODY and now >= by

    def _reads_too_little(self, now: float) -> bool:
        """Whether the client has left answers unread for too long."""
        transport: Any = self.transport
        unsent = transport.get_write_buffer_size()
        return self._reading.is_too_slow(now, transport.written, unsent, self._edge.deadlines)

    def _refuse(self, error: TenutoError) -> None:
        """Tells the client why, where that is possible, and reads on until it can know."""
        refused = self._open.pop() if self._is_body_open() else None
        self._enter(Phase.REFUSED)
        self._received = 0
        if self._open:
            self._end_after_answers(refused)
            return
        if refused is not None:
            refused.disconnected = True
            refused.message_event.set()
            self._note_place()
            if refused.response_started:
                self.transport.close()
                return
        self.transport.write(self._edge.refusal(error))
        self.transport.write_eof()
        self.flow.resume_reading()

    def _is_body_open(self) -> bool:
        """Whether the last request is not answered and its body not complete."""
        return self._phase is Phase.BODY and bool(self._open) and self._open[-1] is self.cycle

    def _end_after_answers(self, refused: RequestResponseCycle | None) -> None:
        """Close after the answers to earlier requests: a refusal would be taken for one of them."""
        if refused is not None:
            self.pipeline.popleft()  # it has not begun
            self.cycle = self._open[-1]
        self.cycle.keep_alive = False

    def _throw_away(self, count: int) -> None:
        self._received += count
        if self._received > LINGER_BYTES:
            self.transport.abort()
