"""The report of a run, as text and as JSON."""

from typing import Any

import msgspec

from tenuto.chaos.checker import MAX_CASES_SHOWN, Verdict


class Report(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The result of a run."""

    database: str
    seed: int
    leader: bool
    seconds: float
    """Duration of the whole run."""
    faults: dict[str, int]
    """Number of injected faults by kind."""
    crash_points: dict[str, int]
    """Number of crashes by crash point."""
    missing: list[str]
    """Planned faults that never happened: the run did not test them."""
    verdict: Verdict
    unexpected_exits: dict[str, int] = msgspec.field(name="unruly")
    """Number of processes that exited without being killed by the run, by exit code."""
    settled_seconds: float = msgspec.field(name="restedSeconds")
    """Seconds from the last fault until the last task finished."""

    @property
    def holds(self) -> bool:
        """True if no invariant is violated and every planned fault has happened."""
        return self.verdict.holds and not self.missing


def format_lines(report: Report) -> list[str]:
    """Returns the lines of the report for people."""
    mode = "a leader" if report.leader else "no leader"
    result = [
        f"{report.database}, {mode}, seed {report.seed}, {report.seconds:,.0f} s",
        "",
        "faults",
    ]
    result += [_row(name, n) for name, n in report.faults.items()]
    if report.crash_points:
        result += ["", "crashes by point"]
        result += [_row(name, n) for name, n in report.crash_points.items()]
    result += ["", "seen"]
    result += [_row(name, n) for name, n in report.verdict.info.items()]
    result.append(_row("seconds from the last fault to the last finish", report.settled_seconds))
    for code, n in report.unexpected_exits.items():
        result.append(_row(f"processes that exited by themselves, exit code {code}", n))
    result += ["", "must be 0"]
    for name, cases in report.verdict.violations.items():
        result.append(_row(name, len(cases)))
        result += [f"    {case}" for case in cases[:MAX_CASES_SHOWN]]
    result.append("")
    if not report.verdict.holds:
        result.append("BROKEN")
    if report.missing:
        result.append(f"INVALID: never happened: {', '.join(report.missing)}")
    return result if not report.holds else [*result, "everything holds"]


def _row(name: str, value: Any) -> str:
    """Returns one line: the name, then the number in a right-aligned column."""
    return f"  {name:<52} {value:>10,}"


def to_json(report: Report) -> dict[str, Any]:
    """Returns the report as JSON data; of each invariant the number of cases and the first five."""
    result: dict[str, Any] = msgspec.to_builtins(report)
    breaches = result["verdict"].pop("breaches")
    result["verdict"]["breaches"] = {name: len(cases) for name, cases in breaches.items()}
    result["verdict"]["cases"] = {
        name: cases[:MAX_CASES_SHOWN] for name, cases in breaches.items() if cases
    }
    result["holds"] = report.holds
    return result
