"""Quotas: what a workspace may use is the lesser of its own quota and the operator's ceiling."""

import pytest

from tenuto.model.errors import Invalid
from tenuto.model.limits.quota import Quota, effective_quota

CEILING = Quota(pending=10, running=3)


@pytest.mark.parametrize(
    ("own", "in_force"),
    [
        (Quota(), CEILING),
        (Quota(pending=4), Quota(pending=4, running=3)),
        (Quota(pending=11, running=0), Quota(pending=10, running=0)),
        (Quota(tasks_per_minute=7), Quota(tasks_per_minute=7, pending=10, running=3)),
    ],
)
def test_lesser_of_quota_and_ceiling_applies(own: Quota, in_force: Quota) -> None:
    assert effective_quota(own, CEILING) == in_force
    assert effective_quota(own, Quota()) == own


def test_quota_above_the_ceiling_is_refused_by_name() -> None:
    Quota(pending=10, tasks_per_minute=10**6).check_below(CEILING)
    with pytest.raises(Invalid, match="at most 3, the operator's ceiling quota_running, not 4"):
        Quota(running=4).check_below(CEILING)
