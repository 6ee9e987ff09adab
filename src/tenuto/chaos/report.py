"""What a run came to, for people and for programs."""

from typing import Any

import msgspec

from tenuto.chaos.checker import SHOWN, Verdict


class Report(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a run came to."""

    database: str
    seed: int
    leader: bool
    seconds: float
    faults: dict[str, int]
    crash_points: dict[str, int]
    missing: list[str]
    """Planned faults that never happened: the run proves nothing of them."""
    verdict: Verdict
    unruly: dict[str, int]
    """How processes ended by themselves, though nobody killed them, by exit code."""
    rested_seconds: float
    """Seconds from the last fault to the end of the last task."""

    @property
    def holds(self) -> bool:
        return self.verdict.holds and not self.missing


def lines(report: Report) -> list[str]:
    """The report for people."""
    mode = "a leader" if report.leader else "no leader"
    found = [
        f"{report.database}, {mode}, seed {report.seed}, {report.seconds:,.0f} s",
        "",
        "faults",
    ]
    found += [_row(name, n) for name, n in report.faults.items()]
    if report.crash_points:
        found += ["", "crashes by point"]
        found += [_row(name, n) for name, n in report.crash_points.items()]
    found += ["", "seen"]
    found += [_row(name, n) for name, n in report.verdict.told.items()]
    found.append(_row("seconds from the last fault to the last end", report.rested_seconds))
    for code, n in report.unruly.items():
        found.append(_row(f"processes that ended by themselves, exit code {code}", n))
    found += ["", "must be 0"]
    for name, cases in report.verdict.breaches.items():
        found.append(_row(name, len(cases)))
        found += [f"    {case}" for case in cases[:SHOWN]]
    found.append("")
    if not report.verdict.holds:
        found.append("BROKEN")
    if report.missing:
        found.append(f"INVALID: never happened: {', '.join(report.missing)}")
    return found if not report.holds else [*found, "everything holds"]


def _row(name: str, value: Any) -> str:
    return f"  {name:<52} {value:>10,}"


def document(report: Report) -> dict[str, Any]:
    """The report for programs."""
    made: dict[str, Any] = msgspec.to_builtins(report)
    breaches = made["verdict"].pop("breaches")
    made["verdict"]["breaches"] = {name: len(cases) for name, cases in breaches.items()}
    made["verdict"]["cases"] = {name: cases[:SHOWN] for name, cases in breaches.items() if cases}
    made["holds"] = report.holds
    return made
