"""Traces: one span for each step of a task, by OpenTelemetry where its SDK is set up.

A task carries its position in its trace as a W3C `traceparent`, so that the worker that claims the
task continues the trace.
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
_NO_SPAN: AbstractContextManager[object] = nullcontext()
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def _parse_traceparent(parent: str | None) -> SpanContext | None:
    """Returns the span that a `traceparent` names; `None` for any other text."""
    match = _PARENT.fullmatch(parent or "")
    if match is None or match[0].startswith("ff"):
        return None
    trace_number, span_number = int(match[1], 16), int(match[2], 16)
    span_context = SpanContext(
        trace_number, span_number, is_remote=True, trace_flags=TraceFlags(int(match[3], 16))
    )
    return span_context if span_context.is_valid else None


def _parent_context(parent: str | None) -> contexts.Context | None:
    """Returns the context of a `traceparent`; `None`, the current context, if it names no span."""
    span_context = _parse_traceparent(parent)
    return (
        None if span_context is None else trace.set_span_in_context(NonRecordingSpan(span_context))
    )


@lru_cache(maxsize=1)
def _tracer(provider: trace.TracerProvider) -> trace.Tracer | None:
    """Returns the provider's tracer; `None` while no SDK is set up."""
    return None if isinstance(provider, ProxyTracerProvider) else provider.get_tracer("tenuto")


def _active_tracer() -> trace.Tracer | None:
    """Returns the tracer that creates spans; `None` while no SDK is set up."""
    # Reading the provider reads the environment each time: twice per task, mostly for nothing.
    if getattr(trace, "_TRACER_PROVIDER", True) is None:
        return None
    return _tracer(trace.get_tracer_provider())


def is_on() -> bool:
    """True if spans are created."""
    return _active_tracer() is not None


def span(
    name: str, parent: str | None = None, task: object = None
) -> AbstractContextManager[object]:
    """Returns a context for a span below `parent` or the current span; empty if tracing is off."""
    tracer = _active_tracer()
    if tracer is None:
        return _NO_SPAN if parent is None else use_parent_trace(parent)
    return tracer.start_as_current_span(name, _parent_context(parent), attributes=_attributes(task))


def with_span(
    name: str, work: Coroutine[Any, Any, T], task: object = None
) -> Coroutine[Any, Any, T]:
    """Wraps the coroutine in a span; returns it unchanged while no spans are created."""
    return work if _active_tracer() is None else _run_in_span(name, work, task)


async def _run_in_span(name: str, work: Coroutine[Any, Any, T], task: object) -> T:
    """Awaits the coroutine inside a span and returns its result."""
    with span(name, task=task):
        return await work


def record_span(
    name: str, parent: str | None, started_at: datetime, ended_at: datetime, *, task: object
) -> str | None:
    """Records a finished span; returns its `traceparent`, or `parent` if tracing is off."""
    tracer = _active_tracer()
    if tracer is None:
        return parent
    # Without a parent the span starts a trace: the current context belongs to other work.
    context = _parent_context(parent) or contexts.Context()
    recorded = tracer.start_span(
        name, context, attributes=_attributes(task), start_time=to_micros(started_at) * 1000
    )
    recorded.end(to_micros(ended_at) * 1000)
    return to_traceparent(recorded.get_span_context())


def _attributes(task: object) -> dict[str, str]:
    """Returns the attributes of a span that belongs to the task."""
    return {} if task is None else {"tenuto.task": str(task)}


@contextmanager
def use_parent_trace(parent: str | None) -> Iterator[None]:
    """Makes the spans of the block belong to the trace of `parent`, started in another process."""
    context = _parent_context(parent)
    if context is None:
        yield
        return
    token = contexts.attach(context)
    try:
        yield
    finally:
        contexts.detach(token)


def to_traceparent(span_context: SpanContext) -> str | None:
    """Returns the span's `traceparent`; `None` if it belongs to no trace."""
    if not span_context.is_valid:
        return None
    trace_id, span_id = span_context.trace_id, span_context.span_id
    return f"00-{trace_id:032x}-{span_id:016x}-{span_context.trace_flags:02x}"


def current_traceparent() -> str | None:
    """Returns the current span's `traceparent`; `None` outside of any trace."""
    if not contexts.get_current():
        return None  # no trace was ever started or continued here
    return to_traceparent(trace.get_current_span().get_span_context())


def trace_id() -> str | None:
    """Returns the id of the current trace; `None` outside of any trace."""
    span_context = trace.get_current_span().get_span_context()
    return f"{span_context.trace_id:032x}" if span_context.is_valid else None


def set_up(role: str, *, enabled: bool) -> None:
    """Starts to send spans if `enabled` or an `OTEL_*` endpoint is set; or raises `Invalid`."""
    if not enabled and not any(os.environ.get(name) for name in _ENDPOINT_VARIABLES):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  an extra
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        message = f"tracing needs the extra `otel` (pip install 'tenuto[otel]'): {error}"
        if enabled:
            raise Invalid(message) from error
        log.warning("%s", message)
        return
    names_set = {"OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"} & set(os.environ)
    resource = Resource.create({} if names_set else {"service.name": f"tenuto-{role}"})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
