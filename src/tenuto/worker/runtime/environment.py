"""Decides the folder and variables of a task's session, within what the worker's owner allows."""

import os
from collections.abc import Mapping

from tenuto.model.errors import Invalid
from tenuto.model.tasks.environment import Allowed, check_allowed
from tenuto.settings import Settings


def allowed_environment(settings: Settings) -> Allowed:
    """Returns what the settings let tasks set; relative folders are below the current folder."""
    folders = tuple(os.path.realpath(folder) for folder in settings.allowed_folders())
    return Allowed(settings.allowed_variables(), folders)


def resolve_folder(env: Mapping[str, str], cwd: str | None, allowed: Allowed) -> str | None:
    """Returns the session's folder (`None`: the worker's); `Invalid` if it or `env` is forbidden.

    Links are resolved; relative folders are below the first allowed one. A user who may write to an
    allowed folder can still replace a part of the path by a link before the session enters it.
    """
    if cwd is None:
        check_allowed(env, None, None, allowed)
        return None
    base = allowed.folders[0] if allowed.folders else os.sep
    path = os.path.join(base, cwd)  # noqa: PTH118  `cwd` may be absolute
    # First without checking that the folder exists: a task must learn nothing of other folders.
    folder = os.path.realpath(path)
    check_allowed(env, cwd, folder, allowed)
    # Behind a cycle of links, the other links of the path were not resolved.
    if _resolve_existing(path, cwd) != folder:
        raise Invalid(f"cannot work in {cwd}: its target has just changed", field="cwd")
    return folder


def _resolve_existing(path: str, cwd: str) -> str:
    """Returns the path with links resolved; raises `Invalid` if its target does not exist."""
    try:
        return os.path.realpath(path, strict=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise Invalid(f"cannot work in {cwd}: {reason}", field="cwd") from None
