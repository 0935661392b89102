"""What a model's library reads beside its weights, `config.json`: from what a checkpoint proves, and what was said.

A map says of each key where its value comes from. What the shapes and names of the parameters prove can't be said
otherwise; what the source's code has always had stands in the map; what neither tells is said by `--config`, and what
is taken instead of it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from statekit.errors import Faults, StateError, UsageError, some
from statekit.tensors.tensor import Shape

Rule = Mapping[str, Any]
"""Where a key's value comes from, as the map's file has it."""


@dataclass(frozen=True)
class Model:
    """A model as a map has made it.

    Attributes:
        shapes: Its parameters' shapes.
        before: Those of the source's.
        counts: How many there are of what each number of the map counts.
        chosen: The alternative of each of the map's choices.
        taken: What was taken that names don't tell, in sentences.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    chosen: Mapping[str, str] = field(default_factory=dict)
    taken: tuple[str, ...] = ()
    before: Mapping[str, Shape] = field(default_factory=dict)


@dataclass(frozen=True)
class Pretrained:
    """What a library needs to build one side's model.

    Attributes:
        class_name: The class that reads it.
        files: File -> key -> where its value comes from.
        after_loading: A line of Python for models that have a parameter, by its path.
        remark: A line on what the library's training does otherwise.
    """

    class_name: str
    files: Mapping[str, Mapping[str, Rule]]
    after_loading: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""

    @classmethod
    def read(cls, data: Mapping[str, Any] | None) -> Pretrained | None:
        """Reads what a map's file says of a side; None if it says nothing."""
        if data is None:
            return None
        return cls(data["class"], data["files"], data.get("after_loading", {}), data.get("remark", ""))

    def made(
        self, model: Model, settings: Mapping[str, Any], name: str, beside: str = ""
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Returns the files' contents, and what was taken that nobody knows, in sentences.

        Args:
            model: The model.
            settings: The values of `--config`, and of the file beside the checkpoint.
            name: The map's, for errors.
            beside: That file, if there is one.

        Raises:
            StateError: What was said contradicts the checkpoint; lists every key.
            UsageError: A key is needed that nothing tells; lists every one.
        """
        faults, missing = Faults(folds=False), Faults(folds=False)
        values: dict[str, Any] = {}
        files: dict[str, dict[str, Any]] = {}
        for file, key, rule in self._rules():
            try:
                proven, is_open = _value(rule, model, values)
            except StateError as error:
                faults.add(error.subject, key)
                continue
            value = settings.get(key, proven)
            if value is not None and key not in settings:
                value = proven = _with_parts(value, rule, settings, missing)
            if value is None:
                missing.add("isn't told by the checkpoint", key)
                continue
            if value != proven and not is_open(value):
                faults.add(f"is {value!r:.80}, and the checkpoint has {proven!r}", key)
            values[key] = files.setdefault(file, {})[key] = value
        faults.check(
            StateError,
            f"What was said of the model isn't what the map {name} makes of the checkpoint",
            place=f"--config and {beside} beside the checkpoint" if beside else "--config",
            remedy="leave it out, or name the checkpoint of that model; --config goes before what stands beside it",
        )
        missing.check(
            UsageError,
            f"The map {name} needs to know what no checkpoint says",
            place="--config",
            remedy="say it: --config KEY=VALUE, or --config config.json with the model's",
        )
        meant = {part for _, _, rule in self._rules() for part in rule.get("with", ())} | model.chosen.keys()
        others = {key: value for key, value in settings.items() if key not in values and key not in meant}
        files[self.main].update(others)
        return files, tuple(self._sentences(values, settings, others))

    def check(self, model: Model, settings: Mapping[str, Any], name: str) -> None:
        """Refuses a model whose parameters contradict each other, or the settings.

        Raises:
            StateError: They do; lists every key.
        """
        faults = Faults(folds=False)
        values: dict[str, Any] = {}
        for _, key, rule in self._rules():
            if "per" in rule and rule["per"] not in values:
                continue  # a number of heads, say, that nobody has to know here
            try:
                proven, _ = _value(rule, model, values)
            except StateError as error:
                faults.add(error.subject, key)
                continue
            if (value := settings.get(key, proven)) is not None:
                values[key] = value
        faults.check(
            StateError,
            f"The parameters aren't those of one model that the map {name} makes",
            remedy="a weight may be transposed, or of another model",
        )

    def assumed(self, names: Container[str]) -> Iterator[str]:
        """Yields the assumed settings of a model, each with its reason; `names` are the known ones."""
        for _, key, rule in self._rules():
            if "assumed" in rule and key not in names:
                yield (
                    f"{key}={rule['is']!r} ({rule['assumed']})"
                    if "is" in rule
                    else f"{key} ({rule['assumed']})"
                )

    @property
    def main(self) -> str:
        """The file that says what the model is."""
        return next(iter(self.files))

    @property
    def keys(self) -> frozenset[str]:
        """The keys of all files."""
        rules = tuple(self._rules())
        return frozenset(key for _, key, _ in rules).union(*(rule.get("with", ()) for _, _, rule in rules))

    def _rules(self) -> Iterator[tuple[str, str, Rule]]:
        for file, rules in self.files.items():
            for key, rule in rules.items():
                yield file, key, rule

    def _sentences(
        self, values: Mapping[str, Any], stated: Mapping[str, Any], others: Mapping[str, Any]
    ) -> Iterator[str]:
        taken = [
            f"{key}={values[key]} ({rule['assumed']})"
            for _, key, rule in self._rules()
            if "assumed" in rule and key not in stated
        ]
        if taken:
            yield f"Nothing says these of the model, and {self.main} has: {', '.join(taken)}; --config says others."
        if others:
            shown = ", ".join(f"{key}={value!r:.60}" for key, value in others.items())
            yield f"{self.main} has what --config says and neither map nor checkpoint knows: {shown}."


def _value(rule: Rule, model: Model, values: Mapping[str, Any]) -> tuple[Any, Callable[[object], bool]]:
    """Returns what a rule makes of a model, None if nothing, and which other values may be said."""
    if "count" in rule:
        return model.counts.get(rule["count"]), _never
    if "same" in rule:
        return values.get(rule["same"]), _never
    if "length" in rule:
        return _length(rule, model.before if "of" in rule else model.shapes, values), _never
    if "cases" in rule:
        return _case(rule, model.chosen), lambda said: True
    if "choice" in rule:
        chosen = model.chosen[rule["choice"]]
        return rule["of"][chosen], lambda said: "assumed" in rule and _is_of(said, rule, chosen)
    return rule.get("is"), _never if rule.get("only") else lambda said: True


def _with_parts(value: Any, rule: Rule, settings: Mapping[str, Any], missing: Faults) -> Any:
    """Returns a value with what a rule takes of what was said; adds what wasn't."""
    parts = rule.get("with", ())
    missing += [("isn't told by the checkpoint", part) for part in parts if part not in settings]
    return {**value, **{part: settings.get(part) for part in parts}} if parts else value


def _case(rule: Rule, chosen: Mapping[str, str]) -> Any:
    """Returns the value of the first case whose alternatives a model has."""
    fitting = (
        case["is"]
        for case in rule["cases"]
        if all(chosen.get(key) == word for key, word in case["when"].items())
    )
    return next(fitting, None)


def _is_of(stated: object, rule: Rule, chosen: str) -> bool:
    """Tells whether a value may be that of an alternative, and of no other."""
    choices: Mapping[str, object] = rule["of"]
    others = [value for alternative, value in choices.items() if alternative != chosen]
    like: Mapping[str, str] = rule.get("like", {})
    return stated not in others and all(
        fnmatchcase(str(stated), pattern) is (alternative == chosen) for alternative, pattern in like.items()
    )


def _never(value: object) -> bool:
    return False


def _fitting(rule: Rule, shapes: Mapping[str, Shape]) -> list[tuple[str, int, Shape]]:
    """Returns the parameters that a rule's patterns fit, each with the axis that is meant and its shape."""
    return [
        (path, place["axis"], shape)
        for place in (rule, *rule.get("also", ()))
        for path, shape in shapes.items()
        if fnmatchcase(path, place["length"])
    ]


def _length(rule: Rule, shapes: Mapping[str, Shape], values: Mapping[str, Any]) -> int | None:
    """Returns the length of an axis that parameters have in common, or of what it is a multiple of."""
    fitting = _fitting(rule, shapes)
    if short := [f"{axis} of {path} {list(shape)}" for path, axis, shape in fitting if len(shape) <= axis]:
        raise StateError(f"can't be told: there is no axis {', '.join(short)}")
    lengths: dict[int, list[str]] = {}
    for path, axis, shape in fitting:
        lengths.setdefault(shape[axis], []).append(f"{path} along axis {axis}")
    if len(lengths) > 1:
        several = "; ".join(f"{length}: {some(named)}" for length, named in lengths.items())
        raise StateError(f"can't be told: the parameters have {several}")
    length = next(iter(lengths), None)
    if length is None or "per" not in rule:
        return length
    by = values.get(rule["per"])
    if type(by) is not int or by < 1 or length % by:
        raise StateError(f"can't be told: {length} isn't a multiple of {rule['per']}, which is {by!r:.80}")
    return length // by
