"""The layouts of TensorFlow 1's optimizers: variables, slots beside them by name, and `global_step`.

    t2t          Tensor2Tensor's Adafactor     w/Adafactor, w/Adafactor_1, w/Adafactor_2
    mesh-tf      Mesh-TensorFlow's Adafactor   w_slot_vr, w_slot_vc, w_slot_v, w_slot_m
    tf-adam      TensorFlow's Adam             w/Adam, w/Adam_1
    mesh-tf-adam Mesh-TensorFlow's and GPT-Neo's AdamWeightDecay   w/adam_m, w/adam_v

No hyperparameter is stored; only TensorFlow's Adam has powers of its betas, which tell them. What a numbered slot is
follows from how many there are, over all variables: Adafactor makes m, if it has momentum, then vr and vc, or v. Which
release ran can't be told from a file.

Source: tensorflow/tensor2tensor, utils/adafactor.py, `_create_slots`; tensorflow/mesh, mesh_tensorflow/optimize.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence, dropped_from
from statekit.converters.layouts.hyperparameters import manifest_state
from statekit.converters.layouts.tensorflow.lines import graph_lines
from statekit.converters.layouts.tensorflow.names import AVERAGE, GLOBAL_STEP, Named, saved_name, sorted_names
from statekit.converters.layouts.tensorflow.powers import POWERS, contradicting_powers, held_betas, new_powers
from statekit.errors import Faults, InexactError, StateError
from statekit.files.checkpoint import Checkpoint, Finding
from statekit.lines.printing import SavedRun, State
from statekit.state.constants import variant_constants
from statekit.state.factoring import by_shape, first_entry, labels, map_entries, swapped
from statekit.state.schema import load_schema
from statekit.state.stored_params import as_stored, encoded, encodes
from statekit.state.train_state import Axis, Counts, Group, KnownFrom, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Shape, Tensor, in_memory

HOME = "tf1"
"""Key in `extra` of what a TensorFlow 1 checkpoint holds besides."""
_FACTORED = ("v_row", "v_col")
_DTYPES = {"m": ("momentum_dtype", "first_moment_dtype"), "v": ("moment_dtype",)}
"""By slot, the constants of a variant that say its dtype."""


def _powers(
    state: TrainState, tree: Mapping[str, Any], home: Mapping[str, Any], scope: str, faults: Faults
) -> dict[str, Tensor]:
    """Returns the powers of the betas that a tree lacks, or has of another count: they are the count."""
    updates = state.counts.updates
    stored = [name for name in tree if name.rpartition("/")[2] in POWERS]
    if stored and home.get("updates", updates) == updates:
        return {}
    powers = dict(new_powers(state.optimizer.groups, updates, faults))
    names = stored or [f"{scope}{name}" for name in powers]
    return {name: powers[last] for name in names if (last := name.rpartition("/")[2]) in powers}


@dataclass(frozen=True)
class TensorFlow1:
    """One optimizer's layout.

    Attributes:
        name: The name for `--layout`.
        title: One line for people.
        schema: The optimizer.
        makers: Variants that write such names, the usual one first.
        pattern: Matches the whole name of a slot.
        native: Slot, in the order in which slots are made -> what stands for it in its name; `""` and `_1`, `_2`, ...
            by its place if all are empty.
        suffix: What goes between a variable's name and that.
        powers: Whether the optimizer has powers of its betas for a count.
        trainer: The command that goes on with a run's folder of its own, with `{folder}` for it.
        after_restoring: Lines that a program runs once its variables are restored.
    """

    name: str
    title: str
    schema: str
    makers: tuple[str, ...]
    pattern: re.Pattern[str]
    suffix: str
    native: Mapping[str, str]
    powers: bool = False
    trainer: str = ""
    after_restoring: tuple[str, ...] = ()
    containers: tuple[str, ...] = ("tf-bundle",)
    schedule_in: str = "global_step"

    @property
    def variants(self) -> Mapping[str, tuple[str, ...]]:
        """The schema's variants that write such names."""
        return {self.schema: self.makers}

    @property
    def keeps_encoding(self) -> bool:
        """Whether some of these variants store bfloat16 variables encoded."""
        return any(encodes(self.schema, variant) for variant in self.makers)

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for slots beside variables."""
        tree = checkpoint.tree
        if not isinstance(tree, Mapping) or not all(isinstance(name, str) for name in tree):
            return None
        slot_name = next((name for name in tree if self._slot_of(name, tree)), None)
        return Evidence(20, f"{slot_name} beside its variable") if slot_name else None

    def _slot_of(self, name: str, tree: Mapping[str, Any]) -> bool:
        match = self.pattern.fullmatch(name)
        base = match["base"] if match else ""
        while base and base not in tree:
            base = base.partition("/")[2]
        return bool(base)

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the canonical state.

        Hints are canonical: `variant`, hyperparameters, and `factor_map` as {variable: labels} for parameters of rank
        3 and more, whose stacked axes no file tells.
        """
        named = sorted_names(checkpoint.tree, self.pattern, checkpoint.path)
        faults = Faults(("is a slot of a variable that isn't there", name) for name in named.orphans)
        faults += [
            ("is a slot of another optimizer, and would be taken for a parameter", n) for n in named.foreign
        ]
        if ", " in named.scope:
            faults.add(f"slots lie below different scopes: {named.scope}", "slots")
        updates = _updates(named, faults)
        manifest = manifest_state(checkpoint, self.schema)
        variant = hints.variant or (manifest.variant if manifest else None) or self._only_variant(hints)
        slots, momentum = self._slots(named, faults)
        rules = dict(self._rules(named, slots, variant, hints, faults))
        faults.check(StateError, f"The names don't make a state of {self.title}", place=checkpoint.path)
        groups, notes = self._groups(named, slots, variant, momentum, updates)
        if manifest is not None:
            groups = tuple(member.group() for member in manifest.groups)
            notes = list(manifest.assumptions)
        state = TrainState(
            named.params,
            slots,
            Optimizer(self.schema, variant, groups),
            Counts(updates, manifest.schedule if manifest else updates),
            {**rules, **{p: Rule.from_json(r) for p, r in manifest.rules.items()}} if manifest else rules,
            {HOME: self._home(named, updates)},
            tuple(notes),
        )
        state = as_stored(state)
        return replace(hints, variant=None).applied(state) if hints.hyperparameters else state

    def encode(self, state: TrainState) -> Encoded:
        state = encoded(state)
        faults = Faults(self._misfits(state))
        home = state.extra.get(HOME)
        home = home if isinstance(home, Mapping) else {}
        parts, scope = home.get("parts", {}), self.scope(state)
        tree: dict[str, Any] = {}

        def put(before: str, path: str, suffix: str, tensor: Tensor) -> None:
            whole, spec = parts.get(path, (path, None))
            key = f"{before}{path}{suffix}" if spec is None else saved_name(whole, path, before, suffix)
            if spec is not None:
                tree.setdefault(key, {})[spec] = tensor
            elif key in tree:
                faults.add("would have the name of another tensor", key)
            else:
                tree[key] = tensor

        for path, param in state.params.items():
            put("", path, "", param)
        for path, slots in state.slots.items():
            for suffix, tensor in self._native(state, path, slots):
                put(scope, path, suffix, tensor)
        for path, tensor in home.get("averages", {}).items():
            put("", path, AVERAGE, tensor)
        tree |= {name: value for name, value in home.get("others", {}).items() if name not in tree}
        if self.powers:
            tree |= _powers(state, tree, home, scope, faults)
        tree[home.get("step", GLOBAL_STEP)] = in_memory(
            np.asarray(state.counts.updates, np.int64), GLOBAL_STEP
        )
        faults.check(InexactError, f"{self.title} can't hold the state")
        return Encoded(tree, state.counts.updates, dropped=dropped_from(state.extra, (HOME,), self.title))

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return [*graph_lines(state, saved, self.trainer), *self.after_restoring]

    def scope(self, state: TrainState) -> str:
        """Returns what goes before the names of slots: as they were read, unless another optimizer named them so."""
        home = state.extra.get(HOME)
        is_own = isinstance(home, Mapping) and home.get("slots", self.suffix) == self.suffix
        return str(home.get("scope", "")) if is_own and isinstance(home, Mapping) else ""

    def _home(self, named: Named, updates: int) -> dict[str, Any]:
        step = _step_name(named)
        others = {name: value for name, value in named.others.items() if name != step}
        home: dict[str, Any] = {
            "scope": named.scope,
            "slots": self.suffix if named.scope else "",
            "step": "" if step == GLOBAL_STEP else step,
            "averages": dict(named.averages),
            "others": others,
            "parts": {path: list(part) for path, part in named.parts.items()},
            "updates": updates if self.powers else 0,
        }
        return {key: value for key, value in home.items() if value}

    def _only_variant(self, hints: CheckpointRef) -> str | None:
        """Returns the one variant that takes the hyperparameters that were given; None if several do."""
        schema, given = load_schema(self.schema), {*hints.hyperparameters} - {"learning_rate", "factor_map"}
        takes = [maker for maker in self.makers if given <= schema.variant(maker)["defaults"].keys()]
        variants = takes if len(self.makers) > 1 else self.makers
        return variants[0] if len(variants) == 1 else None

    def _form(self, variant: str | None) -> Mapping[str, Any]:
        chosen = variant if variant in self.makers else self.makers[0]
        return variant_constants(self.schema, chosen)

    def _slots(self, named: Named, faults: Faults) -> tuple[dict[str, dict[str, Tensor]], bool]:
        """Returns the slots by canonical name, and whether there is momentum."""
        if any(self.native.values()):
            by_name = {native: slot for slot, native in self.native.items()}
            slots = {
                path: {by_name[n]: t for n, t in natives.items()} for path, natives in named.slots.items()
            }
            return slots, any("m" in param_slots for param_slots in slots.values())
        momentum = "m" in self.native and self._momentum(named)
        slots = {}
        for path, natives in named.slots.items():
            ordered = [natives[key] for key in sorted(natives, key=lambda key: int(key[1:] or 0))]
            rest = len(ordered) - momentum
            names = [*(["m"] if momentum else []), *(_FACTORED if rest == 2 and self._factors else ("v",))]
            if len(names) != len(ordered):
                faults.add(f"has {len(ordered)} slots, expected {len(names)} ({', '.join(names)})", path)
            slots[path] = dict(zip(names, ordered, strict=False))
        return slots, momentum

    @property
    def _factors(self) -> bool:
        return "v_row" in self.native

    def _momentum(self, named: Named) -> bool:
        """Tells whether the first of a variable's slots is its momentum: m has the variable's shape, vr never has."""
        if not self._factors:
            return True
        firsts = [
            (natives[""].shape == named.params[p].shape, len(natives))
            for p, natives in named.slots.items()
            if "" in natives
        ]
        return any(count == 3 or (same and count == 2) for same, count in firsts)

    def _rules(
        self,
        named: Named,
        slots: Mapping[str, Mapping[str, Tensor]],
        variant: str | None,
        hints: CheckpointRef,
        faults: Faults,
    ) -> Iterator[tuple[str, Rule]]:
        """Yields how each parameter is factored: as it was told, else as the variant does with its shape."""
        if not self._factors:
            return
        given = hints.hyperparameters.get("factor_map")
        entries = map_entries(given, "factor_map") if given is not None else ()
        form = self._form(variant)
        for path, param_slots in slots.items():
            shape, factored = named.params[path].shape, "v_row" in param_slots
            entry = first_entry(entries, path)
            axes = (labels(entry.value) if entry else None) or by_shape(form, shape, factored)
            known_from: KnownFrom = (
                "given" if entry else "file" if form["factored_rank"] == "two" else "assumed"
            )
            rule = Rule(axes, known_from if len(shape) > 1 else "file")
            fault = _rule_fault(rule, shape, param_slots)
            if fault:
                faults.add(fault, path)
            else:
                yield path, rule

    def examine(self, checkpoint: Checkpoint, state: TrainState) -> Iterator[Finding]:
        """Yields powers of betas that aren't those of the run."""
        return contradicting_powers(checkpoint, state) if self.powers else iter(())

    def _groups(
        self, named: Named, slots: Mapping[str, Any], variant: str | None, momentum: bool, updates: int
    ) -> tuple[tuple[Group, ...], list[str]]:
        """Returns the one group, with the variant's defaults for missing values, and the assumptions."""
        schema, paths = load_schema(self.schema), tuple(slots)
        if variant is None:
            candidates = ", ".join(self.makers)
            return (Group(paths),), [
                f"The file doesn't say which variant ran: {candidates}. Name it with --variant."
            ]
        values = {n: v for n, v in schema.variant(variant)["defaults"].items() if n != "learning_rate"}
        known_from: dict[str, KnownFrom] = dict.fromkeys(values, "assumed")
        if self._factors:
            values["factored"] = any("v_row" in param_slots for param_slots in slots.values())
            known_from["factored"] = "file"
            if momentum:  # how strong it is, no file tells
                del values["beta1"], known_from["beta1"]
            else:
                known_from["beta1"] = "file"
        betas = held_betas(named.others, values, updates) if self.powers else {}
        values |= betas
        known_from |= dict.fromkeys(betas, "file")
        odd = [name for name, value in betas.items() if value is None]
        for name in odd:
            del values[name], known_from[name]
        assumed = ", ".join(f"{n}={v}" for n, v in values.items() if known_from[n] == "assumed")
        return (Group(paths, values, known_from),), [
            f"The file holds no hyperparameters; assumed: {assumed}.",
            *(f"{name}_power is of no {name} at update {updates}: name {name}." for name in odd),
        ]

    def _native(
        self, state: TrainState, path: str, slots: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields what follows a variable's name for each of its slots."""
        slots, place = self._by_axes(state, path, slots), 0
        for slot, native in self.native.items():
            if slot in slots:
                yield f"{self.suffix}{native or (f'_{place}' if place else '')}", slots[slot]
                place += 1

    def _by_axes(self, state: TrainState, path: str, slots: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns slots as this optimizer calls them: v_row and v_col by the axes that they have averaged away."""
        rule = state.rules.get(path)
        if (
            rule is None
            or not rule.factored
            or rule.axes != swapped(self._usual(rule, state.params[path].shape))
        ):
            return slots
        return {**slots, "v_row": slots["v_col"], "v_col": slots["v_row"]}

    def _usual(self, rule: Rule, shape: Shape) -> tuple[Axis, ...]:
        if "stacked_dim_names" in load_schema(self.schema).variant(self.makers[0])["defaults"]:
            stacked = rule.dims(Axis.BATCH)
        else:
            stacked = ()
        return by_shape(self._form(None), shape, rule.factored, 0, stacked)

    def _dtype_faults(self, slots: Mapping[str, Tensor], dtype: str) -> Iterator[str]:
        """Yields slots that `zeros_slot` makes in their variable's dtype and that have another: a Saver refuses them.

        Source: tensorflow/tensorflow v1.15, python/training/slot_creator.py, `create_zeros_slot`.
        """
        form = self._form(None)
        for name, constants in _DTYPES.items():
            like_variable = any(form.get(constant) == "parameter" for constant in constants)
            if like_variable and name in slots and slots[name].dtype.name != dtype:
                yield (
                    f"slot {name} is {slots[name].dtype} beside a variable of {dtype}, and is made in its dtype"
                    f" (--slot-dtype {name}={dtype} rounds it)"
                )

    def _misfits(self, state: TrainState) -> Iterator[tuple[str, str]]:
        if state.optimizer.schema != self.schema:
            raise InexactError(
                f"The layout {self.name} holds the state of {self.schema} only.",
                expected=self.schema,
                found=state.optimizer.schema,
            )
        kinds = {frozenset(slots) & {"m"} for slots in state.slots.values()}
        if len(kinds) > 1:
            yield "some parameters have momentum and others don't", "slots"
        for path, slots in state.slots.items():
            yield from (
                (f"has slot {n}, for which there is no place", path) for n in slots if n not in self.native
            )
            yield from ((fault, path) for fault in self._dtype_faults(slots, state.params[path].dtype.name))
            rule, shape = state.rules.get(path), state.params[path].shape
            if rule is None or not self._factors:
                continue
            usual = self._usual(rule, shape)
            if rule.axes not in (usual, swapped(usual)):
                axes = ", ".join(axis.value for axis in rule.axes)
                yield (
                    f"is factored by {axes}; this optimizer would: {', '.join(a.value for a in usual)}",
                    path,
                )
        for i, group in enumerate(state.optimizer.groups):
            yield from ((f"has slot {name} as a whole", f"groups/{i}") for name in group.slots)


def _updates(named: Named, faults: Faults) -> int:
    name = _step_name(named)
    tensor = named.others.get(name)
    if not isinstance(tensor, Tensor) or tensor.shape != () or tensor.dtype.kind not in "iu":
        faults.add("isn't there, or no whole number: nothing else tells the step", GLOBAL_STEP)
        return 0
    updates = int(tensor.read())
    if updates < 0:
        faults.add(f"is {updates}", name)
    return max(updates, 0)


def _step_name(named: Named) -> str:
    below = [name for name in named.others if name.endswith(f"/{GLOBAL_STEP}")]
    return below[0] if GLOBAL_STEP not in named.others and len(below) == 1 else GLOBAL_STEP


def _rule_fault(rule: Rule, shape: Shape, slots: Mapping[str, Tensor]) -> str:
    if len(rule.axes) != len(shape) or rule.factored != ("v_row" in slots):
        return f"has shape {shape}, but the rule {', '.join(axis.value for axis in rule.axes)}"
    expected = {n: rule.slot_shape(n, shape) if n in _FACTORED else shape for n in slots}
    wrong = [f"{n} {slots[n].shape}, expected {e}" for n, e in expected.items() if slots[n].shape != e]
    return f"has slots of other shapes: {'; '.join(wrong)}" if wrong else ""
