"""The layouts of MXNet's optimizers: LANS, LAMB and Adam as a Trainer and an Updater save them.

    mxnet-lans  mxnet-lamb  mxnet-adam

The state of an index is (mean, var), beside the float32 weight where a float16 parameter has one. The optimizer stands
beside the states with all its attributes, unless only states were saved: then nothing tells whose they are, nor how
many updates there were. Multipliers of a Trainer's parameters are in no file.

Source: apache/mxnet, python/mxnet/optimizer/{lans,lamb,adam}.py, `create_state`; optimizer.py,
`create_state_multi_precision`, `__getstate__`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from statekit.conversion.contracts import Encoded, Evidence, Hints
from statekit.converters.layouts.dropped import unplaced
from statekit.converters.layouts.mxnet.decode import Reading
from statekit.converters.layouts.mxnet.encode import Writing
from statekit.converters.layouts.mxnet.kinds import HOME, Kind, parts
from statekit.errors import InexactError, StateError, fault_list
from statekit.files.checkpoint import Checkpoint
from statekit.state.train_state import TrainState

_SHOWN = 20


@dataclass(frozen=True)
class MXNetOptim:
    """One optimizer of MXNet.

    Attributes:
        name: The name for `--layout`.
        title: One line for people.
        kind: The optimizer.
    """

    name: str
    title: str
    kind: Kind
    containers: tuple[str, ...] = ("mxnet",)

    @property
    def variants(self) -> Mapping[str, tuple[str, ...]]:
        """The schema's variants that it may be."""
        return {self.kind.schema: self.kind.makers}

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks at the optimizer's class; states alone may be any optimizer's that keeps a mean and a variance."""
        tree = checkpoint.tree
        if not isinstance(tree, Mapping) or "states" not in tree or checkpoint.container != "mxnet":
            return None
        optimizer = tree.get("optimizer")
        if optimizer is None:
            fits = tree["states"] and all(parts(own) is not None for own in tree["states"].values())
            return Evidence(15, "pairs of states, and no optimizer that says whose") if fits else None
        is_own = optimizer.name.startswith("mxnet.") and _last(optimizer.name) == _last(self.kind.cls)
        return Evidence(20, f"an optimizer of {optimizer.name}") if is_own else None

    def decode(self, checkpoint: Checkpoint, hints: Hints) -> TrainState:
        """Returns the canonical state.

        Of states alone, the hint `begin_num_update` says how many updates there were.

        Raises:
            StateError: Nothing tells which parameters are meant, or shapes break the layout; lists every fault.
            UsageError: A hint that the schema doesn't know.
        """
        tree = checkpoint.tree
        if not isinstance(tree, Mapping) or not tree.get("params") or "states" not in tree:
            raise StateError(
                "MXNet's parameters or states lie alone: only both are the state of a run.",
                place=checkpoint.path,
                expected=".params and .states of the same step in one folder",
            )
        return Reading(self.kind, checkpoint, hints).state()

    def encode(self, state: TrainState) -> Encoded:
        """Returns the tree of both files.

        Raises:
            InexactError: The layout can't hold the state; lists every reason.
        """
        if state.optimizer.schema != self.kind.schema:
            raise InexactError(
                f"The layout {self.name} holds the state of {self.kind.schema} only.",
                expected=self.kind.schema,
                found=state.optimizer.schema,
            )
        writing = Writing(self.kind, state)
        tree = writing.tree()
        if writing.faults:
            raise InexactError(
                f"{self.title} can't hold the state: {len(writing.faults)} faults.",
                found=fault_list(writing.faults[:_SHOWN]),
            )
        return Encoded(tree, state.counts.updates, dropped=unplaced(state.extra, (HOME,), "MXNet"))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


_MOMENTS = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-06}
_BOUNDS = {"lower_bound": None, "upper_bound": None}


LANS = MXNetOptim("mxnet-lans", "MXNet's LANS", Kind(
    "lans", "mxnet.optimizer.lans.LANS", {**_MOMENTS, **_BOUNDS}, ("mxnet_fused", "mxnet_gpu"), "mxnet_unfused",
    "wd",
))  # fmt: skip
LAMB = MXNetOptim("mxnet-lamb", "MXNet's LAMB", Kind(
    "lamb", "mxnet.optimizer.lamb.LAMB", {**_MOMENTS, **_BOUNDS, "bias_correction": True},
    ("mxnet_fused", "mxnet_fused"), "mxnet_unfused",
))  # fmt: skip
ADAM = MXNetOptim("mxnet-adam", "MXNet's Adam", Kind(
    "adamw", "mxnet.optimizer.adam.Adam", {"lazy_update": False, **_MOMENTS, "epsilon": 1e-08},
    ("mxnet_fused", "mxnet_fused"), "mxnet_unfused", dtypes=("float32", "float16", "float64"),
))  # fmt: skip
