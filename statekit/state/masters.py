"""Masters: float32 copies of parameters of lower precision. An optimizer moves them; the parameter is their rounding.

Canonically both are kept, the copy as slot `master`. Where only one has a place, it is the master, written as the
parameter: the run goes on exactly, and the parameter of lower precision follows from it. That it does is proven for
every value when it is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from statekit.errors import InexactError
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array, Cast, DType, Index, Shape, Tensor

MASTER = "master"
"""The slot."""


@dataclass(frozen=True)
class Proven:
    """A master whose rounding is the parameter.

    Raises:
        InexactError: When read, it turns out not to be: both are needed.
    """

    master: Tensor
    param: Tensor
    path: str

    @property
    def shape(self) -> Shape:
        """The shape."""
        return self.master.shape

    @property
    def dtype(self) -> DType:
        """The master's dtype."""
        return self.master.dtype

    @property
    def grain(self) -> Shape:
        """The master's cheapest block."""
        return self.master.grain

    def read(self, index: Index | None = None) -> Array:
        """Reads a block of both, and compares them."""
        block, low = self.master.read(index), self.param.read(index)
        with np.errstate(over="ignore"):  # what lies beyond the range is infinite in both
            rounded = block.astype(low.dtype)
        if not np.array_equal(rounded.astype(np.float32), low.astype(np.float32), equal_nan=True):
            raise InexactError(
                f"A parameter of {low.dtype} isn't the rounding of its master, and the target has no place for both.",
                place=self.path,
                expected="equal values",
                found=f"{np.count_nonzero(rounded != low)} others among {low.size}",
                remedy="keep both: --to statekit",
            )
        return block

    def to_json(self) -> dict[str, Any]:
        """Describes the tensor."""
        return {"op": "proven", "source": self.master.to_json(), "rounds_to": self.param.to_json()}


def as_params(state: TrainState) -> tuple[TrainState, dict[str, str]]:
    """Returns a state whose masters are its parameters, and what that leaves behind, with the reason.

    A state of a variant that has masters of its own, or may, stays as it is.
    """
    slot = load_schema(state.optimizer.schema).slots.get(MASTER)
    masters = {path: own[MASTER] for path, own in state.slots.items() if MASTER in own}
    keepers = slot.aliases if slot else {}
    if not masters or (keepers and state.optimizer.variant in (None, *keepers)):
        return state, {}
    params = {path: _proven(masters, path, tensor) for path, tensor in state.params.items()}
    slots = {
        path: {name: tensor for name, tensor in own.items() if name != MASTER}
        for path, own in state.slots.items()
    }
    left = {
        f"low_precision/{path}": f"its master, rounded to {state.params[path].dtype}; the master is the parameter"
        for path in masters
    }
    return replace(state, params=params, slots=slots), left


def _proven(masters: dict[str, Tensor], path: str, param: Tensor) -> Tensor:
    master = masters.get(path)
    if master is None:
        return param
    derived = isinstance(param, Cast) and param.source is master
    return master if derived else Proven(master, param, path)
