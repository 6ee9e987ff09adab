"""Where a task's session runs, and with which variables, as far as the worker's owner allows it."""

import os
from collections.abc import Mapping

from tenuto.model.environment import Allowed, decide
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
    folder = None
    if cwd is not None:
        below = allowed.folders[0] if allowed.folders else os.sep
        folder = os.path.realpath(os.path.join(below, cwd))  # noqa: PTH118  `cwd` may be absolute
    decide(env, cwd, folder, allowed)
    return folder
