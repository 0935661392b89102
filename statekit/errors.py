"""The errors that statekit raises.

StatekitError
├── UsageError          (ValueError)         a call or an option makes no sense
├── NotFoundError       (FileNotFoundError)  a path, step, tensor or name isn't there
├── FormatError         (ValueError)         bytes that don't follow their format, or can't be trusted
│   ├── CorruptError                         a checksum, digest or size disagrees with the data
│   ├── RefusedError                         input that asks for code, foreign files or absurd memory
│   └── UnknownFormatError                   no format fits, or several fit equally well
├── StateError          (ValueError)         a train state breaks its schema; lists every fault
├── InexactError        (ValueError)         a conversion would be less exact than required
├── UnknownRuleError    (LookupError)        a step needs a rule or hyperparameter nobody has given
├── TargetExistsError   (FileExistsError)    the target is there already
├── CommitError         (OSError)            writing failed; nothing was left at the target's name
└── MissingExtraError   (ImportError)        an optional framework isn't installed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class StatekitError(Exception):
    """The root of all errors raised on purpose by statekit.

    Args:
        subject: What is wrong, one sentence.
        place: Where: a full path, a tensor's name, a byte offset.
        expected: What should have been there.
        found: What is there instead.
        remedy: What the user can do about it.
    """

    def __init__(
        self,
        subject: str,
        *,
        place: object = None,
        expected: object = None,
        found: object = None,
        remedy: str = "",
    ) -> None:
        self.subject = subject
        self.place = place
        self.expected = expected
        self.found = found
        self.remedy = remedy
        rows = [("at", place), ("expected", expected), ("found", found), ("do", remedy or None)]
        super().__init__(
            "\n".join([subject, *(f"  {name}: {value}" for name, value in rows if value is not None)])
        )

    def __str__(self) -> str:  # OSError and KeyError subclasses would format their arguments otherwise
        return str(self.args[0])


class UsageError(StatekitError, ValueError):
    """A call or an option makes no sense."""


class NotFoundError(StatekitError, FileNotFoundError):
    """A path, step, tensor or name isn't there."""


class FormatError(StatekitError, ValueError):
    """Bytes that don't follow their format, or can't be trusted."""


class CorruptError(FormatError):
    """A checksum, digest or size disagrees with the data."""


class RefusedError(FormatError):
    """Input that asks for code, for files outside the checkpoint, or for absurd memory."""


class UnknownFormatError(FormatError):
    """No format fits, or several fit equally well."""


class StateError(StatekitError, ValueError):
    """A train state breaks its schema, or a checkpoint doesn't hold what its layout says."""


class InexactError(StatekitError, ValueError):
    """A conversion would be less exact than required."""


class UnknownRuleError(StatekitError, LookupError):
    """A step needs a rule or a hyperparameter that nobody has given."""


class TargetExistsError(StatekitError, FileExistsError):
    """The target is there already."""


class CommitError(StatekitError, OSError):
    """Writing failed; nothing was left at the target's name."""


class MissingExtraError(StatekitError, ImportError):
    """An optional framework isn't installed."""


def meant(name: str, known: Iterable[str]) -> str:
    """Returns the question that names what was probably meant, for the remedy of an error; "" if nothing is near.

    Example:
        >>> meant("clipping_treshold", ["clipping_threshold", "decay_rate"])
        'did you mean clipping_threshold?'
        >>> meant("Adam-W", ["adamw", "lamb"])
        'did you mean adamw?'
        >>> meant("xyz", ["adamw", "lamb"])
        ''
    """
    plain = {_plain(one): one for one in known}
    near = get_close_matches(_plain(name), plain, n=1, cutoff=0.7)
    return f"did you mean {plain[near[0]]}?" if near else ""


def _plain(name: str) -> str:
    """Returns a name as people mix it up: without case and separators."""
    return name.lower().replace("-", "").replace("_", "")


def printable(text: str, keep: str = "") -> str:
    r"""Returns text without control characters, line breaks, marks of direction and lone surrogates.

    A name in a checkpoint may hold any of them, and must neither steer a terminal nor pass for a line of ours.

    Example:
        >>> printable("a\x1b[2Jb")
        'a\\x1b[2Jb'
        >>> printable("two\nlines"), printable("two\nlines", keep="\n")
        ('two\\nlines', 'two\nlines')
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def some(names: Sequence[str]) -> str:
    """Returns the first few of many names."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def fault_list(faults: Iterable[tuple[str, str]]) -> str:
    """Renders all faults of one input, one `what @ path` a line."""
    return "\n" + "\n".join(f"    {what} @ {path}" for what, path in faults)
