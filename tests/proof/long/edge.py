"""Edge: strangers' connections, bodies and headers neither hold up others nor make the API grow."""

from tests.proof.edge_load import Scale, missed, run, table

P99_MS = 1000.0
"""What a test holds others to: the machine may be busy. `python -m tests.proof.edge_load` holds
them to the bound that is promised."""


async def test_attacks_do_not_delay_other_clients() -> None:
    scale = Scale()
    rows = await run(scale)
    print(f"\n{table(rows)}")
    assert missed(rows, P99_MS) == []
    reported = {row.name: set(row.answers) for row in rows}
    assert reported["silent, many addresses"] == reported["slow bodies"] == {"408"}
    assert reported["silent, one address"] == {"408", "503"}
    assert reported[f"{scale.body_mb} MB of JSON without a token"] == {"401"}
    assert "431" in reported[f"{scale.header_mb} MB of headers"]
    assert reported["event streams of one token"] == {"200", "429"}
