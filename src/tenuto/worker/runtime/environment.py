"""Where a task's session runs, and with which variables, as far as the worker's owner allows it."""

import os
from collections.abc import Mapping

from tenuto.model.errors import Invalid
from tenuto.model.tasks.environment import Allowed, decide
from tenuto.settings import Settings


def allowed_by(settings: Settings) -> Allowed:
    """Returns what the settings let tasks set; relative folders are below the present one."""
    folders = tuple(os.path.realpath(each) for each in settings.allowed_folders())
    return Allowed(settings.allowed_names(), folders)


def check_place(env: Mapping[str, str], cwd: str | None, allowed: Allowed) -> str | None:
    """Returns the folder a session runs in, links resolved; raises `Invalid` for what is refused.

    Relative folders are below the first allowed one. `None` is the folder of the worker. Whoever
    may write to an allowed folder can still replace a part of the path by a link before the
    session enters it.
    """
    if cwd is None:
        decide(env, None, None, allowed)
        return None
    below = allowed.folders[0] if allowed.folders else os.sep
    path = os.path.join(below, cwd)  # noqa: PTH118  `cwd` may be absolute
    # First without looking whether the folder is there: a task is told nothing of other folders.
    folder = os.path.realpath(path)
    decide(env, cwd, folder, allowed)
    # Behind links that lead in a circle, other links of the path were left as they are.
    if _existing(path, cwd) != folder:
        raise Invalid(f"cannot work in {cwd}: where it leads has just changed", field="cwd")
    return folder


def _existing(path: str, cwd: str) -> str:
    """Returns where a path leads; raises `Invalid` if that is nowhere."""
    try:
        return os.path.realpath(path, strict=True)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise Invalid(f"cannot work in {cwd}: {why}", field="cwd") from None
