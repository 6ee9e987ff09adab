"""`orchestrate secret rotate`: a new key, and nothing left under the old one."""

from tests.cli.orchestrate import Orchestrate


def test_rotation_encrypts_everything_with_the_new_key(cli: Orchestrate) -> None:
    for name in ("one", "two"):
        assert cli("secret", "set", name, stdin=f"value of {name}\n").code == 0
    before = {secret["keyId"] for secret in cli.json("secret", "list")["secrets"]}
    done = cli.json("secret", "rotate")
    after = {secret["keyId"] for secret in cli.json("secret", "list")["secrets"]}
    assert done["sealed"] == 2
    assert after == {done["key"]}
    assert before.isdisjoint(after)
    again = cli.json("secret", "rotate", "--keep-key")
    assert (again["key"], again["sealed"]) == (done["key"], 0)


def test_secret_rule_is_set_and_shown(cli: Orchestrate) -> None:
    use = ("--role", "ADMIN", "--agent", "payer", "--agent", "b", "--definition", "pay")
    assert cli("secret", "set", "payroll", *use, stdin="value\n").code == 0
    rule = {"role": "ADMIN", "agents": ["payer", "b"], "definitions": ["pay"]}
    assert cli.json("secret", "list")["secrets"][0]["use"] == rule
    assert cli("secret", "set", "payroll", stdin="another\n").code == 0
    assert cli.json("secret", "list")["secrets"][0]["use"] == rule
    assert "payer, b" in cli.ok("secret", "list")
    cli.ok("secret", "set", "payroll", "--keep-value", "--role", "MEMBER")
    plain = {"role": "MEMBER", "agents": [], "definitions": []}
    assert cli.json("secret", "list")["secrets"][0]["use"] == plain
    refused = cli("secret", "set", "payroll", "--keep-value")
    assert (refused.code, "--keep-value" in refused.err) == (2, True)
    missing = cli("secret", "set", "gone", "--keep-value", "--role", "ADMIN")
    assert (missing.code, "no secret 'gone'" in missing.err) == (1, True)
