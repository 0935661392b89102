"""What is known of the facts that an update depends on, and what a verdict may say on that ground.

A fact has a source. `file`: the checkpoint says it. `given`: the user does. `inferred`: something in the file shows it.
`assumed`: a documented default stands for it. `unknown`: nothing tells, or the file contradicts the default. Input: the
facts of a state, as `statekit.state.facts` has them. Output: the one line that no verdict may be printed without.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from statekit.tensors.tree import plain
from statekit.tensors.typed import Name

KnownFrom: TypeAlias = Literal["file", "given", "inferred", "assumed"]
"""How a value that stands in a state is known."""
TAKEN: tuple[KnownFrom, ...] = ("inferred", "assumed")
"""Sources of values that nobody says: what somebody does say outweighs them."""
Source: TypeAlias = Literal["file", "given", "inferred", "assumed", "unknown"]
"""How a fact is known, the strongest first."""
OPTIMIZER = "optimizer"
BEYOND = "beyond"
SCALED = "scaled"
DIALECT = "class"
ORDER = "order"
PIECES = "pieces"
"""Names of facts: which optimizer it is, what it does besides its schema's steps, how a map scaled a group, whose class
has its form, in which order an optimizer numbers its parameters, and that it moved pieces of them."""
COUNT = "count"
"""Name of the fact how many updates are done."""
BATCH = "global_batch_size"
"""Name of the fact how many samples an update has. Systems that count samples ask for it."""
_DECAY = ("weight_decay_rate", "wd", "exclude_from_weight_decay")
"""What programs set most often: named first."""
_FILE_SAYS = "the file says "
MOST_NAMED = 3
"""A headline names so many facts of a kind and counts the others."""


class FactRecord(TypedDict):
    """A fact that a layout noticed, as it stands in a manifest."""

    name: Name
    value: Any
    source: Source
    because: NotRequired[str]
    others: NotRequired[list[Name]]


@dataclass(frozen=True)
class Fact:
    """One fact that updates depend on.

    Attributes:
        name: A hyperparameter's canonical name, `optimizer`, `beyond`, or another in words: `mask`.
        value: What it is; None where it is unknown.
        source: How it is known.
        because: What shows it, whose default it is, or why it is unknown.
        others: What else it may be, as far as that has names.
        groups: Numbers of the groups on whose updates it bears.
    """

    name: str
    value: Any = None
    source: Source = "unknown"
    because: str = ""
    others: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()

    @property
    def is_weak(self) -> bool:
        """Whether neither the file nor the user says it."""
        return self.source in ("assumed", "unknown") or bool(self.others)

    @property
    def is_against_file(self) -> bool:
        """Whether the user says it and a file says something else."""
        return self.source == "given" and self.because.startswith(_FILE_SAYS)

    @property
    def text(self) -> str:
        """The fact in words: what is None is off.

        Example:
            >>> Fact("clipping_threshold").text, Fact("beta1", 0.9).text
            ('no clipping_threshold', 'beta1=0.9')
        """
        return f"no {self.name}" if self.value is None else f"{self.name}={self.value}"

    def to_json(self) -> dict[str, Any]:
        """Returns the fact as plain data."""
        more = {"because": self.because, "others": list(self.others), "groups": list(self.groups)}
        stated = {key: part for key, part in more.items() if part}
        return {"name": self.name, "value": plain(self.value), "source": self.source, **stated}

    @staticmethod
    def from_json(record: FactRecord) -> Fact:
        """Returns the fact of a record."""
        others = tuple(record.get("others", ()))
        return Fact(record["name"], record["value"], record["source"], record.get("because", ""), others)


def fits_several(names: Sequence[str], because: str) -> Fact:
    """Returns that a state may be of any of these optimizers; another framework's target asks which.

    Example:
        >>> fits_several(["adam", "radam"], "Adam's fields and one empty link").others
        ('adam', 'radam')
    """
    return Fact(OPTIMIZER, None, "unknown", because, tuple(names))


def taken_for(name: str, others: Sequence[str], because: str) -> Fact:
    """Returns that a state is taken for one optimizer's by its structure, which others may have too."""
    return Fact(OPTIMIZER, name, "inferred", because, tuple(others))


def of_class(name: str, options: Sequence[str]) -> Fact:
    """Returns the fact that another class than the one a variant is named after has a state's form."""
    return Fact(DIALECT, name, "inferred", f"its groups have {', '.join(options)}")


def against_file(name: str, given: Any, stored: Any) -> Fact:
    """Returns a value that the user gives in place of another in the file.

    Example:
        >>> headline("BITWISE", [against_file("weight_decay_rate", 0.3, 0.01)])
        'BITWISE, with weight_decay_rate=0.3 as given (the file says 0.01)'
    """
    return Fact(name, given, "given", f"{_FILE_SAYS}{stored}")


def beyond(sentence: str) -> Fact:
    """Returns that a run does more than its schema's steps; only its own system goes on with that."""
    return Fact(BEYOND, None, "file", sentence)


def of_pieces(path: str) -> tuple[Fact, ...]:
    """Returns that an optimizer moved flat pieces of a matrix, which is more than its schema's steps."""
    because = f"the optimizer goes on with flat pieces of {path}, as FSDP1 and ZeRO cut it"
    besides = (
        f"{path} is a matrix with a whole second moment: the optimizer saw flat pieces of it, as under FSDP1 and ZeRO, "
        "whose size its clipping and its parameter scale went by"
    )
    return (Fact(PIECES, None, "file", because), beyond(besides))


def scaled(paths: Sequence[str], number: float) -> tuple[Fact, ...]:
    """Returns on what an exact continuation depends of parameters that a map multiplied by a number; nothing for 1.

    Example:
        >>> scaled(["a/query", "b/query"], 4.0)[0].because.partition(",")[0]
        'a/query and 1 more has a group of its own'
    """
    if number == 1 or not paths:
        return ()
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    because = (
        f"{paths[0]}{more} has a group of its own, with {number:.6g} times the learning rate and weight decay and "
        f"epsilon divided by {number:.6g}, and clipping by a global norm takes its gradients times {number:.6g}"
    )
    return (Fact(SCALED, number, "file", because),)


def ordered(whose: str) -> Fact:
    """Returns that an optimizer's numbers were taken to mean parameters in an order that nothing in the file proves.

    Example:
        >>> headline("BITWISE", [ordered("the model's order")])
        "BITWISE, if the optimizer numbers its parameters in the model's order"
    """
    return Fact(ORDER, whose, "assumed", f"the optimizer numbers its parameters in {whose}")


def weakest(facts: Iterable[Fact]) -> list[Fact]:
    """Returns the facts that neither the file nor the user says, the weakest first."""
    weak = [fact for fact in facts if fact.is_weak]
    ranks = ("unknown", "assumed", "inferred")
    return sorted(
        weak, key=lambda fact: (ranks.index(fact.source) if fact.source in ranks else 3, _rank(fact))
    )


def _rank(fact: Fact) -> tuple[bool, bool]:
    """Returns the order in which facts of one source are named: the usual ones first, those that are off last."""
    off = fact.value is None or fact.value is False or fact.value in (0, [], "")
    return fact.name.rpartition("/")[2] not in (COUNT, *_DECAY), off


def headline(verdict: str, facts: Iterable[Fact]) -> str:
    """Returns a verdict with the weakest facts that it rests on, in one line.

    Example:
        >>> decay = Fact("weight_decay_rate", 0.0001, "assumed", "the default of optax.adamw")
        >>> headline("BITWISE", [decay])
        'BITWISE, if weight_decay_rate=0.0001 (the default of optax.adamw; nothing in the file says it)'
        >>> headline("BITWISE", [])
        'BITWISE'
    """
    facts = list(facts)
    weak = weakest(facts)
    values = [fact for fact in weak if fact.source == "assumed" and fact.name != ORDER]
    conditions = [fact.because for fact in facts if fact.name in (SCALED, ORDER, PIECES)]
    conditions = [*dict.fromkeys(conditions), *_taken(weak), *_assumed(values)]
    unknown = [fact.name for fact in weak if fact.source == "unknown" and fact.name != OPTIMIZER]
    given = [f"{fact.text} as given ({fact.because})" for fact in facts if fact.is_against_file]
    text = f"{verdict}, with {_counted(given, MOST_NAMED)}" if given else verdict
    text = f"{text}, if {' and '.join(conditions)}" if conditions else text
    return f"{text}; unknown: {_counted(unknown, MOST_NAMED + 1)}" if unknown else text


def _taken(weak: Sequence[Fact]) -> Iterator[str]:
    """Yields which optimizer a state is taken for, and what else fits."""
    for fact in weak:
        if fact.name == OPTIMIZER:
            which = (
                f"it is {fact.value}"
                if fact.value is not None
                else f"you know which it is ({_or(fact.others)})"
            )
            fits = (
                f" ({fact.because}; {_or(fact.others)} would look the same)" if fact.value is not None else ""
            )
            yield f"{which}{fits}"


def _assumed(facts: Sequence[Fact]) -> Iterator[str]:
    """Yields the values that are assumed, by whose defaults they are."""
    for because in dict.fromkeys(fact.because for fact in facts):
        same = [fact for fact in facts if fact.because == because]
        values = _counted([fact.text for fact in same], MOST_NAMED)
        several = len(same) > 1
        whose = because.replace("the default of", "the defaults of", 1) if several else because
        yield f"{values} ({whose}; nothing in the file says {'them' if several else 'it'})"


def _counted(names: Collection[str], most: int) -> str:
    """Returns the first names, and how many others there are."""
    named = list(dict.fromkeys(names))
    rest = len(named) - most
    return ", ".join(named[:most]) + (f" and {rest} more" if rest > 0 else "")


def _or(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + (" or " if len(names) > 1 else "") + "".join(names[-1:])
