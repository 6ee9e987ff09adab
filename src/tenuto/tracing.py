"""Traces: a span for each thing a task goes through, by OpenTelemetry where its SDK is set up.

A task carries the place in its trace as a W3C `traceparent`, so that whoever claims it goes on.
"""

import logging
import os
import re
from collections.abc import Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, ProxyTracerProvider, SpanContext, TraceFlags

from tenuto.clock import to_micros
from tenuto.model.errors import Invalid

log = logging.getLogger("tenuto")

T = TypeVar("T")

_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_NOTHING: AbstractContextManager[object] = nullcontext()
_SWITCHES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def _place(parent: str | None) -> SpanContext | None:
    """The place in a trace that a `traceparent` names; `None` for any other text."""
    found = _PARENT.fullmatch(parent or "")
    if found is None or found[0].startswith("ff"):
        return None
    trace_number, span_number = int(found[1], 16), int(found[2], 16)
    place = SpanContext(
        trace_number, span_number, is_remote=True, trace_flags=TraceFlags(int(found[3], 16))
    )
    return place if place.is_valid else None


def _within(parent: str | None) -> contexts.Context | None:
    """The context of a `traceparent`; `None`, which is the one in force, when it names none."""
    place = _place(parent)
    return None if place is None else trace.set_span_in_context(NonRecordingSpan(place))


@lru_cache(maxsize=1)
def _tracer(provider: trace.TracerProvider) -> trace.Tracer | None:
    """Makes the spans; `None` while no SDK is set up."""
    return None if isinstance(provider, ProxyTracerProvider) else provider.get_tracer("tenuto")


def _made_by() -> trace.Tracer | None:
    # Asking for the provider reads the environment each time: twice a task, for nothing mostly.
    if getattr(trace, "_TRACER_PROVIDER", True) is None:
        return None
    return _tracer(trace.get_tracer_provider())


def is_on() -> bool:
    """Whether spans are made."""
    return _made_by() is not None


def span(
    name: str, parent: str | None = None, task: object = None
) -> AbstractContextManager[object]:
    """A span around the block, under the parent or else under the one in force."""
    tracer = _made_by()
    if tracer is None:
        return _NOTHING if parent is None else use_parent_trace(parent)
    return tracer.start_as_current_span(name, _within(parent), attributes=_about(task))


def spanned(name: str, work: Coroutine[Any, Any, T], task: object = None) -> Coroutine[Any, Any, T]:
    """The work within a span; the work itself, which costs nothing, while no spans are made."""
    return work if _made_by() is None else _spanned(name, work, task)


async def _spanned(name: str, work: Coroutine[Any, Any, T], task: object) -> T:
    with span(name, task=task):
        return await work


def record_span(
    name: str, parent: str | None, begun: datetime, ended: datetime, *, task: object
) -> str | None:
    """Note a span that is over, under the parent; answers where its successor goes on."""
    tracer = _made_by()
    if tracer is None:
        return parent
    # Without a parent it begins a trace: what is in force here belongs to somebody else.
    within = _within(parent) or contexts.Context()
    made = tracer.start_span(
        name, within, attributes=_about(task), start_time=to_micros(begun) * 1000
    )
    made.end(to_micros(ended) * 1000)
    return to_traceparent(made.get_span_context())


def _about(task: object) -> dict[str, str]:
    return {} if task is None else {"tenuto.task": str(task)}


@contextmanager
def use_parent_trace(parent: str | None) -> Iterator[None]:
    """Let spans of the block belong to a trace that began elsewhere."""
    within = _within(parent)
    if within is None:
        yield
        return
    token = contexts.attach(within)
    try:
        yield
    finally:
        contexts.detach(token)


def to_traceparent(place: SpanContext) -> str | None:
    """A place in a trace as a `traceparent`; `None` outside of any."""
    if not place.is_valid:
        return None
    return f"00-{place.trace_id:032x}-{place.span_id:016x}-{place.trace_flags:02x}"


def current_traceparent() -> str | None:
    """The place in the trace that is in force, as a `traceparent`."""
    if not contexts.get_current():
        return None  # nobody ever said where
    return to_traceparent(trace.get_current_span().get_span_context())


def trace_id() -> str | None:
    """The id of the trace that is in force."""
    place = trace.get_current_span().get_span_context()
    return f"{place.trace_id:032x}" if place.is_valid else None


def set_up(role: str, *, wanted: bool) -> None:
    """Send spans by OTLP as the `OTEL_*` variables say, if that is wanted or they name a place."""
    if not wanted and not any(os.environ.get(name) for name in _SWITCHES):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  an extra
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        told = f"traces need the extra `otel` (pip install 'tenuto[otel]'): {error}"
        if wanted:
            raise Invalid(told) from error
        log.warning("%s", told)
        return
    named = {"OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"} & set(os.environ)
    who = Resource.create({} if named else {"service.name": f"tenuto-{role}"})
    provider = TracerProvider(resource=who)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
