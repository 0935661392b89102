"""Resuming in PyTorch from any checkpoint that statekit reads, without a converted file in between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, TypeAlias, Unpack

import torch

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Hints
from statekit.conversion.open_state import OpenState, changing
from statekit.conversion.registry import layout
from statekit.dropin.by_name import path_of, renamed_path
from statekit.dropin.loading import Call, Framework, Loaded, LoadOptions, ResumeOptions, put, resumed
from statekit.dropin.matching import Given, copy_fault, match_faults, require_resumable, saved_under
from statekit.dropin.overrides import rate_of
from statekit.errors import Faults, StateError, UsageError, some
from statekit.maps.links import StateMap
from statekit.maps.model_map import maps_of
from statekit.maps.modules import TargetModel
from statekit.state.options import RATE_NAMES
from statekit.state.run import BUFFERS
from statekit.state.schema import load_schema
from statekit.state.stored_params import as_variable
from statekit.state.train_state import Axis, Rule, TrainState
from statekit.tensors.tensor import Array, DType, Shape, Stored, Tensor, same_values
from statekit.torch.groups import rate_fault
from statekit.torch.optimizer import Rate
from statekit.torch.optimizers import LAMB, LANS, Adafactor, AdamW, Muon, ScaledAdam
from statekit.torch.partition import Partition
from statekit.torch.slots import dtype_of
from statekit.torch.state_matching import copy_into

NamedParameters: TypeAlias = Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor] | torch.nn.Module
Class: TypeAlias = type[Adafactor | ScaledAdam | LANS | LAMB | AdamW | Muon]

LAYOUT = "statekit-torch"
OPTIMIZERS: Mapping[str, Class] = {
    "adafactor": Adafactor,
    "scaled_adam": ScaledAdam,
    "lans": LANS,
    "lamb": LAMB,
    "adamw": AdamW,
    "muon": Muon,
}
"""Schema -> the class that goes on with it."""

HOME = "statekit.torch"
MAKERS = {schema: kind.__name__ for schema, kind in OPTIMIZERS.items()}
_REMEDY = (
    "names must be those of the checkpoint, with dots or slashes, or given: names={name: the checkpoint's, ...}; of a "
    "wrapped model pass the inner module"
)


def load_optimizer(
    path: CheckpointRef | str | PathLike[str],
    named_parameters: NamedParameters,
    *,
    lr: Rate | Mapping[str, Rate] = None,
    **options: Unpack[ResumeOptions],
) -> torch.optim.Optimizer:
    """Builds the optimizer that a checkpoint records, and loads its state by parameter name.

    Names fit as they are, or with dots for the slashes of the checkpoint's paths. Those that the recorded run kept
    frozen are left out, whether they are passed or not. The order of parameters matters only where the checkpoint
    numbers them and nothing in it tells which is which: then they are taken to stand in the recorded model's order,
    as far as shapes allow; equal shapes in several groups are refused. So an optimizer's state that was saved without
    weights (`torch.save(optimizer.state_dict())`) goes on too.

    Args:
        path: Anything statekit reads: a T5X run or step folder, a torch file, a statekit folder; or a `CheckpointRef`.
        named_parameters: `model.named_parameters()`, a dict of them, or the model.
        lr: Learning rate of every group, before parameter scale; as the checkpoint has it if None. T5X stores none.
            A group whose parameters a map multiplied by a number gets the rate that moves them as the others.
            Where the run had several optimizers, one for all, or one for each: `{"adafactor": 1e-2, "adamw": 1e-3}`.
            A scheduler goes on where the run stood with `last_epoch=optimizer.param_groups[0]["step"] - 1`.
        **options: What the files don't say, as in `statekit.open`. Beside it:
            names: Names in the checkpoint by those of `named_parameters`, or of modules among them, where they differ.
            map: From the checkpoint's model to that of another codebase, e.g. `t5x-t5:hf-t5`, or from the modules of
                one framework to another's: `flax:torch`; `names` are of its names then.
            config: What the map needs to know of the model and no checkpoint says, e.g. `{"num_heads": 12}`.
            require: The least exactness that a map may have for slots, as in `statekit.convert`.
            Any other name is a hyperparameter for every group, e.g. `clipping_threshold=None`; `step_offset="reset"`
            lets the second moment's decay start anew, as finetuning does. What can be overridden is the law that
            `statekit.dropin.overrides.overridden` states. `slot_policy`, `drop_slots_of` and `loss_scale` are as in
            `statekit.convert`, and `init_missing=["head.*"]` names parameters that begin anew, as the checkpoint lacks
            them or has them in another shape.

    Returns:
        The optimizer; a `Partition`, where the run had several. What a step needs and nobody knows doesn't stop the
        loading, but the first step.

    Raises:
        StateError: Parameters are missing, unknown, or of other shapes; or no optimizer here follows the recorded
            rule; lists every fault.
        UsageError: The checkpoint can't tell the variant; or an override that doesn't exist or can't be made.
        InexactError: A map is less exact than required; lists every parameter.
        NotFoundError: Nothing is there.
        CorruptError: What is read isn't what its manifest or a checksum says.
        FormatError: The bytes can't be trusted, or no format fits.
    """
    for rate in lr.values() if isinstance(lr, Mapping) else (lr,):
        if fault := rate_fault(rate):
            raise UsageError("The optimizer can't take this learning rate.", place="lr", found=fault)
    return resumed(FRAMEWORK, path, Model(pairs_of(named_parameters)), lr, options)


def _built(loaded: Loaded, model: Model, lr: Rate | Mapping[str, Rate]) -> torch.optim.Optimizer:
    optimizer = optimizer_for(loaded.state, model.pairs, loaded.place)
    moved = [group for group in loaded.state.optimizer.groups if group.paths]
    for group, recorded in zip(optimizer.param_groups, moved, strict=True):
        rate = rate_of(lr, recorded, loaded.state, "lr")
        if rate is not None:
            group["lr"] = rate
            group["initial_lr"] = rate.clone() if isinstance(rate, torch.Tensor) else rate
    return optimizer


def optimizer_for(
    state: TrainState, named_parameters: NamedParameters, place: object = None
) -> torch.optim.Optimizer:
    """Returns the optimizer that goes on with a state, loaded; what the state leaves unknown is missing in its groups.

    Args:
        state: The state.
        named_parameters: Parameters by the names of the state.
        place: Where the state is from, for errors.

    Raises:
        StateError: The parameters don't fit, or no optimizer here follows the rule; lists every fault.
    """
    require_resumable(state, place, HOME, MAKERS)
    state = state.per_optimizer(_rules_completed)
    groups = _grouped(state, named_parameters, place)
    saved = layout(LAYOUT).encode(state).tree["optimizer"]
    saved["param_groups"] = [group for group in saved["param_groups"] if group["params"]]
    options = [{"params": pairs, "rules": _named_rules(state, pairs)} for pairs in groups]
    optimizer = _new(state, options)
    for group, stored in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for name in load_schema(group["schema"]).hyperparameters:
            if name not in stored and name not in RATE_NAMES:
                group.pop(name, None)
    optimizer.load_state_dict(saved)
    return optimizer


def _new(state: TrainState, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Returns an optimizer for groups that is yet to be loaded."""
    kinds = [state.optimizer.kind(group) for group in state.optimizer.groups if group.paths]
    if not state.optimizer.several:
        schema, variant = state.optimizer.kinds[0]
        return OPTIMIZERS[schema](groups, variant=str(variant))
    return Partition(
        [
            {**group, "schema": schema, "variant": variant}
            for group, (schema, variant) in zip(groups, kinds, strict=True)
        ]
    )


def load_params(
    path: CheckpointRef | str | PathLike[str], model: torch.nn.Module, **options: Unpack[LoadOptions]
) -> None:
    """Copies a checkpoint's parameters into a model, by name, in place; nothing is copied unless all fit.

    Values are widened where the model's dtype is wider, never narrowed. Buffers are copied where the checkpoint has
    them.

    Args:
        path: Anything statekit reads: a T5X run or step folder, a torch file, a statekit folder; or a `CheckpointRef`.
        model: The module.
        **options: As in `load_optimizer`, without hyperparameters; `names` are of buffers too, and `require` is for
            parameters alone.

    Raises:
        StateError: Parameters are missing on either side, or of other shapes or narrower dtypes; lists every one.
        InexactError: A map is less exact than required; lists every parameter.
        NotFoundError: Nothing is there.
        CorruptError: What is read isn't what its manifest or a checksum says. Of large files that may be noticed when
            other values were copied already; then the error says so.
        FormatError: The bytes can't be trusted, or no format fits.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            "load_params needs the model.", expected="a torch.nn.Module", found=type(model).__name__
        )
    put(FRAMEWORK, path, Model(pairs_of(model), model), options, _copied_into)


def _copied_into(loaded: Loaded, model: Model) -> None:
    module = model.module
    assert module is not None  # load_params gives it
    fitted = _fitted(loaded.state, loaded.opened.makers, module, loaded.place)
    with changing("the model"):
        for target, tensor in fitted:
            copy_into(target, tensor)


def _tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns a model's parameters and buffers by name; not what else its state_dict may hold."""
    return {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}


def _target_fault(tensor: Tensor, target: torch.Tensor) -> str | None:
    """Returns why a stored tensor can't be copied into one of the model."""
    if fault := copy_fault(tensor, tuple(target.shape), dtype_of(target)):
        return fault
    return "has no storage in the model: it is on the meta device" if target.is_meta else None


def _named_alike(
    stored: Iterable[tuple[str, Tensor]], sources: Mapping[str, tuple[str, Tensor]]
) -> list[tuple[str, str]]:
    """Returns the stored tensors of which another one has the path, as faults."""
    alike = [name for name, tensor in stored if sources[path_of(name)] != (name, tensor)]
    return [("has the torch name of another parameter", name) for name in alike]


def _fitted(
    state: TrainState, makers: Sequence[str], model: torch.nn.Module, place: object
) -> list[tuple[torch.Tensor, Tensor]]:
    """Returns each tensor of a model with what is copied into it."""
    buffers: Mapping[str, Tensor] = state.extra.get(BUFFERS, {})
    stored = [*state.params.items(), *buffers.items()]
    sources = {path_of(name): (name, tensor) for name, tensor in stored}
    tensors = _tensors_of(model)
    targets = {path_of(name): tensor for name, tensor in tensors.items()}
    required = _required(tensors if buffers else dict(model.named_parameters()), model)
    covered = {id(targets[key]) for key in sources if key in targets}
    faults = _named_alike(stored, sources)
    faults += [("isn't in the checkpoint", name) for name, t in required.items() if id(t) not in covered]
    pairs = []
    into: dict[int, tuple[str, Tensor]] = {}
    for key, (name, stored_tensor) in sources.items():
        if (target := targets.get(key)) is None:
            faults.append(("isn't in the model", name))
            continue
        other, first = into.setdefault(id(target), (name, stored_tensor))
        if other != name and not same_values(first, stored_tensor):
            faults.append((f"is one tensor with {other} in the model, and has other values", name))
            continue
        tensor = as_variable(state, name, dtype_of(target), makers) if name in state.params else stored_tensor
        if fault := _target_fault(tensor, target):
            faults.append((fault, name))
        pairs.append((target, tensor))
    Faults(faults).check(
        StateError, "The checkpoint's parameters don't fit the model", place=place, remedy=_REMEDY
    )
    return pairs


def _required(tensors: Mapping[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns what a checkpoint must have of a model: an adapter's hasn't the weights that it adapts."""
    is_adapted = hasattr(model, "peft_config")
    return {name: tensor for name, tensor in tensors.items() if tensor.requires_grad or not is_adapted}


@dataclass(frozen=True)
class Model:
    """A model that goes on.

    Attributes:
        pairs: Its parameters with their names.
        module: The module, whose buffers and classes count too; None where there are parameters alone.
    """

    pairs: Sequence[tuple[str, torch.Tensor]]
    module: torch.nn.Module | None = None

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters and buffers with their names."""
        return [*self.pairs, *(self.module.named_buffers() if self.module is not None else ())]


def maps_to(call: Call, model: Model) -> tuple[StateMap, ...]:
    """Returns the maps to a model that is there: its tensors, and its modules' classes where they are known."""
    if call.map is None and not call.config:
        return ()
    native_paths = {path_of(own_name): path_of(name) for own_name, name in call.names.items()}
    classes = {} if model.module is None else _classes(model.module)
    paths = frozenset(renamed_path(path_of(own_name), native_paths) for own_name, _ in model.tensors)
    of = {renamed_path(path_of(own_name), native_paths): kind for own_name, kind in classes.items()}
    return maps_of(call.map, call.config, builds=False, model=TargetModel(paths, of))


def _classes(model: torch.nn.Module) -> dict[str, str]:
    """Returns the classes of a model's modules that are torch's, by name."""
    return {
        name: type(module).__name__
        for name, module in model.named_modules()
        if type(module).__module__.startswith("torch.nn.")
    }


def pairs_of(named_parameters: NamedParameters) -> list[tuple[str, torch.Tensor]]:
    """Returns parameters with their names.

    Raises:
        UsageError: They have none, or no values yet.
    """
    pairs: Any = named_parameters
    if isinstance(named_parameters, torch.nn.Module):
        pairs = named_parameters.named_parameters()
    elif isinstance(named_parameters, Mapping):
        pairs = named_parameters.items()
    named: list[Any] = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    if not all(map(_is_named, named)):
        raise UsageError(
            "load_optimizer needs the parameters' names.",
            expected="model.named_parameters(), or the model",
            found=type(named_parameters).__name__,
        )
    if lazy := [name for name, param in named if torch.nn.parameter.is_lazy(param)]:
        raise UsageError(
            "Parameters have no values yet.",
            place=some(lazy),
            remedy="run a batch through the model first",
        )
    return named


def _is_named(pair: Any) -> bool:
    """Tells whether something is a parameter with its name."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        return False
    return isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)


def hints_of(call: Call, model: Model, others: Collection[int] = ()) -> CheckpointRef:
    """Returns what a layout decodes by: the ref, and the parameters that the caller has for the checkpoint.

    Args:
        call: What the caller says.
        model: The caller's parameters. Those that need no gradient count only if they are named or among the others.
        others: Identities of parameters that an optimizer has, trained or not.
    """
    if maps_to(call, model):
        return call.ref  # the checkpoint has other parameters
    native_names = {path_of(own_name): name for own_name, name in call.names.items()}
    modules = {own_name: path_of(name) for own_name, name in native_names.items()}

    def there(name: str) -> str:
        path = path_of(name)
        around = renamed_path(path, modules)
        return native_names.get(path, name if around == path else around.replace("/", "."))

    trained: dict[str, Tensor] = {
        name: Stored(tuple(param.shape), dtype_of(param), _no_values(name), name, "the model")
        for name, param in ((there(n), p) for n, p in model.pairs)
        if param.requires_grad or id(param) in others or name in (call.ref.param_names or ())
    }
    return Hints.of_model(call.ref, trained)


def _names(opened: OpenState, call: Call, model: Model) -> tuple[Mapping[str, str], list[str]]:
    """Returns a checkpoint's names by the model's, where they differ, and all names of the model."""
    names = [name for name, _ in model.tensors]
    return call.names or ({} if maps_to(call, model) else saved_under(opened, names)), names


def _shapes(model: Model, names: Mapping[str, str]) -> dict[str, tuple[Shape, DType]]:
    return {name: (tuple(param.shape), dtype_of(param)) for name, param in model.pairs if param.requires_grad}


FRAMEWORK = Framework(
    HOME, MAKERS, "lr", "torch", hints=hints_of, maps=maps_to, names=_names, shapes=_shapes, build=_built
)


def _no_values(name: str) -> Callable[[object], Array]:
    def fetch(index: object) -> Array:
        raise StateError(
            "The checkpoint holds an optimizer's state, but no weights.",
            place=name,
            remedy="load the weights from where they were saved",
        )

    return fetch


def _grouped(
    state: TrainState, named_parameters: NamedParameters, place: object
) -> list[list[tuple[str, torch.Tensor]]]:
    """Sorts a model's parameters into the groups of a state, in the state's order."""
    pairs = pairs_of(named_parameters)
    given = {path_of(name): param for name, param in pairs}
    given_params = {path_of(n): Given(n, tuple(p.shape), p.requires_grad) for n, p in pairs}
    # What the run's optimizer didn't move stands beside its parameters, and stays as it is.
    buffers: Mapping[str, Any] = state.extra.get(BUFFERS) or {}
    weights = {**{name: leaf for name, leaf in buffers.items() if isinstance(leaf, Tensor)}, **state.params}
    stored = {path_of(path): tensor.shape for path, tensor in weights.items()}
    moved = [path_of(path) for path in state.optimizer.paths]
    faults = [
        ("stands twice among the parameters", n)
        for n, p in pairs
        if given_params[path_of(n)].name != n or given[path_of(n)] is not p
    ]
    faults += match_faults(stored, moved, given_params, "parameters")
    Faults(faults).check(StateError, "The checkpoint doesn't fit the parameters", place=place, remedy=_REMEDY)
    return [
        [(given_params[path_of(p)].name, given[path_of(p)]) for p in group.paths]
        for group in state.optimizer.groups
        if group.paths
    ]


def _named_rules(state: TrainState, pairs: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    rules = {path_of(path): rule.to_json() for path, rule in state.rules.items()}
    return {name: rules[path_of(name)] for name, _ in pairs if path_of(name) in rules}


def _rules_completed(state: TrainState) -> TrainState:
    """Returns a state in which every moved parameter has a rule; one that nobody knows is assumed to be NONE."""
    if "v_row" not in load_schema(state.optimizer.schema).slots:
        return state
    moved = list(state.optimizer.paths)
    assumed = {path: Rule((Axis.NONE,) * len(state.params[path].shape), "assumed") for path in moved}
    return replace(state, rules={**assumed, **state.rules})
