"""The `statekit` command: a group of verbs, each loaded when it is called."""

from __future__ import annotations

import _thread
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import Any, NamedTuple, cast

import click

from statekit.budget import collecting_rarely
from statekit.errors import StatekitError, UsageError, meant, printable

COMPLETE = "_STATEKIT_COMPLETE"
"""Set by the shell: `bash_source` prints what the shell has to run, `bash_complete` completes a line."""
DONE, WANTING, USAGE, FAILED, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes: done; checked and found wanting; a call that makes no sense; could not do it; stopped by Ctrl-C."""
STOPPED = 128
"""Exit code of a verb that a signal stopped, less the signal's number: 143 after SIGTERM. Source: bash(1)."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a verb with nothing left behind: Ctrl-C, and what a scheduler that preempts a job sends."""
_AGAIN_AFTER = 0.05
"""Seconds after which a signal is raised again that a garbage collection passed over."""


class Stopped(KeyboardInterrupt):
    """A signal asked the verb to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def stoppable() -> Iterator[None]:
    """Lets the signals of `STOPPING` end the verb, unless the caller handles them.

    This holds whatever the interrupted code makes of the exception: a library may turn it into an ImportError, and a
    garbage collection ignores what its callbacks raise.

    Raises:
        Stopped: One arrived.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    ended: list[bool] = []
    shown, hook = sys.stderr, sys.unraisablehook

    def stop(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        if ended:  # a second one, while the handlers are put back
            return
        if _is_importing(frame):  # NumPy prints a traceback of what ends its import, from C
            sys.stderr = _NOWHERE
        raise Stopped(number)

    def raise_again(ignored: sys.UnraisableHookArgs) -> None:
        if not isinstance(ignored.exc_value, Stopped):
            hook(ignored)
        elif taken:  # raised in a moment, when the garbage collection is over
            again = threading.Timer(_AGAIN_AFTER, _thread.interrupt_main, (ignored.exc_value.number,))
            again.daemon = True
            again.start()

    before = {number: signal.getsignal(number) for number in STOPPING}
    taken = [number for number in STOPPING if before[number] in (signal.SIG_DFL, signal.default_int_handler)]
    for number in taken:
        signal.signal(number, stop)
    sys.unraisablehook = raise_again
    try:
        yield
        if arrived:
            raise Stopped(arrived[0])
    except Stopped:
        raise
    except BaseException as error:
        if arrived:
            raise Stopped(arrived[0]) from error
        raise
    finally:
        ended.append(True)
        sys.stderr, sys.unraisablehook = shown, hook
        for number in taken:
            signal.signal(number, before[number])


def _is_importing(frame: FrameType | None) -> bool:
    """Tells whether a module is being imported where a signal arrives."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class _Nowhere(io.TextIOBase):
    """A stream that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)


_NOWHERE = _Nowhere()


class _QuietImport:
    """Keeps TensorFlow's own messages, which C code prints during the import, from stderr."""

    _is_looking = False

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Returns TensorFlow's spec with a quiet loader; as a finder of `sys.meta_path` does."""
        if name != "tensorflow" or self._is_looking:
            return None
        self._is_looking = True
        spec = find_spec(name)
        self._is_looking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with _quiet():
                    execute(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this spec's loader alone
        return spec


@contextmanager
def _quiet() -> Iterator[None]:
    """Discards all output to the file descriptor of stderr."""
    shown, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(shown, 2)
        os.close(shown)
        os.close(nowhere)


class Verb(NamedTuple):
    """Where a verb's click command lives (`module:command`), and the first line of its help."""

    module: str
    summary: str


VERBS = {
    "inspect": Verb("statekit.cli.inspect_command", "Shows what a checkpoint holds."),
    "ls": Verb("statekit.cli.ls_command", "Lists the runs below a folder, and whether each can be resumed."),
    "convert": Verb("statekit.cli.convert_command", "Converts a checkpoint to another system."),
    "work": Verb("statekit.cli.work.command", "Carries out one conversion by many processes."),
    "verify": Verb("statekit.cli.verify_command", "Proves that DST continues the run of SRC."),
    "diff": Verb("statekit.cli.diff_command", "Shows how two checkpoints differ, or where two runs part."),
    "doctor": Verb("statekit.cli.doctor_command", "Finds faults that no loader notices."),
    "cold-start": Verb(
        "statekit.cli.cold_start_command", "Compares a new optimizer's first updates with the run's."
    ),
    "check": Verb("statekit.cli.check_command", "Proves every byte that a manifest or a checksum covers."),
    "sweep": Verb("statekit.cli.sweep_command", "Removes the remains of killed conversions."),
    "seal": Verb("statekit.cli.seal_command", "Writes a manifest beside a checkpoint as it is."),
    "resume": Verb("statekit.cli.resume_command", "Prints the code that resumes from a checkpoint."),
    "replay": Verb(
        "statekit.cli.replay_command", "Replays an original optimizer's recordings with our steps."
    ),
    "formats": Verb("statekit.cli.formats_command", "Lists the containers and layouts that statekit knows."),
    "schemas": Verb(
        "statekit.cli.schemas_command", "Shows each optimizer's state and rule, by implementation."
    ),
    "maps": Verb("statekit.cli.maps_command", "Shows the maps from one codebase's model to another's."),
    "serve": Verb("statekit.cli.serve_command", "Shows the checkpoints below some folders in a browser."),
    "demo": Verb("statekit.cli.demo.demo_command", "Continues a T5X run in PyTorch."),
}


class Verbs(click.Group):
    """A group that knows its verbs by name and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        return cast(click.Command, import_module(VERBS[cmd_name].module).command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            remedy = meant(args[0], VERBS) or f"choose one of {', '.join(VERBS)}"
            raise click.UsageError(f"There is no command {args[0]!r}: {remedy}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="statekit", message="statekit %(version)s")
@click.option(
    "--debug", is_flag=True, help="Show the traceback of an error, and how long each stage worked and waited."
)
def statekit(debug: bool) -> None:
    """Moves the optimizer state of a training run between frameworks.

    Exit codes: 0 done, 1 checked and found wanting, 2 wrong usage, 3 could not do it, 128 and more: stopped.
    """


def _replace_closed_streams() -> None:
    """Replaces a closed standard output or error with one that discards its text."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _quiet_tensorflow() -> None:
    """Silences TensorFlow's messages about itself, in case it is imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not any(isinstance(finder, _QuietImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _QuietImport())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    line = list(sys.argv[1:] if arguments is None else arguments)
    _quiet_tensorflow()
    if instruction := os.environ.get(COMPLETE):
        from click.shell_completion import shell_complete

        return shell_complete(statekit, {}, "statekit", COMPLETE, instruction)
    debug, as_json = False, "--json" in line
    _replace_closed_streams()
    try:
        with (
            stoppable(),
            collecting_rarely(arguments is None),
            statekit.make_context("statekit", line) as context,
        ):
            debug = context.params["debug"]
            code = statekit.invoke(context)
            sys.stdout.flush()
            return code if isinstance(code, int) else DONE
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (
        click.exceptions.NoArgsIsHelpError
    ) as error:  # click 8.2 and newer; the message is the page of help
        click.echo(error.ctx.get_help() if error.ctx else error.format_message(), err=True)
        return USAGE
    except click.ClickException as error:
        return _report(UsageError(error.format_message()), USAGE, as_json, heading=_usage(error))
    except Stopped as stopped:
        return _report(
            StatekitError(f"Stopped by {signal.Signals(stopped.number).name}."),
            STOPPED + stopped.number,
            as_json,
        )
    except (KeyboardInterrupt, click.Abort):
        return _report(StatekitError("Stopped."), INTERRUPTED, as_json)
    except BrokenPipeError:  # whoever read our output has enough of it
        _discard_stdout()
        return DONE
    except Exception as error:  # whatever it is, a user gets an error of ours, and --debug the traceback
        if debug:
            raise
        return _report(_as_ours(error), USAGE if isinstance(error, UsageError) else FAILED, as_json)


def _discard_stdout() -> None:
    """Discards all further output to stdout, also at Python's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return ""
    return f"{context.get_usage()}\nTry '{context.command_path} --help' for help.\n\n"


def _as_ours(error: Exception) -> StatekitError:
    """Returns an error as one of ours, with the five parts."""
    if isinstance(error, StatekitError):
        return error
    if (
        isinstance(error, FileNotFoundError) and error.filename is None
    ):  # only the working directory has no name
        return StatekitError("The working directory isn't there any more.", remedy="cd to one that is")
    if isinstance(error, (OSError, MemoryError)):
        return StatekitError(str(error) or "There is not enough memory.")
    return StatekitError(
        f"statekit itself has failed: {type(error).__name__}: {error}",
        remedy="report this, with what `statekit --debug ...` prints",
    )


def _report(error: StatekitError, code: int, as_json: bool, heading: str = "") -> int:
    """Prints an error on stderr and, with --json, as JSON on stdout (docs/command_line.md); returns the exit code."""
    from statekit.cli.output import folded_error

    word = "" if code >= STOPPED else "Error: "
    with suppress(OSError):  # where nobody can be told, the exit code says it
        click.echo(folded_error(f"{printable(heading, keep=chr(10))}{word}{error}"), err=True)
    if as_json:
        parts = {name: getattr(error, name) for name in ("subject", "place", "expected", "found", "remedy")}
        plain = {name: None if value in (None, "") else str(value) for name, value in parts.items()}
        envelope = {
            "format": "statekit.error/1", "kind": type(error).__name__, "exit_code": code, **plain,
            "faults": [{"what": fault, "place": place} for fault, place in error.faults],
        }  # fmt: skip
        try:
            click.echo(json.dumps(envelope, indent=2))
        except OSError:
            _discard_stdout()
    return code
