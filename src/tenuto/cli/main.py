"""Entry point of `orchestrate`; the only place that turns errors into messages and exit codes."""

import contextlib
import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130
BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code. Never raises an exception."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(list(argv))  # click removes arguments from the list that it gets
        _flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        code = BROKEN_PIPE
    except Exception as error:  # noqa: BLE001  an internal error is printed in one line
        # Ctrl-C during the creation of a class arrives as the cause of another exception.
        interrupted = isinstance(error.__cause__, KeyboardInterrupt)
        code = (
            INTERRUPTED
            if interrupted
            else _report_error(_to_tenuto_error(error), as_json=_wants_json(argv))
        )
    if arguments is None:
        _prepare_to_exit()
    return code


def _run(argv: list[str]) -> int:
    """Runs a command line and returns its exit code; raises all errors, also of usage."""
    import click

    from tenuto.cli.base import GlobalOptions
    from tenuto.cli.root import cli

    _open_closed_standard_files()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if "_ORCHESTRATE_COMPLETE" in os.environ:
        cli.main(argv, "orchestrate")
    try:
        with cli.make_context("orchestrate", argv, obj=GlobalOptions()) as context:
            result = cli.invoke(context)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    return result if isinstance(result, int) else 0


def _open_closed_standard_files() -> None:
    """Opens standard files that are closed, so that no database or socket becomes file 0, 1 or 2.

    Output to such a file is discarded; it does not go to another file.
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


def _wants_json(argv: list[str]) -> bool:
    """True if `--json` was given, even if the rest of the command line could not be parsed."""
    own_arguments = argv[: argv.index("--")] if "--" in argv else argv
    return "--json" in own_arguments


def _to_tenuto_error(error: Exception) -> Exception:
    """Converts invalid characters and a full disk to Tenuto errors; returns others unchanged."""
    import errno

    from tenuto.model.errors import Invalid, Unavailable

    if isinstance(error, UnicodeEncodeError):  # only user input can contain such characters
        return Invalid(
            "the input contains a lone surrogate character, which is not valid text", "text_invalid"
        )
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    if not isinstance(error, OSError) or error.errno not in full:
        return error
    target = "the output" if error.filename is None else error.filename
    return Unavailable(f"{target} cannot be written: {error.strerror}", "storage_full")


def _report_error(error: Exception, *, as_json: bool) -> int:
    """Prints an error as text or JSON and returns the exit code."""
    import click

    from tenuto.model.errors import EXIT_CODE, Invalid, TenutoError, status_for_error

    hint = ""
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx is not None else "orchestrate"
        hint = f"try `{where} --help`"
        error = Invalid(error.format_message())
    elif isinstance(error, click.ClickException):
        error = Invalid(error.format_message())
    if isinstance(error, TenutoError):
        code, message, status = error.code, error.message, status_for_error(EXIT_CODE, error)
        if code == "unauthenticated":
            hint = "log in with `orchestrate login URL`, or give a token: --token, TENUTO_TOKEN"
    else:
        code, message, status = "internal", f"internal error: {_describe(error)}", 1
        hint = "set TENUTO_DEBUG=1 for the stack trace"
    with contextlib.suppress(OSError):  # standard error is closed: only the exit code is left
        _print_error(code, message, hint, as_json=as_json)
    if os.environ.get("TENUTO_DEBUG"):
        import traceback

        from tenuto.model.printable import indented

        stack = "".join(traceback.format_exception(error))
        print("  " + indented(stack, "  "), file=sys.stderr)
    return status


def _describe(error: Exception) -> str:
    """Returns the error's class name and message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _print_error(code: str, message: str, hint: str, *, as_json: bool) -> None:
    """Prints an error: as JSON on standard output if possible, otherwise on standard error."""
    import re

    from tenuto.model.printable import printable

    if as_json and _try_print_json(
        {"error": {"code": code, "message": printable(message, lines=True)}}
    ):
        return
    # Errors in YAML files are on separate lines, where editors find them. A line that looks like
    # one of our own messages is indented.
    text = re.sub(r"\n(?=(error|warning|note): )", "\n  ", printable(message, lines=True))
    print(f"error: {text} [{code}]", file=sys.stderr)
    if hint:
        print(printable(hint), file=sys.stderr)


def _try_print_json(document: object) -> bool:
    """True if the document was printed, or if the reader closed the pipe and wants no output."""
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
    """Writes buffered standard output, so that errors appear here and not at exit."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _prepare_to_exit() -> None:
    """Prevents messages at exit: drops unwritable output; a late Ctrl-C ends it silently."""
    import signal

    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            with open(os.devnull, "wb") as devnull:  # noqa: PTH123  pathlib is not imported here
                os.dup2(devnull.fileno(), number)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
