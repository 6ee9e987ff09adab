"""`python -m tests.proof.attacks [sqlite|postgres] [HOLE...]`: how each attack is answered."""

import sys

from tests.proof.attacks import high, low, medium
from tests.proof.attacks.holes import HOLES
from tests.proof.attacks.world import World, world

GRADES = (high, medium, low)
"""To import them lists their attacks."""


def main(words: list[str]) -> int:
    """Print a line for each hole and database; the exit code is 1 while one is open."""
    kinds = [word for word in words if word in ("sqlite", "postgres")] or ["sqlite", "postgres"]
    chosen = [word for word in words if word in HOLES] or list(HOLES)
    results = []
    for kind in kinds:
        with world(kind) as here:
            results += [_attack(here, number) for number in chosen]
    sys.stdout.write(f"{sum(results)} answered, {len(results) - sum(results)} open\n")
    return 0 if all(results) else 1


def _attack(here: World, number: str) -> bool:
    """True if the attack was answered as required; prints how."""
    try:
        state, reported = "answered", HOLES[number](here)
    except Exception as error:  # noqa: BLE001  whatever breaks an attack's run leaves it unproven
        state, reported = "OPEN", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    sys.stdout.write(f"{number:4} {here.name:9} {state:9} {reported}\n")
    sys.stdout.flush()
    return state == "answered"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
