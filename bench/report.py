"""Builds the report: medians, tables and ratios of the figures of all rounds."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.catalog import OURS

#: Measure, heading, and True if a higher value is better.
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
#: Measures of the machine, not of a peer: shown in the tables, without ratios.
CONTROLS = (("sync_us", "disk sync us"),)


@dataclass
class Figures:
    """The figures of one measure of one peer, of all rounds."""

    unit: str = ""
    values: list[float] = field(default_factory=list)
    by_round: dict[int, float] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None


@dataclass
class PeerReport:
    """The figures of one peer, with its versions, options and notes."""

    name: str
    store: str
    versions: Mapping[str, str]
    description: dict[str, Any] = field(default_factory=dict)
    not_measured: str = ""
    figures: dict[str, Figures] = field(default_factory=dict)

    def applies(self, measure: str) -> bool:
        """False if the peer cannot be measured or its adapter does not list the measure."""
        return not self.not_measured and measure in self.description.get("measures", [measure])

    def add(self, line: Mapping[str, Any], round_number: int) -> None:
        """Adds a JSON line that an adapter printed in this round."""
        if "not_measured" in line:
            self.not_measured = line["not_measured"]
        elif "measure" in line:
            figures = self.figures.setdefault(line["measure"], Figures(line["unit"]))
            if line["value"] is not None:
                figures.values.append(line["value"])
                figures.by_round[round_number] = line["value"]
            if line["text"] and line["text"] not in figures.texts:
                figures.texts.append(line["text"])
        elif "notes" in line:
            self.description = {key: value for key, value in line.items() if key != "peer"}


def to_json(reports: Sequence[PeerReport], machine: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the whole report for programs: machine, peers with all values, and ratios."""
    return {
        "machine": machine,
        "peers": {report.name: _build_peer_json(report) for report in reports},
        "ratios": {name: compute_ratios(reports, name) for name in OURS},
    }


def compute_ratios(reports: Sequence[PeerReport], ours: str) -> dict[str, dict[str, float]]:
    """Returns by peer and measure how many times better `ours` is; above 1, `ours` is better.

    A ratio is the median of the ratios of all rounds: both peers of a round were measured seconds
    apart, so a slow moment of the machine affects both.
    """
    own_report = next((report for report in reports if report.name == ours), None)
    if own_report is None:
        return {}
    result: dict[str, dict[str, float]] = {}
    for report in reports:
        name, _, revision = report.name.partition("@")
        if name == ours if revision else name not in OURS:
            result[report.name] = _compute_peer_ratios(own_report, report)
    return {name: values for name, values in result.items() if values}


def to_text(reports: Sequence[PeerReport], machine: Mapping[str, Any]) -> str:
    """Returns the tables as Markdown."""
    parts = [_format_headline(machine), "", "Medians", _format_table(reports, _format_median)]
    parts += ["", "Minimum and maximum", _format_spread_table(reports)]
    for ours in OURS:
        if lines := _format_ratios(reports, ours):
            parts += ["", f"How many times better {ours} is (above 1: better)", *lines]
    if lines := _format_drift(reports):
        parts += ["", "Second half of the rounds / first half, for the earlier commit", *lines]
    parts += ["", *_format_remarks(reports)]
    return "\n".join(parts)


def _format_headline(machine: Mapping[str, Any]) -> str:
    servers = ", ".join(f"{name}: {version}" for name, version in machine["servers"].items())
    return (
        f"{machine['system']}, {machine['cores']} cores, Python {machine['python']}, "
        f"{machine['file_system']}, load {machine['load_before']:.1f} before; {servers}; "
        f"{machine['rounds']} rounds"
    )


def _compute_peer_ratios(own_report: PeerReport, other: PeerReport) -> dict[str, float]:
    result = {}
    for measure, _, more_is_better in COLUMNS:
        ours = own_report.figures.get(measure, Figures()).by_round
        theirs = other.figures.get(measure, Figures()).by_round
        pairs = [(ours[number], theirs[number]) for number in ours.keys() & theirs.keys()]
        if pairs:
            result[measure] = statistics.median(
                a / b if more_is_better else b / a for a, b in pairs
            )
    return result


def _build_peer_json(report: PeerReport) -> dict[str, Any]:
    return {
        "store": report.store,
        "versions": report.versions,
        **report.description,
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


def _format_table(reports: Sequence[PeerReport], cell: Callable[[Figures], str]) -> str:
    columns = _list_columns(reports)
    rows = [["peer", "store", *(heading for _, heading in columns)]]
    for report in reports:
        row = [report.name, report.store]
        if report.not_measured:
            row += [f"not measured: {report.not_measured}"]
            row += [""] * (len(columns) - 1)
        else:
            row += [cell(report.figures.get(measure, Figures())) for measure, _ in columns]
        rows.append(row)
    return "\n".join(_format_markdown(rows))


def _format_spread_table(reports: Sequence[PeerReport]) -> str:
    return _format_table([report for report in reports if not report.not_measured], _format_spread)


def _list_columns(reports: Iterable[PeerReport]) -> list[tuple[str, str]]:
    seen = {measure for report in reports for measure in report.figures}
    columns = [(measure, heading) for measure, heading, _ in COLUMNS] + list(CONTROLS)
    return [column for column in columns if column[0] in seen] or [("", "")]


def _format_median(figures: Figures) -> str:
    median = figures.median()
    if median is None:
        return figures.texts[0] if figures.texts else "-"
    return _format_number(median)


def _format_spread(figures: Figures) -> str:
    if not figures.values:
        return "-"
    return f"{_format_number(min(figures.values))} .. {_format_number(max(figures.values))}"


def _format_ratios(reports: Sequence[PeerReport], ours: str) -> list[str]:
    result = compute_ratios(reports, ours)
    if not result:
        return []
    columns = [column for column in COLUMNS if any(column[0] in row for row in result.values())]
    rows = [["peer", *(heading for _, heading, _ in columns)]]
    for name, values in result.items():
        cells = [f"{values[measure]:.2f}" if measure in values else "-" for measure, *_ in columns]
        rows.append([name, *cells])
    return _format_markdown(rows)


def _format_drift(reports: Sequence[PeerReport]) -> list[str]:
    """Returns the table of how much the earlier commit's figures changed within the run.

    A difference between two peers that is smaller than this change means nothing.
    """
    earlier = [report for report in reports if "@" in report.name]
    columns = [
        column for column in COLUMNS if any(column[0] in report.figures for report in earlier)
    ]
    rows = [["peer", *(heading for _, heading, _ in columns)]]
    for report in earlier:
        halves = [
            _compute_half_medians(report.figures.get(measure, Figures()).values)
            for measure, *_ in columns
        ]
        cells = ["-" if pair is None else f"{pair[1] / pair[0]:.2f}" for pair in halves]
        rows.append([report.name, *cells])
    return _format_markdown(rows) if len(rows) > 1 else []


def _compute_half_medians(values: Sequence[float]) -> tuple[float, float] | None:
    """Returns the medians of the first and the second half; `None` for fewer than two values."""
    middle = len(values) // 2
    if not middle:
        return None
    return statistics.median(values[:middle]), statistics.median(values[middle:])


def _format_remarks(reports: Iterable[PeerReport]) -> list[str]:
    lines = []
    for report in reports:
        versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
        options = ", ".join(f"{k}={v}" for k, v in report.description.get("options", {}).items())
        drained = report.figures.get("drain_1", Figures()).texts
        parts = [versions, options, report.description.get("notes", ""), *drained]
        lines.append(f"- {report.name}: {'; '.join(part for part in parts if part)}")
    return lines


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _format_markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
