"""Container `pickle`: a tree of arrays that a JAX program pickled, read as data: nothing in it is run.

It reads them; statekit writes none. In goes a file of any of these, with arrays of NumPy or JAX:

    (params, opt_state)    {"params": ..., "opt_state": ...}    TrainState(step, params, opt_state)

Out comes the tree. A NamedTuple's pickle has its class and its values by position; the class tells their names.
Source: google-deepmind/optax 0.2.8, the NamedTuples of optax/; jax-ml/jax jax/_src/array.py, `_reconstruct_array`;
deepmind/dm-haiku examples, `pickle.dump(params, f)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from statekit.budget import Budget
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.containers.step_folders import check_step
from statekit.converters.formats.pickle.names import built_array
from statekit.converters.formats.pickle.reader import read_pickle
from statekit.errors import FormatError, StatekitError, UsageError
from statekit.files.checkpoint import SEQUENCES_AS_MAPS, Checkpoint
from statekit.files.source import first_bytes, opening, read_small
from statekit.files.stage import Stage
from statekit.tensors.tensor import Stored
from statekit.tensors.tree import Record, Tree

_SUFFIXES = (".pkl", ".pickle")
_FIELDS: Final[Mapping[str, str]] = {
    "AddNoiseState": "count rng_key",
    "ApplyIfFiniteState": "notfinite_count last_finite total_notfinite inner_state",
    "COCOBState": "init_particles cumulative_gradients scale subgradients reward",
    "ConditionallyMaskState": "step inner_state",
    "ConditionallyTransformState": "inner_state step",
    "DAdaptAdamWState": "exp_avg exp_avg_sq grad_sum estim_lr numerator_weighted count",
    "DoGState": "is_init_step init_params max_dist sum_sq_norm_grads",
    "DoWGState": "init_params weighted_sq_norm_grads estim_sq_dist",
    "EmaState": "count ema",
    "FactoredState": "count v_row v_col v",
    "InjectHyperparamsState": "count hyperparams inner_state",
    "InjectStatefulHyperparamsState": "count hyperparams hyperparams_states inner_state",
    "LookaheadParams": "fast slow",
    "LookaheadState": "fast_state steps_since_sync",
    "MaskedState": "inner_state",
    "MechanicState": "base_optimizer_state count r m v s x0",
    "MomoAdamState": "exp_avg exp_avg_sq barf gamma lb count",
    "MomoState": "exp_avg barf gamma lb count",
    "MultiStepsState": "mini_step gradient_step inner_opt_state acc_grads skip_state",
    "MultiTransformState": "inner_states",
    "MuonState": "count mu ns_coeffs",
    "PartitionState": "inner_states",
    "ProdigyState": "exp_avg exp_avg_sq grad_sum params0 estim_lr numerator_weighted count",
    "ReduceLROnPlateauState": "scale best_value plateau_count cooldown_count count avg_value",
    "SAMState": "steps_since_sync opt_state adv_state cache",
    "ScaleByAdaDeltaState": "e_g e_x",
    "ScaleByAdamState": "count mu nu",
    "ScaleByAdanState": "m v n g t",
    "ScaleByAdemamixState": "count count_m2 m1 m2 nu",
    "ScaleByAmsgradState": "count mu nu nu_max",
    "ScaleByBeliefState": "count mu nu",
    "ScaleByLionState": "count mu",
    "ScaleByNovogradState": "count mu nu",
    "ScaleByOptimisticGradientState": "is_initial_step previous_gradient",
    "ScaleByRStdDevState": "mu nu",
    "ScaleByRmsState": "nu",
    "ScaleByRmsWithCountState": "count nu",
    "ScaleByRpropState": "step_sizes prev_updates",
    "ScaleByRssState": "sum_of_squares",
    "ScaleBySM3State": "mu nu",
    "ScaleByScheduleState": "count",
    "ScaleBySimplifiedAdEMAMixState": "t m n",
    "ScheduleFreeState": "b1 weight_sum step_count max_lr base_optimizer_state z",
    "SophiaState": "count mu nu hessian_fn_state",
    "TraceState": "trace",
    "WrappedScheduleState": "count",
    "ZeroNansState": "found_nan",
}
"""By class of Optax, the fields of a state, in the order of its NamedTuple."""
_EMPTY: Final = ("EmptyState", "MaskedNode")


@dataclass(frozen=True)
class PickledTree:
    """Pickled trees of JAX programs."""

    name: str = "pickle"
    title: str = "pickled trees of JAX programs (params, opt_state), read as data and never run"
    suffixes: tuple[str, ...] = ()
    target_kind: Literal["file", "folder"] | None = None

    def detect(self, path: Path) -> Evidence | None:
        """Looks at the name and the first bytes."""
        try:
            fits = path.suffix in _SUFFIXES and not path.is_dir() and first_bytes(path, 1) == b"\x80"
        except (OSError, StatekitError):
            return None
        return Evidence(5, "it begins as a pickle, and is called so") if fits else None

    def open(self, path: Path, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Reads the pickle, arrays included, as data.

        Raises:
            NotFoundError: No such file, or a step is asked of it.
            RefusedError: It calls for code, or (BudgetError) is more than the job may hold.
            FormatError: It isn't a pickle of a tree.
        """
        check_step(step, None, path)
        with opening(path, budget) as files:
            data = read_small(path, files)
            pickled = read_pickle(data, str(path), calls=_calls, account=files.account)
            tree = _named(pickled.value, (), str(path))
            if not isinstance(tree, (dict, list)):
                raise FormatError(
                    "A pickle holds no tree of arrays.",
                    place=path,
                    expected="a dict, a tuple, or an object with fields",
                    found=type(pickled.value).__name__,
                )
            meta = {"generation": "pickle", SEQUENCES_AS_MAPS: True}
            return Checkpoint(self.name, path, tree, meta, None, on_close=files.close)

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Refuses: statekit writes no pickles.

        Raises:
            UsageError: Always.
        """
        raise UsageError("statekit doesn't write pickles.", place=stage.target, remedy="choose --to flax")


def _calls(_: Callable[[str], None]) -> Mapping[str, Callable[[tuple[Any, ...]], Any]]:
    """Returns the calls by which JAX pickles its arrays, as inert constructors.

    Source: jax-ml/jax jax/_src/array.py, `_reconstruct_array`; before 0.4, jax/_src/device_array.py,
    `reconstruct_device_array`.
    """
    return {
        "jax._src.array._reconstruct_array": _array,
        "jax._src.device_array.reconstruct_device_array": _array,
    }


def _array(args: tuple[Any, ...]) -> Any:
    """Returns an array from (what makes one of NumPy, its arguments, its state, what JAX knows of it)."""
    return built_array(args[2]) if len(args) > 2 else Record("jax.Array", args)


def _named(node: Tree, path: tuple[str, ...], place: str) -> Tree:
    """Returns a tree with maps in the place of objects and lists in that of tuples, its tensors with their names."""
    if isinstance(node, Stored):
        return replace(node, name="/".join(path), place=place)
    if isinstance(node, Record):
        node = _fields(node)
    if isinstance(node, Mapping):
        below = {}
        for key, child in node.items():  # a loop: a comprehension costs a second stack frame for each level
            below[key] = _named(child, (*path, str(key)), place)
        return below
    if isinstance(node, (list, tuple)):
        parts = []
        for index, child in enumerate(node):
            parts.append(_named(child, (*path, str(index)), place))
        return parts
    return node


def _fields(record: Record) -> Tree:
    """Returns what an object holds, by the names of its fields; the object itself where nobody knows them."""
    name = record.name.rpartition(".")[2]
    if name in _EMPTY:
        return {}
    names = _FIELDS.get(name, "").split()
    if names and len(record.args) == len(names):
        return dict(zip(names, record.args, strict=True))
    if not record.args and isinstance(record.state, Mapping):
        return {
            key: part for key, part in record.state.items() if not isinstance(part, Record) or _holds(part)
        }
    return record


def _holds(record: Record) -> bool:
    """Tells whether an object holds anything: a function that is named in a pickle doesn't."""
    return bool(record.args) or record.state is not None


CONTAINER = PickledTree()
