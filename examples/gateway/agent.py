"""A session to try push dispatch with: counts to `steps` of its input, and reports as it goes.

It goes on from its checkpoint, says that it lives while it works, and ends when it is told to, or
when its attempt is no longer the task's.
"""

import json
import os
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

BASE = os.environ["TENUTO_CALLBACK_URL"]
TASK = os.environ["TENUTO_TASK_ID"]
AGENT = os.environ["TENUTO_AGENT_ID"]
LOST = 75
"""Exit status of a session whose task is somebody else's, or is to stop."""


class Stopped(Exception):
    """Nobody wants this session's work any more."""


def call(method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """One request on behalf of the attempt."""
    request = urllib.request.Request(
        BASE + path,
        json.dumps(body).encode(),
        {
            "authorization": f"Bearer {os.environ['TENUTO_CALLBACK_TOKEN']}",
            "content-type": "application/json",
        },
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.loads(answer.read() or b"{}")
            return found
    except urllib.error.HTTPError as error:
        if error.code == 409:
            raise Stopped(error.read().decode()) from error
        raise


def live(every_s: float, done: threading.Event) -> None:
    """Say that the session lives, until it is done or told to stop."""
    while not done.wait(every_s):
        try:
            told = call("POST", f"/agents/{AGENT}/heartbeat", {})
        except Stopped:
            told = {"cancel": True}
        except OSError:
            continue  # the lease has time for a few more
        if told.get("cancel") or told.get("pause"):
            os._exit(LOST)


def main() -> int:
    context = json.load(sys.stdin)
    wish = context.get("inputContext") or {}
    steps, step_s = int(wish.get("steps", 3)), float(wish.get("stepSeconds", 1))
    first = (context.get("checkpointData") or {}).get("step", 0)
    done = threading.Event()
    beat = threading.Thread(target=live, args=(float(wish.get("beatSeconds", 10)), done))
    beat.daemon = True
    beat.start()
    try:
        for step in range(first, steps):
            done.wait(step_s)
            call(
                "PATCH",
                f"/agent-tasks/{TASK}/progress",
                {
                    "progressPercent": 100 * (step + 1) // steps,
                    "currentStep": f"step {step + 1} of {steps}",
                    "checkpointData": {"step": step + 1},
                },
            )
        result = {"said": context["prompt"] or context["taskTitle"], "from": first, "to": steps}
        call("POST", f"/agent-tasks/{TASK}/complete", {"outputResult": result})
    except Stopped as stopped:
        print(f"stopped: {stopped}", file=sys.stderr)
        return LOST
    return 0


if __name__ == "__main__":
    sys.exit(main())
