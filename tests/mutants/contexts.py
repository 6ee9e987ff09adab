"""A plugin of pytest that measures which tests reach which lines: `-p tests.mutants.contexts`."""

import os
from collections.abc import Iterator

import coverage
import pytest
from tests.mutants.faults import ROOT

_measure = coverage.Coverage(
    data_file=os.environ["TENUTO_REACHED"], source=[str(ROOT / "src")], config_file=False
)


def pytest_configure() -> None:
    _measure.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _measure.switch_context(item.nodeid)
    result = yield
    _measure.switch_context("")
    return result


def pytest_unconfigure() -> None:
    _measure.stop()
    _measure.save()
