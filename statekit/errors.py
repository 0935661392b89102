"""The errors that statekit raises.

StatekitError
├── UsageError          (ValueError)         a call or an option makes no sense
├── NotFoundError       (FileNotFoundError)  a path, step, tensor or name isn't there
├── FormatError         (ValueError)         bytes that don't follow their format, or can't be trusted
│   ├── CorruptError                         a checksum, digest or size disagrees with the data
│   ├── RefusedError                         input that asks for code, foreign files or absurd memory
│   │   └── BudgetError                      more memory or work than the job may take; --budget raises it
│   └── UnknownFormatError                   no format fits, or several fit equally well
├── StateError          (ValueError)         a train state breaks its schema; lists every fault
│   └── NamesError                           nothing tells which parameters an optimizer's numbers mean


│   └── NoSchemaError   (UnknownFormatError) a part of a run has an optimizer that no schema describes


├── InexactError        (ValueError)         a conversion would be less exact than required
├── UnknownRuleError    (LookupError)        a step needs a rule or hyperparameter nobody has given
├── TargetExistsError   (FileExistsError)    the target is there already
├── CommitError         (OSError)            writing failed; nothing was left at the target's name
├── MissingExtraError   (ImportError)        an optional framework isn't installed
└── UnsupportedSystemError (ImportError)     the operating system lacks what statekit needs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar


class StatekitError(Exception):
    """The root of all errors raised on purpose by statekit.

    Its text is fit for a terminal: names from a checkpoint stand in it as `printable` shows them.

    Args:
        subject: What is wrong, one sentence.
        place: Where: a full path, a tensor's name, a byte offset.
        expected: What should have been there.
        found: What is there instead.
        remedy: What the user can do about it.

    Attributes:
        faults: Where several things are wrong at once: what and where, every one, while the text folds them.
    """

    faults: tuple[tuple[str, str], ...] = ()

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
        lines = [_row(name, value) for name, value in rows if value is not None]
        super().__init__("\n".join([printable(subject), *lines]))

    @property
    def line(self) -> str:
        """The text in one line, for a place where it stands among others."""
        return " ".join(str(self).split())

    @property
    def kind(self) -> str:
        """The name of its class in this module: readers raise classes of their own below these."""
        return next(base.__name__ for base in type(self).__mro__ if base.__module__ == __name__)

    def also(self, remedy: str) -> None:
        """Puts a caller's remedy before the error's own."""
        parts = {name: getattr(self, name) for name in ("place", "expected", "found")}
        both = f"{remedy}; or: {self.remedy}" if self.remedy else remedy
        StatekitError.__init__(self, self.subject, **parts, remedy=both)

    def rename(self, change: Callable[[str], str]) -> None:
        """Changes all texts of the error, such as names of files that the user knows by others."""

        def renamed(part: object) -> object:
            text = change(str(part))
            if text == str(part):
                return part
            return Lines(text) if isinstance(part, Lines) else text

        StatekitError.__init__(
            self,
            change(self.subject),
            place=renamed(self.place),
            expected=renamed(self.expected),
            found=renamed(self.found),
            remedy=change(self.remedy),
        )
        self.faults = tuple((change(fault), change(place)) for fault, place in self.faults)

    def __str__(self) -> str:  # OSError and KeyError subclasses would format their arguments otherwise
        return str(self.args[0])


def _row(name: str, value: object) -> str:
    if isinstance(value, Lines):
        return f"  {name}:{value}"
    return f"  {name}: {printable(str(value))}"


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


class BudgetError(RefusedError):
    """More memory or work than the job may take: says which limit, at which byte, and the option that raises it."""


class UnknownFormatError(FormatError):
    """No format fits, or several fit equally well."""


class StateError(StatekitError, ValueError):
    """A train state breaks its schema, or a checkpoint doesn't hold what its layout says."""


class NamesError(StateError):
    """Nothing tells which parameters an optimizer's numbers mean."""


class NoSchemaError(StateError, UnknownFormatError):
    """A part of a run has an optimizer that no schema describes: its state is known by its own names alone."""


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


class UnsupportedSystemError(StatekitError, ImportError):
    """The operating system lacks what statekit needs."""


def meant(name: str, names: Iterable[str]) -> str:
    """Returns the question that names what was probably meant, for the remedy of an error; "" if nothing is near.

    Example:
        >>> meant("clipping_treshold", ["clipping_threshold", "decay_rate"])
        'did you mean clipping_threshold?'
        >>> meant("Adam-W", ["adamw", "lamb"])
        'did you mean adamw?'
        >>> meant("xyz", ["adamw", "lamb"])
        ''
    """
    near = nearest(name, names)
    return f"did you mean {near}?" if near else ""


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns the known name that is nearest to a name, whatever its case and separators; "" if none is near."""
    from difflib import get_close_matches

    plain = {_plain(candidate): candidate for candidate in names}
    near = get_close_matches(_plain(name), plain, n=1, cutoff=0.7)
    return plain[near[0]] if near else ""


def check_name(
    kind: str, name: str, offered: Iterable[str], place: str, remedy: Callable[[str], str] = lambda name: ""
) -> str:
    """Returns a name that somebody gave, if it is one of those that are offered.

    Args:
        kind: What bears the name: `container`, `layout`, `variant` ...
        name: The name.
        offered: The names there are.
        place: The option or argument that it was given for.
        remedy: What to do about a name that means something else; "" where it means nothing.

    Raises:
        UsageError: It isn't; says which was probably meant.
    """
    names = list(offered)
    if name not in names:
        raise UsageError(
            f"There is no {kind} of that name.",
            place=place,
            expected=", ".join(names),
            found=name,
            remedy=remedy(name) or meant(name, names),
        )
    return name


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


MOST_NAMED = 3
"""How many of several names are said."""
MOST_LINES = 40
"""How many lines a list of faults has."""


def some(names: Sequence[object]) -> str:
    """Returns the first few of many names; a file may have keys that are no text.

    Example:
        >>> some(["a", 7, "b", "c", "d"])
        'a, 7, b and 2 more'
    """
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(str, names[:MOST_NAMED])) + more


def extra(name: str) -> str:
    """Returns how the packages of an extra are installed. statekit isn't published: no index has its name for sure."""
    return f"pip install '.[{name}]' in a clone of statekit"


def plural(count: int, name: str) -> str:
    """Returns a number of things.

    Example:
        >>> plural(1, "slot"), plural(2, "slot")
        ('1 slot', '2 slots')
    """
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def size(nbytes: int) -> str:
    """Returns a number of bytes for people.

    Example:
        >>> size(1536), size(12)
        ('1.5 KiB', '12 B')
    """
    amount = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


class Lines(str):
    """Text of several lines that may be printed as it is; any other text is made printable with its line breaks."""

    __slots__ = ()

    def __add__(self, other: str) -> Lines:
        return Lines(super().__add__(printable(other, keep="\n")))


def listed(lines: Iterable[str]) -> Lines:
    """Renders what an error found or expects as a list, one line each."""
    return Lines("".join(f"\n    {printable(line)}" for line in lines))


def _fault_list(faults: Iterable[tuple[str, str]], folds: bool) -> Lines:
    """Renders all faults of one input, one `what @ place` a line; many places with one fault are one line if it folds.

    Example:
        >>> print(_fault_list([("has no slots", f"layers_{i}") for i in range(52)], True))
        <BLANKLINE>
            has no slots @ 52 places: layers_0, layers_1, layers_2 and 49 more
    """
    places: dict[str, list[str]] = {}
    for fault, place in faults:
        places.setdefault(fault, []).append(place)
    lines: list[str] = []
    for fault, named in places.items():
        folded = folds and len(named) > MOST_NAMED
        lines += (
            [f"{fault} @ {len(named)} places: {some(named)}"] if folded else [f"{fault} @ {p}" for p in named]
        )
    more = [f"and {len(lines) - MOST_LINES} more lines like these"] if len(lines) > MOST_LINES else []
    return listed([*lines[:MOST_LINES], *more])


E = TypeVar("E", bound=StatekitError)


class Faults:
    """The faults of one input, collected while it is read, so that one error lists them all.

    Example:
        >>> faults = Faults()
        >>> faults.add("has no slots", "encoder/w")
        >>> faults += [("has shape (2,), expected (3,)", "encoder/b")]
        >>> faults.check(StateError, "The slots don't fit the parameters")
        Traceback (most recent call last):
        ...
        statekit.errors.StateError: The slots don't fit the parameters: 2 faults.
          found:
            has no slots @ encoder/w
            has shape (2,), expected (3,) @ encoder/b
    """

    def __init__(self, faults: Iterable[tuple[str, str]] = (), folds: bool = True) -> None:
        """Begins with some.

        Args:
            faults: What is wrong, and where.
            folds: Whether many places with one fault are said in one line, with the first of them; not where the user
                has to do something about each.
        """
        self._faults, self._folds = list(faults), folds

    def add(self, what: str, place: str) -> None:
        """Notes what is wrong, and where."""
        self._faults.append((what, place))

    def __iadd__(self, more: Iterable[tuple[str, str]]) -> Faults:
        self._faults += more
        return self

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._faults)

    def __len__(self) -> int:
        return len(self._faults)

    def check(
        self,
        error: type[StatekitError],
        subject: str,
        *,
        place: object = None,
        expected: object = None,
        remedy: str = "",
    ) -> None:
        """Raises an error that lists all faults, if there are any.

        Args:
            error: Its class.
            subject: What is wrong on the whole, without a full stop: the number of faults is put behind it.
            place: Where: the input's path.
            expected: What should have been there.
            remedy: What the user can do about it.
        """
        if self._faults:
            count = "1 fault" if len(self._faults) == 1 else f"{len(self._faults)} faults"
            raise self.error(error, f"{subject}: {count}.", place=place, expected=expected, remedy=remedy)

    def error(
        self, error: type[E], subject: str, *, place: object = None, expected: object = None, remedy: str = ""
    ) -> E:
        """Returns an error that lists all faults, for what a count of them doesn't say; `subject` is a whole sentence.

        Example:
            >>> raise Faults([("1.0 -> 0.9", "beta1")]).error(StateError, "The rule would make other updates.")
            Traceback (most recent call last):
            ...
            statekit.errors.StateError: The rule would make other updates.
              found:
                1.0 -> 0.9 @ beta1
        """
        listing = error(
            subject,
            place=place,
            expected=expected,
            found=_fault_list(self._faults, self._folds),
            remedy=remedy,
        )
        listing.faults = tuple(self._faults)
        return listing
