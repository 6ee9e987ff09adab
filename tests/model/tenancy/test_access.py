"""Rights in the model: token roles, actions on other users, and the last owner."""

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
    check_caller_covers,
    effective_role,
    loses_last_owner,
    quota_origin,
    token_expiry,
)

ANN, BOB, ONE, TWO = (UUID(int=number) for number in range(4))
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.mark.parametrize(("own", "present"), list(product(Role, Role)))
def test_user_token_has_the_lesser_role(own: Role, present: Role) -> None:
    assert effective_role(own, ANN, present, disabled=False) == min(own, present)
    assert effective_role(own, ANN, present, disabled=True) is None
    assert effective_role(own, ANN, None, disabled=False) is None
    assert effective_role(own, None, None, disabled=False) == own


def caller(role: Role, scopes: tuple[str, ...] = SCOPES) -> Caller:
    return Caller(workspace=ONE, role=role, scopes=frozenset(scopes), actor="a", key="k")


@pytest.mark.parametrize(("own", "theirs"), list(product(Role, Role)))
@pytest.mark.parametrize("action", ["give", "change", "end"])
def test_user_cannot_act_on_a_higher_role(own: Role, theirs: Role, action: Action) -> None:
    if theirs <= own:
        check_caller_covers(caller(own), action, theirs)
        return
    with pytest.raises(Forbidden, match=f"cannot {action} the rights of {theirs.name}"):
        check_caller_covers(caller(own), action, theirs)


def test_user_cannot_grant_a_scope_they_lack() -> None:
    check_caller_covers(caller(Role.ADMIN, ("read", "admin")), "give", Role.ADMIN, ("read",))
    with pytest.raises(Forbidden, match="cannot give the scope 'write'"):
        check_caller_covers(caller(Role.ADMIN, ("read", "admin")), "give", Role.VIEWER, ("write",))


def test_token_expires_no_later_than_its_creators_token() -> None:
    assert token_expiry(None, None) is None
    assert token_expiry(NOON, None) == NOON
    assert token_expiry(None, NOON) == NOON
    assert token_expiry(NOON, NOON) == NOON
    assert token_expiry(NOON - HOUR, NOON) == NOON - HOUR
    with pytest.raises(Invalid, match=NOON.isoformat().replace("+", r"\+")):
        token_expiry(NOON + HOUR, NOON)


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
def test_last_owner_cannot_be_removed(
    owners: list[UUID], tokens: list[UUID], user: UUID | None, ended: list[UUID], *, lost: bool
) -> None:
    assert loses_last_owner(owners, tokens, demoted_user=user, ended_tokens=ended) is lost


def test_workspace_counts_for_the_tenant_that_created_it() -> None:
    first, tenant, child = ANN, BOB, ONE
    assert quota_origin(first, None, first) == first
    assert quota_origin(tenant, first, first) == tenant
    assert quota_origin(child, tenant, first) == tenant
