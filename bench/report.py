"""From figures of several rounds to medians, tables and ratios."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.catalog import OURS

#: Measure, heading, and whether more is better.
COLUMNS = (
    ("submit_one", "submit 1x1 /s", True),
    ("submit_bulk", "bulk /s", True),
    ("drain_1", "drain 1 /s", True),
    ("drain_2", "drain 2 /s", True),
    ("idle_latency_p50", "latency p50 ms", False),
    ("idle_latency_p99", "p99 ms", False),
    ("idle_latency_p50_default", "default p50 ms", False),
    ("idle_latency_p99_default", "p99 ms", False),
    ("recovery", "recovery s", False),
    ("help_ms", "--help ms", False),
    ("rss_mb", "idle MB", False),
)
#: Shown beside them, but the machine's and not the peer's: never a ratio.
CONTROLS = (("sync_us", "disk sync us"),)


@dataclass
class Figures:
    """All that was measured of one measure of one peer."""

    unit: str = ""
    values: list[float] = field(default_factory=list)
    by_round: dict[int, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None


@dataclass
class PeerReport:
    """All that was measured of one peer, and what a reader must know about it."""

    name: str
    store: str
    versions: Mapping[str, str]
    about: dict[str, Any] = field(default_factory=dict)
    not_measured: str = ""
    figures: dict[str, Figures] = field(default_factory=dict)

    def applies(self, measure: str) -> bool:
        """False once the peer cannot be measured, or has said that this makes no sense for it."""
        return not self.not_measured and measure in self.about.get("measures", [measure])

    def add(self, line: Mapping[str, Any], number: int) -> None:
        """Takes in one JSON line that an adapter printed in this round."""
        if "not_measured" in line:
            self.not_measured = line["not_measured"]
        elif "measure" in line:
            figures = self.figures.setdefault(line["measure"], Figures(line["unit"]))
            if line["value"] is not None:
                figures.values.append(line["value"])
                figures.by_round[number] = line["value"]
            if line["text"] and line["text"] not in figures.texts:
                figures.texts.append(line["text"])
        elif "notes" in line:
            self.about = {key: value for key, value in line.items() if key != "peer"}


def to_json(reports: Sequence[PeerReport], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for programs: machine, peers with medians and every value, ratios."""
    return {
        "machine": machine,
        "peers": {report.name: _peer_json(report) for report in reports},
        "ratios": {name: ratios(reports, name) for name in OURS},
    }


def ratios(reports: Sequence[PeerReport], ours: str) -> dict[str, dict[str, float]]:
    """Peer -> measure -> how many times better ours is (above 1: ours is better).

    Each is the median of the rounds' own ratios: the two were measured seconds apart, so what
    slowed one round down slowed both.
    """
    mine = next((report for report in reports if report.name == ours), None)
    if mine is None:
        return {}
    found: dict[str, dict[str, float]] = {}
    for report in reports:
        name, _, revision = report.name.partition("@")
        if name == ours if revision else name not in OURS:
            found[report.name] = _ratios_of(mine, report)
    return {name: values for name, values in found.items() if values}


def to_text(reports: Sequence[PeerReport], machine: Mapping[str, Any]) -> str:
    """The tables, as Markdown."""
    parts = [_headline(machine), "", "Medians", _table(reports, _median_cell)]
    parts += ["", "Least and most", _spread_table(reports)]
    for ours in OURS:
        if lines := _ratio_lines(reports, ours):
            parts += ["", f"How many times better {ours} is (above 1: better)", *lines]
    if lines := _drift_lines(reports):
        parts += ["", "An earlier commit's second half of the rounds, to its first half", *lines]
    parts += ["", *_remarks(reports)]
    return "\n".join(parts)


def _headline(machine: Mapping[str, Any]) -> str:
    servers = ", ".join(f"{name}: {version}" for name, version in machine["servers"].items())
    return (
        f"{machine['system']}, {machine['cores']} cores, Python {machine['python']}, "
        f"{machine['file_system']}, load {machine['load_before']:.1f} before; {servers}; "
        f"{machine['rounds']} rounds"
    )


def _ratios_of(mine: PeerReport, other: PeerReport) -> dict[str, float]:
    found = {}
    for measure, _, more_is_better in COLUMNS:
        ours = mine.figures.get(measure, Figures()).by_round
        theirs = other.figures.get(measure, Figures()).by_round
        pairs = [(ours[number], theirs[number]) for number in ours.keys() & theirs.keys()]
        if pairs:
            found[measure] = statistics.median(a / b if more_is_better else b / a for a, b in pairs)
    return found


def _peer_json(report: PeerReport) -> dict[str, Any]:
    return {
        "store": report.store,
        "versions": report.versions,
        **report.about,
        "not_measured": report.not_measured or None,
        "figures": {
            measure: {
                "unit": figures.unit,
                "median": figures.median(),
                "min": min(figures.values, default=None),
                "max": max(figures.values, default=None),
                "values": figures.values,
                "by_round": figures.by_round,
                "texts": figures.texts,
            }
            for measure, figures in report.figures.items()
        },
    }


def _table(reports: Sequence[PeerReport], cell: Callable[[Figures], str]) -> str:
    columns = _columns_in_use(reports)
    rows = [["peer", "store", *(heading for _, heading in columns)]]
    for report in reports:
        row = [report.name, report.store]
        if report.not_measured:
            row += [f"not measured: {report.not_measured}"]
            row += [""] * (len(columns) - 1)
        else:
            row += [cell(report.figures.get(measure, Figures())) for measure, _ in columns]
        rows.append(row)
    return "\n".join(_markdown(rows))


def _spread_table(reports: Sequence[PeerReport]) -> str:
    return _table([report for report in reports if not report.not_measured], _spread_cell)


def _columns_in_use(reports: Iterable[PeerReport]) -> list[tuple[str, str]]:
    seen = {measure for report in reports for measure in report.figures}
    columns = [(measure, heading) for measure, heading, _ in COLUMNS] + list(CONTROLS)
    return [column for column in columns if column[0] in seen] or [("", "")]


def _median_cell(figures: Figures) -> str:
    median = figures.median()
    if median is None:
        return figures.texts[0] if figures.texts else "-"
    return _number(median)


def _spread_cell(figures: Figures) -> str:
    if not figures.values:
        return "-"
    return f"{_number(min(figures.values))} .. {_number(max(figures.values))}"


def _ratio_lines(reports: Sequence[PeerReport], ours: str) -> list[str]:
    found = ratios(reports, ours)
    if not found:
        return []
    columns = [column for column in COLUMNS if any(column[0] in row for row in found.values())]
    rows = [["peer", *(heading for _, heading, _ in columns)]]
    for name, values in found.items():
        cells = [f"{values[measure]:.2f}" if measure in values else "-" for measure, *_ in columns]
        rows.append([name, *cells])
    return _markdown(rows)


def _drift_lines(reports: Sequence[PeerReport]) -> list[str]:
    """How far one program's own figures moved within the run: a smaller difference says nothing."""
    earlier = [report for report in reports if "@" in report.name]
    columns = [column for column in COLUMNS if any(column[0] in each.figures for each in earlier)]
    rows = [["peer", *(heading for _, heading, _ in columns)]]
    for report in earlier:
        halves = [_halves(report.figures.get(measure, Figures()).values) for measure, *_ in columns]
        cells = ["-" if pair is None else f"{pair[1] / pair[0]:.2f}" for pair in halves]
        rows.append([report.name, *cells])
    return _markdown(rows) if len(rows) > 1 else []


def _halves(values: Sequence[float]) -> tuple[float, float] | None:
    """The medians of the first and the second half; None where there are fewer than two values."""
    middle = len(values) // 2
    if not middle:
        return None
    return statistics.median(values[:middle]), statistics.median(values[middle:])


def _remarks(reports: Iterable[PeerReport]) -> list[str]:
    lines = []
    for report in reports:
        versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
        options = ", ".join(f"{k}={v}" for k, v in report.about.get("options", {}).items())
        drained = report.figures.get("drain_1", Figures()).texts
        parts = [versions, options, report.about.get("notes", ""), *drained]
        lines.append(f"- {report.name}: {'; '.join(part for part in parts if part)}")
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
