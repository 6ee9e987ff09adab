"""An example session for push dispatch: counts to `steps` of its input and reports progress.

It continues from its checkpoint and sends heartbeats while it works. It stops if the task is
cancelled or paused, or if its attempt lost the task's lease.
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
EXIT_LOST = 75
"""Exit status of a session that lost its lease or was asked to stop."""


class Stopped(Exception):
    """The API refused a report because the attempt no longer holds the task's lease."""


def call(method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Sends a request for the attempt and returns the response.

    Raises `Stopped` if the response is 409.
    """
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
        with urllib.request.urlopen(request, timeout=30) as response:
            result: dict[str, Any] = json.loads(response.read() or b"{}")
            return result
    except urllib.error.HTTPError as error:
        if error.code == 409:
            raise Stopped(error.read().decode()) from error
        raise


def send_heartbeats(every_s: float, done: threading.Event) -> None:
    """Sends heartbeats until the session is done; exits if a response asks it to stop."""
    while not done.wait(every_s):
        try:
            response = call("POST", f"/agents/{AGENT}/heartbeat", {})
        except Stopped:
            response = {"cancel": True}
        except OSError:
            continue  # the lease outlasts a few lost heartbeats
        if response.get("cancel") or response.get("pause"):
            os._exit(EXIT_LOST)


def main() -> int:
    context = json.load(sys.stdin)
    options = context.get("inputContext") or {}
    steps, step_s = int(options.get("steps", 3)), float(options.get("stepSeconds", 1))
    first = (context.get("checkpointData") or {}).get("step", 0)
    done = threading.Event()
    heartbeat = threading.Thread(
        target=send_heartbeats, args=(float(options.get("beatSeconds", 10)), done)
    )
    heartbeat.daemon = True
    heartbeat.start()
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
        return EXIT_LOST
    return 0


if __name__ == "__main__":
    sys.exit(main())
