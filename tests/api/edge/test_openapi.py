"""The API contract: generated requests get only documented responses and no internal error."""

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.api.conftest import running

from tenuto.api.app import litestar_app
from tenuto.api.edge.openapi import openapi_document
from tenuto.settings import Settings

CASES = int(os.environ.get("TENUTO_PROOF_CASES", "30"))
"""Requests of each kind to each route."""
STREAMS = ("GET /api/v1/events", "GET /api/v1/agent-tasks/{task_id}/events")
CHECKS = (
    schemathesis.checks.not_a_server_error,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
WITH_A_BODY = ("POST", "PUT", "PATCH")
"""What is wrong in a body can be refused; a query is text, in which a wrong type may look right."""


class Server:
    """A server in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        self.url = ""
        self.token = ""
        self._folder = folder
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *args: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        chosen = Settings(
            database=f"sqlite:///{self._folder}/t.db",
            data=str(self._folder),
            port=0,
            rate_per_s=0,
        )
        async with running(chosen) as api:
            self.url = api.url
            self.token = (self._folder / "token").read_text().strip()
            self._ready.set()
            await self._stop.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("contract")) as server:
        yield server


schema = schemathesis.openapi.from_dict(openapi_document(litestar_app()))
OPERATIONS = {
    get_all_operation.ok().label: get_all_operation.ok()
    for get_all_operation in schema.get_all_operations()
    if isinstance(get_all_operation, Ok) and get_all_operation.ok().label not in STREAMS
}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("label", sorted(OPERATIONS))
def test_every_response_is_in_the_api_contract(
    label: str, mode: GenerationMode, server: Server
) -> None:
    operation = OPERATIONS[label]

    @settings(
        max_examples=CASES,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers(case: Any) -> None:
        if isinstance(case.body, dict) and "waitSeconds" in case.body:
            case.body["waitSeconds"] = 0
        response = case.call(
            base_url=server.url, headers={"Authorization": f"Bearer {server.token}"}
        )
        refusing = [negative_data_rejection] if case.method in WITH_A_BODY else []
        case.validate_response(response, checks=[*CHECKS, *refusing])

    try:
        answers()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # nothing about such a request can be wrong
