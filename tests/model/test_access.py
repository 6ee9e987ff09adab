"""Rights: what a token is worth, who acts on whom, and when the last owner would go."""

from datetime import UTC, datetime, timedelta
from itertools import product
from uuid import UUID

import pytest

from tenuto.model.errors import Forbidden, Invalid
from tenuto.model.tenancy.access import (
    SCOPES,
    Action,
    Caller,
    Role,
    bounded_end,
    check_reach,
    effective_role,
    loses_last_owner,
    origin_of,
)

ANN, BOB, ONE, TWO = (UUID(int=number) for number in range(4))
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.mark.parametrize(("own", "present"), list(product(Role, Role)))
def test_a_users_token_is_worth_the_lesser_role(own: Role, present: Role) -> None:
    assert effective_role(own, ANN, present, disabled=False) == min(own, present)
    assert effective_role(own, ANN, present, disabled=True) is None
    assert effective_role(own, ANN, None, disabled=False) is None
    assert effective_role(own, None, None, disabled=False) == own


def caller(role: Role, scopes: tuple[str, ...] = SCOPES) -> Caller:
    return Caller(workspace=ONE, role=role, scopes=frozenset(scopes), actor="a", key="k")


@pytest.mark.parametrize(("mine", "theirs"), list(product(Role, Role)))
@pytest.mark.parametrize("action", ["give", "change", "end"])
def test_nobody_reaches_above(mine: Role, theirs: Role, action: Action) -> None:
    if theirs <= mine:
        check_reach(caller(mine), action, theirs)
        return
    with pytest.raises(Forbidden, match=f"cannot {action} the rights of {theirs.name}"):
        check_reach(caller(mine), action, theirs)


def test_nobody_gives_a_scope_that_is_not_theirs() -> None:
    check_reach(caller(Role.ADMIN, ("read", "admin")), "give", Role.ADMIN, ("read",))
    with pytest.raises(Forbidden, match="no scope 'write'"):
        check_reach(caller(Role.ADMIN, ("read", "admin")), "give", Role.VIEWER, ("write",))


def test_a_token_ends_with_its_maker_or_before() -> None:
    assert bounded_end(None, None) is None
    assert bounded_end(NOON, None) == NOON
    assert bounded_end(None, NOON) == NOON
    assert bounded_end(NOON, NOON) == NOON
    assert bounded_end(NOON - HOUR, NOON) == NOON - HOUR
    with pytest.raises(Invalid, match=NOON.isoformat().replace("+", r"\+")):
        bounded_end(NOON + HOUR, NOON)


@pytest.mark.parametrize(
    ("owners", "tokens", "user", "ended", "lost"),
    [
        ([ANN], [], ANN, [], True),
        ([ANN], [], BOB, [], False),
        ([ANN, BOB], [], ANN, [], False),
        ([ANN], [ONE], ANN, [], False),
        ([ANN], [ONE], None, [ONE], False),
        ([], [ONE], None, [ONE], True),
        ([], [ONE, TWO], None, [ONE], False),
        ([], [ONE, TWO], None, [ONE, TWO], True),
        ([], [], None, [ONE], False),  # nobody can enter as it is: nothing is lost
    ],
)
def test_the_last_owner_stays(
    owners: list[UUID], tokens: list[UUID], user: UUID | None, ended: list[UUID], *, lost: bool
) -> None:
    assert loses_last_owner(owners, tokens, user=user, ended=ended) is lost


def test_a_workspace_counts_for_the_tenant_that_made_it() -> None:
    first, tenant, child = ANN, BOB, ONE
    assert origin_of(first, None, first) == first
    assert origin_of(tenant, first, first) == tenant
    assert origin_of(child, tenant, first) == tenant
