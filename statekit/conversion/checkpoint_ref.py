"""A checkpoint as a user names it: its place, its form, and the facts that its files lack.

Each option stands here once, with its help, its form on the command line and its form in JSON. The options of every
verb, the keywords of Python, the fields of plans and certificates, the service's options and the printed code follow
from the fields of `CheckpointRef`. A new option is a field here and a line in `RefOptions`.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, Self, TypedDict

from statekit.budget import Budget, Limits, bytes_of
from statekit.errors import Faults, UsageError, meant
from statekit.files.checkpoint import MODEL_KEY, OPTIMIZER_KEY, Checkpoint
from statekit.files.source import checkpoint_place
from statekit.files.tree import Place
from statekit.state.evidence import BATCH, COUNT, Fact
from statekit.state.facts import still_assumed
from statekit.state.options import checked_hparams, is_known
from statekit.state.schedules.call_text import call_text, parse_call
from statekit.state.train_state import Counts, TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import from_json
from statekit.tensors.typed import typed

Kind = Literal["text", "number", "flag", "bytes", "values", "names", "call"]
"""The form of an option's value: `values` by name, the `names` of parameters, the `call` that makes a schedule."""
Use = Literal["place", "meaning", "trust"]
"""What an option tells: which checkpoint, what its files do not say, or how far they are trusted."""
OPTIMIZER = "optimizer"
"""The option that names an optimizer; `--hparams optimizer=NAME` is its older spelling."""


@dataclass(frozen=True)
class Option:
    """What a verb has to know of one field of a `CheckpointRef`.

    Attributes:
        name: The field, which is the keyword in Python, the key in JSON.
        flag: The option on the command line: `--names-from`.
        kind: The form of the value.
        use: What it tells.
        help: One or two sentences for `--help`.
        metavar: What stands for the value in `--help`.
        choices: The values that are allowed; any if empty.
        completes: Which names a shell completes: `containers`, `layouts` or `variants`.
    """

    name: str
    flag: str
    kind: Kind
    use: Use
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    completes: str = ""

    def expression(self, value: Any) -> str:
        """Returns a value as Python code.

        Example:
            >>> option("schedule").expression({"function": "constant", "arguments": {"value": 0.1}, "whole": True})
            "'constant(value=0.1)'"
        """
        plain = call_text(value) if self.kind == "call" else [*value] if self.kind == "names" else value
        return repr(plain)

    def words(self, value: Any) -> list[str]:
        """Returns the words of a command line that tell a value.

        Example:
            >>> option("hparams").words({"decay_rate": 0.8})
            ['--hparams', 'decay_rate=0.8']
        """
        match self.kind:
            case "flag":
                return [self.flag]
            case "values":
                return [
                    word for key, item in value.items() for word in (self.flag, f"{key}={json.dumps(item)}")
                ]
            case "names":
                return [self.flag, json.dumps([*value])]
            case "call":
                return [self.flag, call_text(value)]
        return [self.flag, str(value)]


def _option(
    flag: str,
    kind: Kind,
    use: Use,
    help: str,
    default: Any = None,
    *,
    metavar: str = "",
    choices: tuple[str, ...] = (),
    completes: str = "",
) -> Any:
    """Returns the field of a ref, with all that verbs have to know of it."""
    described = {"option": (flag, kind, use, help, metavar, choices, completes)}
    if kind == "values":
        return field(default_factory=dict, kw_only=True, metadata=described)
    return field(default=default, kw_only=True, metadata=described)


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint, and what a user says about it.

    Example:
        >>> ref = CheckpointRef("run/ck.pt", variant="zip2025", hparams={"beta1": 0.9})
        >>> ref.code("model.named_parameters()")
        "'run/ck.pt', model.named_parameters(), hparams={'beta1': 0.9}, variant='zip2025'"
        >>> ref.code(spelling="shell")
        'run/ck.pt --hparams beta1=0.9 --variant zip2025'

    Attributes:
        path: The checkpoint, or a run's folder.
        container: How its arrays lie in files; its content tells if None.
        layout: What its names mean; the names tell if None.
        step: The step of a run's folder; the newest if None.
        hparams: Hyperparameters in the original system's own names. Of several optimizers a name may begin with the
            schema: `adamw/weight_decay_rate`.
        optimizer: Name of the optimizer that ran, where the files fit several.
        variant: Variant of the schema; of several optimizers `adafactor/optax,adamw/torch`.
        param_names: Names of the parameters, in the order of an optimizer that only numbers them.
        names_from: Another origin of that order, which the layout offers: `config`.
        schedule: The call that makes the learning rate, as `state.schedules.called` has it, or its text.
        model_key: Path of the model's part in the checkpoint's tree, keys joined by `/`; found if None.
        optimizer_key: Path of the optimizer's part; found if None.
        assume_defaults: Whether documented defaults stand for what nobody says, where a target stores it.
        accept_damaged: Whether to go on with a checkpoint that its manifest contradicts.
        follow_links: Whether to read what links out of the checkpoint lead to.
        budget: Bytes that the job may hold; the usual ones if None.
        files: The files that a user named instead of a value, by option, for printed code.
        model: None here; `contracts.Hints` has the live model that goes on, which no user names.

    Raises:
        UsageError: `path` is no path, or `schedule` is no call.
    """

    path: str | os.PathLike[str] | None = None
    container: str | None = _option(
        "--from", "text", "place", "The container of the checkpoint, if statekit cannot detect it.",
        metavar="CONTAINER", completes="containers",
    )  # fmt: skip
    layout: str | None = _option(
        "--layout", "text", "place", "The layout of its names, if statekit cannot detect it.",
        metavar="LAYOUT", completes="layouts",
    )  # fmt: skip
    step: int | None = _option(
        "--step", "number", "place", "The step of a run. Default: the newest.", metavar="N"
    )
    hparams: Mapping[str, Any] = _option(
        "--hparams", "values", "meaning",
        "Hyperparameters that the checkpoint does not store, by the original's names: "
        "decay_rate=0.8, or a .gin or .json file. May be repeated. adamw/b2=0.95 names one of "
        "several optimizers.",
        metavar="FILE|KEY=VALUE",
    )  # fmt: skip
    optimizer: str | None = _option(
        "--optimizer", "text", "meaning",
        "The run's optimizer, where the files fit several.", metavar="NAME",
    )  # fmt: skip
    variant: str | None = _option(
        "--variant", "text", "meaning",
        "The variant of the run's optimizer, where the files fit several. For several optimizers: "
        "adafactor/hf,adamw/torch.",
        metavar="NAME", completes="variants",
    )  # fmt: skip
    param_names: Sequence[str] | None = _option(
        "--param-names", "names", "meaning",
        "Parameter names in the optimizer's order, where it only numbers them. A file with one name "
        "per line, a JSON list (or one list for each group), or a state_dict; or a JSON list itself.",
        metavar="FILE|LIST",
    )  # fmt: skip
    names_from: str | None = _option(
        "--names-from", "text", "meaning",
        "The source of the order of a Trainer's numbered parameters. config: the architecture that "
        "the model's config.json names, built without weights (needs statekit[hf]).",
        choices=("config",),
    )  # fmt: skip
    schedule: Mapping[str, Any] | None = _option(
        "--schedule", "call", "meaning",
        "The learning-rate schedule, where the files do not store it, as the program writes it: "
        "'optax.cosine_decay_schedule(1e-3, 10000)', or a .gin file of T5X.",
        metavar="CALL|FILE",
    )  # fmt: skip
    model_key: str | None = _option(
        "--model-key", "text", "meaning",
        "The keys that lead to the weights in a PyTorch file or a JAX tree, joined by /, where several trees fit.",
        metavar="KEY",
    )  # fmt: skip
    optimizer_key: str | None = _option(
        "--optimizer-key", "text", "meaning",
        "The keys that lead to the optimizer's state in a PyTorch file, joined by /.", metavar="KEY",
    )  # fmt: skip
    assume_defaults: bool = _option(
        "--assume-defaults", "flag", "meaning",
        "Use documented defaults for unknown hyperparameters that the target stores or a proof needs.", False,
    )  # fmt: skip
    accept_damaged: bool = _option(
        "--accept-damaged", "flag", "trust",
        "Read a checkpoint that its manifest contradicts, and name each contradiction.", False,
    )  # fmt: skip
    follow_links: bool = _option(
        "--follow-links", "flag", "trust",
        "Follow links that lead out of the checkpoint. Links in Hugging Face's cache are always followed.", False,
    )  # fmt: skip
    budget: int | None = _option(
        "--budget", "bytes", "trust",
        "The memory limit for headers, pickles and trees, such as 2GiB; it limits the work in "
        "proportion. Values of tensors are streamed.  [default: 512MiB]",
        metavar="SIZE",
    )  # fmt: skip
    files: Mapping[str, str] = field(default_factory=dict, kw_only=True, compare=False, repr=False)
    model: Mapping[str, Tensor] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Brings what a caller gives to the one form that each field has."""
        if self.path is not None and not isinstance(self.path, str | os.PathLike):
            raise UsageError(
                "A checkpoint is named by its path.", place="path", found=type(self.path).__name__
            )
        if self.param_names is not None and isinstance(self.param_names, str):
            raise UsageError(
                "param_names is a sequence of names.", place="param_names", found=self.param_names
            )
        values = dict(self.hparams or {})
        forms: dict[str, Any] = {
            "path": None if self.path is None else checkpoint_place(self.path),
            "optimizer": values.pop(OPTIMIZER, None) if self.optimizer is None else self.optimizer,
            "hparams": values,
            "param_names": None if self.param_names is None else tuple(self.param_names),
        }
        if isinstance(self.schedule, str):
            forms["schedule"] = parse_call(self.schedule)
        if isinstance(self.budget, str):
            forms["budget"] = bytes_of(self.budget)
        for name, value in forms.items():
            object.__setattr__(self, name, value)

    @classmethod
    def given(cls, source: CheckpointRef | str | os.PathLike[str], /, **options: Any) -> CheckpointRef:
        """Returns the ref that a caller means by a path or a ref, and by keywords, which go before it.

        Args:
            source: A checkpoint, a run's folder, or a ref.
            **options: Those of `RefOptions`; None says nothing.

        Raises:
            UsageError: There is no such option, or a value cannot be one.
        """
        declared = [declared.name for declared in OPTIONS]
        for name in options:
            if name not in declared:
                raise UsageError(
                    "There is no such argument.",
                    place=name,
                    expected=", ".join(declared),
                    remedy=meant(name, declared),
                )
        given = {name: value for name, value in options.items() if value is not None}
        if isinstance(source, CheckpointRef):
            return replace(source, **given)
        return cls(checkpoint_place(source), **given)

    def at(
        self, path: Place, *, container: str | None = None, layout: str | None = None, step: int | None = None
    ) -> Self:
        """Returns the same of another path; container, layout and step stay as they are where None is given."""
        return replace(
            self,
            path=path,
            container=self.container if container is None else container,
            layout=self.layout if layout is None else layout,
            step=self.step if step is None else step,
        )

    @property
    def place(self) -> Place:
        """The path.

        Raises:
            UsageError: The ref has none.
        """
        if self.path is None:
            raise UsageError("A ref without a path names no checkpoint.", place="path")
        return checkpoint_place(self.path)

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """`hparams`, and `optimizer` among them as they were spelled before."""
        return self.hparams if self.optimizer is None else {**self.hparams, OPTIMIZER: self.optimizer}

    def options(self, *uses: Use) -> dict[str, Any]:
        """Returns the options that were told, in their order, by name.

        Args:
            *uses: Only those that tell this; all if none is given.
        """
        return {
            declared.name: getattr(self, declared.name)
            for declared in OPTIONS
            if (not uses or declared.use in uses) and getattr(self, declared.name) not in (None, False, {})
        }

    def stored(self) -> dict[str, Any]:
        """Returns what files do not say, as plans, manifests and certificates have it: what changes a result.

        `hparams` and `variant` stand there always, and `optimizer` among `hparams`.
        """
        plain = {name: [*v] if name == "param_names" else v for name, v in self.options("meaning").items()}
        plain.pop(OPTIMIZER, None)
        return {**plain, "hparams": dict(self.hyperparameters), "variant": self.variant}

    def over(self, manifest: Mapping[str, Any] | None) -> Self:
        """Returns the ref with what a target's manifest, or a plan, says of its source; what is told here goes before.

        Args:
            manifest: The manifest's or the plan's record; None changes nothing.

        Raises:
            FormatError: It says something of another form.
        """
        options: Any = from_json((manifest or {}).get("options") or {})  # JSON has no tables by numbers
        meanings = [declared.name for declared in OPTIONS if declared.use == "meaning"]
        stored: Any = typed(
            {name: options[name] for name in meanings if options.get(name)}, RefOptions, "options"
        )
        given = {name: value for name, value in self.options("meaning").items() if name != "hparams"}
        values = {**(stored.pop("hparams", None) or {}), **self.hparams}
        return replace(self, **{**stored, **given, "hparams": values})

    def code(self, *between: str, spelling: Literal["python", "shell"] = "python") -> str:
        """Returns the arguments that open the same checkpoint again: of a function of statekit, or of a verb.

        Args:
            *between: Code of further arguments, which stand behind the path.
            spelling: Whether the arguments are Python's or a shell's.
        """
        if spelling == "shell":
            return shlex.join([*([str(self.path)] if self.path else []), *between, *self.words()])
        path = [] if self.path is None else [repr(str(self.path))]
        return ", ".join([*path, *between, *(f"{name}={text}" for name, text in self.keywords().items())])

    def keywords(self, *uses: Use) -> dict[str, str]:
        """Returns what was told as keywords of Python: name -> code of the value, where a shell names its file."""
        return {name: option(name).expression(value) for name, value in self.options(*uses).items()}

    def words(self, *uses: Use) -> list[str]:
        """Returns what was told as words of a command line."""
        return [
            word for name, value in self.options(*uses).items() for word in self._words(option(name), value)
        ]

    def _words(self, declared: Option, value: Any) -> list[str]:
        if declared.name in self.files:
            return [declared.flag, self.files[declared.name]]
        return declared.words(value)

    def job_budget(self) -> Budget:
        """Returns a new budget for the job that opens this checkpoint."""
        limits = None if self.budget is None else Limits(self.budget)
        return Budget(limits, follow_links=self.follow_links)

    def keyed(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns a checkpoint that knows where the user said its parts lie."""
        keys = {MODEL_KEY: self.model_key, OPTIMIZER_KEY: self.optimizer_key}
        given = {name: key for name, key in keys.items() if key is not None}
        return replace(checkpoint, meta={**checkpoint.meta, **given}) if given else checkpoint

    @property
    def variants(self) -> dict[str, str]:
        """The variants that were told, by schema; under "" the variant of whatever optimizer it is.

        Raises:
            UsageError: Two were told of the same optimizer.
        """
        parts = [] if self.variant is None else self.variant.split(",")
        pairs = [part.strip().rpartition("/") for part in parts]
        by_schema = {schema: name for schema, _, name in pairs}
        if len(by_schema) < len(pairs):
            raise UsageError(
                "An optimizer has one variant, but several are given.",
                place="--variant",
                expected="one for each optimizer of the run: SCHEMA/VARIANT,SCHEMA/VARIANT",
                found=self.variant,
            )
        return by_schema

    def of(self, schemas: Iterable[str]) -> dict[str, Self]:
        """Returns what was told of each of a run's optimizers, by schema.

        Raises:
            UsageError: An option is of none of them, or may be of several; lists every one.
        """
        names = list(dict.fromkeys(schemas))
        faults = Faults()
        values, variants = self._values_of(names, faults), self._variants_of(names, faults)
        pairs = ", ".join(f"{name}/NAME=VALUE" for name in names)
        faults.check(
            UsageError,
            f"The run has the optimizers {' and '.join(names)}, and it isn't said which is meant"
            if len(names) > 1
            else f"The run's optimizer is {names[0]}",
            place="--hparams, --variant",
            expected=f"{pairs}; {','.join(f'{name}/VARIANT' for name in names)}",
        )
        return {name: replace(self, hparams=values[name], variant=variants[name]) for name in names}

    def _values_of(self, schemas: Sequence[str], faults: Faults) -> dict[str, dict[str, Any]]:
        """Returns the hyperparameters that were told, by schema, and adds those that are not of exactly one."""
        values: dict[str, dict[str, Any]] = {schema: {} for schema in schemas}
        for key, value in self.hparams.items():
            prefix, _, name = key.rpartition("/")
            candidates = [schema for schema in schemas if not prefix or schema == prefix]
            if len(candidates) > 1:
                candidates = [schema for schema in candidates if is_known(schema, name)]
            if len(candidates) == 1:
                values[candidates[0]][name] = value
            else:
                faults.add(f"is said of {' or '.join(candidates)}" if candidates else "is said of none", key)
        return values

    def _variants_of(self, schemas: Sequence[str], faults: Faults) -> dict[str, str | None]:
        """Returns the variants that were told, by schema, and adds those that are not of exactly one."""
        variants: dict[str, str | None] = dict.fromkeys(schemas)
        for schema, variant in self.variants.items():
            if schema in variants or (not schema and len(schemas) == 1):
                variants[schema or schemas[0]] = variant
            else:
                faults.add(f"is said of {' or '.join(schemas)}" if not schema else "is said of none", variant)
        return variants

    def applied(self, state: TrainState) -> TrainState:
        """Returns a state with the hints in force: hyperparameters by their canonical names, or the variant's own.

        Of a state whose files count no updates, `count` among the hyperparameters says how many were done;
        `global_batch_size` says how many samples an update has.

        Raises:
            UsageError: A hyperparameter doesn't exist, can't have its value, or is said twice; lists every one.
        """
        name = next((name for name in _COUNTS if name in self.hparams), None)
        if name is not None and not state.counts.says_updates:
            rest = {key: value for key, value in self.hparams.items() if key != name}
            return replace(self, hparams=rest).applied(_counted(state, name, self.hparams[name]))
        if BATCH in self.hparams:
            rest = {key: value for key, value in self.hparams.items() if key != BATCH}
            return replace(self, hparams=rest).applied(_of_samples(state, self.hparams[BATCH]))
        hints = self.of(schema for schema, _ in state.optimizer.kinds)
        applied = state.per_optimizer(lambda part: hints[part.optimizer.schema]._applied(part))
        return replace(applied, assumptions=still_assumed(applied))

    def _applied(self, state: TrainState) -> TrainState:
        optimizer = state.optimizer
        values = checked_hparams(optimizer.schema, self.variant or optimizer.variant, self.hparams)
        if values:
            state = state.with_hyperparameters(**values)
        if self.variant is None:
            return state
        return replace(state, optimizer=replace(state.optimizer, variant=self.variant))


_COUNTS = (COUNT, "begin_num_update")
"""What says how many updates were done where files count none; the second is MXNet's word."""


def _counted(state: TrainState, name: str, updates: Any) -> TrainState:
    if type(updates) is not int or updates < 0:
        raise UsageError(
            "A count of updates can't be this.",
            place=f"--hparams {name}",
            expected="an integer from 0 on",
            found=repr(updates),
        )
    state = replace(state, counts=Counts(updates, updates, says_schedule=False))
    return state.with_facts(lambda facts: [*facts, Fact(COUNT, updates, "given")])


def _of_samples(state: TrainState, samples: Any) -> TrainState:
    if type(samples) is not int or samples < 1:
        raise UsageError(
            "An update can't have so many samples.",
            place=f"--hparams {BATCH}",
            expected="an integer from 1 on",
            found=repr(samples),
        )
    return state.with_facts(lambda facts: [*facts, Fact(BATCH, samples, "given")])


class HintOptions(TypedDict, total=False):
    """The fields of `CheckpointRef` as keywords of Python; below stand those that some verb has another meaning for."""

    step: int | None
    hparams: Mapping[str, Any] | None
    variant: str | None
    param_names: Sequence[str] | None
    names_from: Literal["config"] | None
    schedule: str | Mapping[str, Any] | None
    model_key: str | None
    optimizer_key: str | None
    assume_defaults: bool
    accept_damaged: bool
    budget: int | None


class LinkOptions(TypedDict, total=False):
    """What no service takes from a stranger."""

    follow_links: bool


class PlaceOptions(TypedDict, total=False):
    """What a checkpoint is. The `layout` of a verb that writes is the target's."""

    container: str | None
    layout: str | None


class SourceOptions(HintOptions, LinkOptions, total=False):
    """What is said of the source of a verb that writes."""

    optimizer: str | None


class RefOptions(SourceOptions, PlaceOptions, total=False):
    """The fields of `CheckpointRef` but the path; a test holds the two together."""


def _options(of: Iterable[Field[Any]]) -> Iterator[Option]:
    for declared in of:
        if (described := declared.metadata.get("option")) is not None:
            yield Option(declared.name, *described)


def ref_of(
    source: CheckpointRef | str | os.PathLike[str],
    hints: CheckpointRef | None = None,
    *,
    container: str | None = None,
    layout: str | None = None,
    step: int | None = None,
) -> CheckpointRef:
    """Returns a ref unchanged; makes one of a path and the options beside it."""
    if isinstance(source, CheckpointRef):
        return source
    return (hints or CheckpointRef()).at(
        checkpoint_place(source), container=container, layout=layout, step=step
    )


OPTIONS: tuple[Option, ...] = tuple(_options(fields(CheckpointRef)))
"""All options, in their order."""


@cache
def option(name: str) -> Option:
    """Returns the option of a field."""
    return next(declared for declared in OPTIONS if declared.name == name)
