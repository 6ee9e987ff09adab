"""The faults that `make mutants` plants fit the tree."""

import pytest
from tests.mutants.faults import ROOT, Fault, areas, planted

FAULTS = {
    f"{area}.{name}": fault for area, faults in areas().items() for name, fault in faults.items()
}


def exists(test: str) -> bool:
    """True if the file or folder exists, and the file defines the test if one is named."""
    path, _, name = test.partition("::")
    file = ROOT / path
    return f"def {name}(" in file.read_text(encoding="utf-8") if name else file.exists()


@pytest.mark.parametrize("name", FAULTS)
def test_fault_can_be_planted(name: str) -> None:
    fault = FAULTS[name]
    assert planted(fault, (ROOT / fault.file).read_text(encoding="utf-8"))
    assert [test for test in fault.tests if not exists(test)] == []


def test_text_found_twice_or_nowhere_is_refused() -> None:
    fault = Fault(file="f", old="a", new="b", tests=["t"])
    assert planted(fault, "a") == "b"
    for text in ("", "aa"):
        with pytest.raises(ValueError, match="has the text"):
            planted(fault, text)
