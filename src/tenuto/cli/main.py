"""The entry of `orchestrate`, and the one place where errors become messages and exit codes."""

import contextlib
import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; answers its exit code and lets no exception out."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(list(words))  # click takes words out of the list it is given
        _flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        code = BROKEN_PIPE
    except Exception as error:  # noqa: BLE001  a fault is told in one line
        interrupted = isinstance(error.__cause__, KeyboardInterrupt)  # while a class was made
        code = INTERRUPTED if interrupted else _tell(_known(error), as_json=_wants_json(words))
    if arguments is None:
        _prepare_to_exit()
    return code


def _run(words: list[str]) -> int:
    import click

    from tenuto.cli.base import Globals
    from tenuto.cli.root import cli

    _occupy_standard_files()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if "_ORCHESTRATE_COMPLETE" in os.environ:
        cli.main(words, "orchestrate")
    try:
        with cli.make_context("orchestrate", words, obj=Globals()) as context:
            answer = cli.invoke(context)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    return answer if isinstance(answer, int) else 0


def _occupy_standard_files() -> None:
    """Keep a database or socket from becoming file 0, 1 or 2 where those were closed.

    What is for a closed one is written nowhere, and not to the other.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _wants_json(words: list[str]) -> bool:
    """Whether `--json` was asked for, also when the rest could not be understood."""
    ours = words[: words.index("--")] if "--" in words else words
    return "--json" in ours


def _known(error: Exception) -> Exception:
    """The error as one of ours: words that cannot be sent, a disk without room for the output."""
    import errno

    from tenuto.model.errors import Invalid, Unavailable

    if isinstance(error, UnicodeEncodeError):  # only what was typed holds such characters
        return Invalid("a lone surrogate character was given, which is no text", "text_invalid")
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    if not isinstance(error, OSError) or error.errno not in full:
        return error
    what = "the output" if error.filename is None else error.filename
    return Unavailable(f"{what} cannot be written: {error.strerror}", "storage_full")


def _tell(error: Exception, *, as_json: bool) -> int:
    """Print an error as its reader wants it; answers the exit code."""
    import click

    from tenuto.model.errors import EXIT_CODE, Invalid, TenutoError, lookup

    hint = ""
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx is not None else "orchestrate"
        hint = f"try `{where} --help`"
        error = Invalid(error.format_message())
    elif isinstance(error, click.ClickException):
        error = Invalid(error.format_message())
    if isinstance(error, TenutoError):
        code, message, status = error.code, error.message, lookup(EXIT_CODE, error)
        if code == "unauthenticated":
            hint = "give a token that holds: --token, TENUTO_TOKEN, or `orchestrate login URL`"
    else:
        code, message, status = "internal", f"internal fault: {_named(error)}", 1
        hint = "set TENUTO_DEBUG=1 for the stack trace"
    with contextlib.suppress(OSError):  # nobody reads it: the exit code has to do
        _print_problem(code, message, hint, as_json=as_json)
    if os.environ.get("TENUTO_DEBUG"):
        import traceback

        from tenuto.model.printable import indented

        stack = "".join(traceback.format_exception(error))
        print("  " + indented(stack, "  "), file=sys.stderr)
    return status


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _print_problem(code: str, message: str, hint: str, *, as_json: bool) -> None:
    import re

    from tenuto.model.printable import printable

    if as_json and _printed({"error": {"code": code, "message": printable(message, lines=True)}}):
        return
    # Faults of files stand on lines of their own, where editors look for them; a line that could
    # pass for one of ours is set in.
    told = re.sub(r"\n(?=(error|warning|note): )", "\n  ", printable(message, lines=True))
    print(f"error: {told} [{code}]", file=sys.stderr)
    if hint:
        print(printable(hint), file=sys.stderr)


def _printed(document: object) -> bool:
    """Whether a document could be printed; a reader that left wants none."""
    from tenuto.cli.render import print_json

    try:
        print_json(document)
        _flush()
    except BrokenPipeError:
        return True
    except OSError:
        return False
    return True


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _prepare_to_exit() -> None:
    """Let the interpreter have nothing to say: no unwritable output, no late Ctrl-C."""
    import signal

    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            with open(os.devnull, "wb") as nowhere:  # noqa: PTH123  pathlib is not imported here
                os.dup2(nowhere.fileno(), number)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
