"""The list of attacks: each raises while its hole is open, else says how it was answered."""

from collections.abc import Callable

from tests.proof.attacks.world import World

Attack = Callable[[World], str]
HOLES: dict[str, Attack] = {}


def hole(number: str) -> Callable[[Attack], Attack]:
    """Lists an attack under the number that its finding has."""

    def listed(attack: Attack) -> Attack:
        HOLES[number] = attack
        return attack

    return listed


def status_line(answer: bytes | None) -> str:
    """Status and reason of a raw answer; nothing when the connection was closed without one."""
    assert answer is not None, "the connection was kept open"
    return answer.split(b"\r\n")[0].removeprefix(b"HTTP/1.1 ").decode()
