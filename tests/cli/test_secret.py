"""`orchestrate secret rotate`: a new key, and nothing left under the old one."""

from tests.cli.orchestrate import Orchestrate


def test_everything_is_sealed_with_a_new_key(cli: Orchestrate) -> None:
    for name in ("one", "two"):
        assert cli("secret", "set", name, stdin=f"value of {name}\n").code == 0
    before = {each["keyId"] for each in cli.json("secret", "list")["secrets"]}
    done = cli.json("secret", "rotate")
    after = {each["keyId"] for each in cli.json("secret", "list")["secrets"]}
    assert done["sealed"] == 2
    assert after == {done["key"]}
    assert before.isdisjoint(after)
    again = cli.json("secret", "rotate", "--keep-key")
    assert (again["key"], again["sealed"]) == (done["key"], 0)
