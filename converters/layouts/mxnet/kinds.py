"""What MXNet's optimizers have in common: how an index's state is made up, and how parameters are called.

Source: apache/mxnet, python/mxnet/optimizer/optimizer.py, `create_state_multi_precision`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from statekit.tensors.tensor import Tensor

HOME = "mxnet"
"""Key in `extra`: what MXNet's files hold besides."""
FIRST_RELEASE = "mxnet.optimizer.optimizer."
"""Where MXNet 1 has the classes of its optimizers."""
COUNT = "begin_num_update"
_PREFIXES = ("arg:", "aux:")
_GPU = 2


@dataclass(frozen=True)
class Kind:
    """One optimizer.

    Attributes:
        schema: Its schema.
        cls: Its class.
        own: Attributes that only this optimizer has, in their order.
        fused: The variant of the fused kernels, on CPU and on GPU.
        unfused: The variant of the path in Python.
        decay: What the schema calls the rate of weight decay.
        dtypes: Of parameters that move without a master.
    """

    schema: str
    cls: str
    own: Mapping[str, Any]
    fused: tuple[str, str]
    unfused: str
    decay: str = "weight_decay_rate"
    dtypes: tuple[str, ...] = ("float32",)

    @property
    def makers(self) -> tuple[str, ...]:
        """The variants that it may be, the usual one first."""
        return tuple(dict.fromkeys((self.fused[0], self.unfused, self.fused[1])))

    def variant_of(self, attributes: Mapping[str, Any], device: int) -> str | None:
        """Returns the variant that a pickled optimizer was; None if it doesn't say."""
        is_fused = attributes.get("use_fused_step")
        if not isinstance(is_fused, bool):
            return None
        return self.fused[device == _GPU] if is_fused else self.unfused


def parts(own: Any) -> dict[str, Tensor] | None:
    """Returns the state of an index by canonical slot; None if it isn't (mean, var) or that beside a weight."""
    if not isinstance(own, (list, tuple)) or len(own) != 2:
        return None
    first, rest = own
    if isinstance(rest, (list, tuple)) and len(rest) == 2:
        found = {"master": first, "m": rest[0], "v": rest[1]}
    else:
        found = {"m": first, "v": rest}
    return found if all(isinstance(part, Tensor) for part in found.values()) else None


def usual_index(names: Mapping[str, str]) -> dict[str, Any]:
    """Returns path -> index as a Trainer of all parameters numbers them."""
    return {path: i for i, path in enumerate(sorted(names, key=lambda path: bare(names[path])))}


def bare(name: str) -> str:
    """Returns a name without what a Module puts before it."""
    return name[len(_PREFIXES[0]) :] if name.startswith(_PREFIXES) else name


def path_of(name: str) -> str:
    """Returns the path of a parameter's name."""
    return name.replace(".", "/")


def name_of(path: str) -> str:
    """Returns the name that Gluon gives the parameter of a path."""
    return path.replace("/", ".")
