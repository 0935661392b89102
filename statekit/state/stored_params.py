"""Parameters that are stored otherwise than they are moved: with masters beside them, or encoded.

Masters are float32 copies of parameters of lower precision. An optimizer moves them; the parameter is their rounding.

Canonically both are kept, the copy as slot `master`. Where only one has a place, it is the master, written as the
parameter: the run goes on exactly, and the parameter of lower precision follows from it. That it does is proven for
every value when it is read.

From release 1.6.0 on Tensor2Tensor keeps a bfloat16 variable as sign(w) (128 |w|)^8; its graph decodes it wherever the
model reads it. No other system does, so a parameter is decoded where it leaves Tensor2Tensor, and encoded where it
comes in. The float32 that a decoded one is held in rounds back to the same bits.

Source: tensorflow/tensor2tensor, utils/quantization.py, `EighthPowerEncoding`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from statekit.errors import CorruptError, Faults, InexactError
from statekit.state.schema import load_schema
from statekit.state.train_state import Group, TrainState
from statekit.tensors.distance import Distance, distance
from statekit.tensors.tensor import DTYPES, Array, Cast, DType, Index, Shape, Tensor, dtype_name, parts_of
from statekit.tensors.views import EighthPower, EighthRoot

MASTER = "master"
"""The slot."""
_SHOWN = 20
_STALE = "Parameters aren't the rounding of their masters: the next update writes the masters over them."
_ROUNDS = "a master that rounds to its parameter"
_REFRESH = (
    "refresh the masters from the weights, or the weights from the masters, in the program that saved them; "
    "--accept-damaged takes both as they are"
)


@dataclass(frozen=True)
class Proven:
    """A master whose rounding is the parameter: reading it compares both.

    Attributes:
        master: The master.
        param: The parameter.
        path: The parameter's path.
        defect: What it means that they differ; "" where both are right, and the target has no place for both.

    Raises:
        CorruptError: They have different shapes.
        InexactError, CorruptError: When read, it turns out not to be; the second where that is a defect.
    """

    master: Tensor
    param: Tensor
    path: str
    defect: str = ""

    def __post_init__(self) -> None:
        if self.master.shape != self.param.shape:
            raise CorruptError(
                "A master has another shape than its parameter.",
                place=self.path,
                expected=self.param.shape,
                found=self.master.shape,
            )

    @property
    def shape(self) -> Shape:
        return self.master.shape

    @property
    def dtype(self) -> DType:
        """The master's dtype."""
        return self.master.dtype

    @property
    def grain(self) -> Shape:
        """The master's cheapest block."""
        return self.master.grain

    @property
    def is_made_of_master(self) -> bool:
        """Whether the checkpoint has the master alone, so that the parameter is its rounding."""
        return isinstance(self.param, Cast) and self.param.source is self.master

    def read(self, index: Index | None = None) -> Array:
        """Reads a block of both, and compares them, unless the parameter is made of the master."""
        if self.is_made_of_master:
            return self.master.read(index)
        block, low = self.master.read(index), self.param.read(index)
        with np.errstate(over="ignore"):  # what lies beyond the range is infinite in both
            rounded = block.astype(low.dtype)
        if not np.array_equal(rounded.astype(np.float32), low.astype(np.float32), equal_nan=True):
            others = f"{np.count_nonzero(rounded != low)} others among {low.size}"
            if self.defect:
                raise CorruptError(
                    _STALE, place=self.path, expected=_ROUNDS, found=others, remedy=self.defect
                )
            raise InexactError(
                f"A parameter of {low.dtype} isn't the rounding of its master, and the target has no place for both.",
                place=self.path,
                expected="equal values",
                found=others,
                remedy="keep both: --to statekit",
            )
        return block

    def to_json(self) -> dict[str, Any]:
        """Describes the tensor; one that is proven for its own sake is its master's."""
        if self.defect or self.is_made_of_master:
            return self.master.to_json()
        return {"op": "proven", "source": self.master.to_json(), "rounds_to": self.param.to_json()}


def stale_masters(state: TrainState) -> Iterator[tuple[str, Distance]]:
    """Yields the parameters that aren't the rounding of their masters, and how far they are; reads both."""
    for path, slots in state.slots.items():
        master, param = slots.get(MASTER), state.params[path]
        if master is None or parts_of(param) is not None or master.shape != param.shape:
            continue
        apart = distance(Cast(master, param.dtype), param)
        if apart.unequal:
            yield path, apart


def check_masters(state: TrainState, place: object) -> None:
    """Refuses parameters that aren't the rounding of their masters: the next update writes other weights.

    Raises:
        CorruptError: Lists them.
    """
    faults = Faults((f"{apart}", path) for path, apart in stale_masters(state))
    faults.check(CorruptError, _STALE, place=place, expected=_ROUNDS, remedy=_REFRESH)


def as_params(state: TrainState) -> tuple[TrainState, dict[str, str]]:
    """Returns a state whose masters are its parameters, and what that leaves behind, with the reason.

    A state of a variant that has masters of its own, or may, stays as it is.
    """
    parts = [_as_params(part) for part in state.parts()]
    return state.of_parts([part for part, _ in parts]), {
        k: why for _, left in parts for k, why in left.items()
    }


def _as_params(state: TrainState) -> tuple[TrainState, dict[str, str]]:
    slot = load_schema(state.optimizer.schema).slots.get(MASTER)
    masters = {path: tensors[MASTER] for path, tensors in state.slots.items() if MASTER in tensors}
    keepers = slot.aliases if slot else {}
    if not masters or (keepers and state.optimizer.variant in (None, *keepers)):
        return state, {}
    params = {path: _proven(masters, path, tensor) for path, tensor in state.params.items()}
    slots = {
        path: {name: tensor for name, tensor in tensors.items() if name != MASTER}
        for path, tensors in state.slots.items()
    }
    left = {
        f"low_precision/{path}": f"its master, rounded to {state.params[path].dtype}; the master is the parameter"
        for path in masters
    }
    return replace(state, params=params, slots=slots), left


def _proven(masters: dict[str, Tensor], path: str, param: Tensor) -> Tensor:
    master = masters.get(path)
    return param if master is None else Proven(master, param, path)


def in_full(param: Tensor) -> Tensor:
    """Returns the float32 master of a parameter that has none yet."""
    return param if param.dtype == DTYPES["float32"] else Cast(param, DTYPES["float32"])


def is_low(param: Tensor, slots: Mapping[str, Tensor]) -> bool:
    """Tells whether a parameter of lower precision has no master beside it."""
    return MASTER not in slots and param.dtype.itemsize < DTYPES["float32"].itemsize


BEGUN_MASTER = (
    "the run goes on by a float32 master, and the source rounded each update to the parameter's own dtype"
)
"""Why a master that begins as its parameter isn't the same run to the bit."""


def said_of_masters(low: Sequence[str]) -> tuple[str, ...]:
    """Returns what is assumed of parameters of lower precision whose masters are made of them; nothing of none."""
    if not low:
        return ()
    shown = ", ".join(low[:_SHOWN]) + ", ..." * (len(low) > _SHOWN)
    return (f"The source has no float32 masters of {shown}: each begins as the parameter itself.",)


ENCODING, EIGHTH_POWER = "parameter_encoding", "eighth_power"
"""The hyperparameter that says so, and its value."""
DECODED = "decoded_parameters"
"""Key in `extra`: paths of the parameters that were encoded where the state comes from."""
_STORED = "bfloat16"


def encodes(schema: str, variant: str) -> bool:
    """Tells whether a variant stores bfloat16 parameters encoded."""
    constants = load_schema(schema).variant(variant)["constants"]
    return bool(constants.get("parameter_storage") == EIGHTH_POWER)


def as_stored(state: TrainState) -> TrainState:
    """Returns a state as its variant stores it: marks bfloat16 parameters as encoded."""
    variant = state.optimizer.variant
    if variant is None or not encodes(state.optimizer.schema, variant):
        return state
    stored = any(dtype_name(param.dtype) == _STORED for param in state.params.values())
    return _with_encoding(state, EIGHTH_POWER if stored else None)


def encoded_paths(state: TrainState) -> list[str]:
    """Returns the parameters that are encoded, moved by an optimizer or not: all bfloat16 ones of such a variant.

    A drop-in of such a variant holds them so too. Only a user can say that they aren't.
    """
    variant, groups = state.optimizer.variant, state.optimizer.groups
    denied = any(
        g.known_from.get(ENCODING) == "given" and g.hyperparameters[ENCODING] is None for g in groups
    )
    if variant is None or denied or not encodes(state.optimizer.schema, variant):
        return []
    return [path for path, param in state.params.items() if dtype_name(param.dtype) == _STORED]


def decoded(state: TrainState) -> TrainState:
    """Returns a state whose parameters hold the numbers that the model computes with, in float32."""
    paths = encoded_paths(state)
    if not paths:
        return state
    params = {path: EighthRoot(param) if path in paths else param for path, param in state.params.items()}
    return replace(_with_encoding(state, None), params=params, extra={**state.extra, DECODED: list(paths)})


def as_variable(state: TrainState, path: str, dtype: DType, makers: Iterable[str]) -> Tensor:
    """Returns a parameter as a variable of some dtype holds it: decoded, unless that is bfloat16 and encoded too.

    Of a master, a variable of the parameter's lower precision holds the parameter.

    Args:
        state: The state.
        path: The parameter.
        dtype: The variable's dtype.
        makers: The variants that may have made the state, where it doesn't say which.

    Raises:
        InexactError: Nobody said whether it is encoded.
    """
    param = state.params[path]
    if isinstance(param, Proven) and param.param.dtype == dtype:
        return param.param
    if dtype_name(param.dtype) != _STORED or dtype_name(dtype) == _STORED:
        return param
    check_known(state, makers)
    return EighthRoot(param) if any(path in encoded_paths(part) for part in state.parts()) else param


def encoded(state: TrainState) -> TrainState:
    """Encodes the parameters that the source had encoded, if the state's variant encodes."""
    variant = state.optimizer.variant
    if variant is None or not encodes(state.optimizer.schema, variant):
        return state
    before = {str(path) for path in state.extra.get(DECODED, ())}
    extra = {key: part for key, part in state.extra.items() if key != DECODED}
    return _encoded(replace(state, extra=extra), before)


def entered(state: TrainState, source: str) -> TrainState:
    """Returns a state that has just come under a variant's rule, with its bfloat16 parameters as that stores them."""
    schema, target = state.optimizer.schema, str(state.optimizer.variant)
    if not encodes(schema, target) or encodes(schema, source):
        return state
    return _encoded(
        state, {path for path, param in state.params.items() if dtype_name(param.dtype) == _STORED}
    )


def _encoded(state: TrainState, paths: Collection[str]) -> TrainState:
    if not any(path in state.params for path in paths):
        return state
    params = {path: EighthPower(param) if path in paths else param for path, param in state.params.items()}
    return replace(_with_encoding(state, EIGHTH_POWER), params=params)


def check_known(state: TrainState, makers: Iterable[str]) -> None:
    """Refuses bfloat16 parameters of an unknown variant, if some of its candidates encode them.

    Raises:
        InexactError: Some of them encode, others don't.
    """
    names = tuple(makers)
    for part in state.parts():
        _check_known(part, [name for name in names if name in load_schema(part.optimizer.schema).variants])


def _check_known(state: TrainState, makers: Sequence[str]) -> None:
    schema = state.optimizer.schema
    stored = [path for path, param in state.params.items() if dtype_name(param.dtype) == _STORED]
    if state.optimizer.variant is not None or not stored:
        return
    encoding = [maker for maker in makers if encodes(schema, maker)]
    others = [maker for maker in makers if maker not in encoding]
    if encoding and others:
        raise InexactError(
            "Nothing tells whether the bfloat16 parameters are stored plainly or encoded, (128 |w|)^8.",
            place=stored[0],
            found=f"{len(stored)} of {_STORED}, and no variant",
            expected=f"the variant that ran: {', '.join(encoding)} encodes, {', '.join(others)} doesn't",
            remedy=f"name it: --variant {encoding[0]}, or hparams={{{ENCODING!r}: {EIGHTH_POWER!r}}}",
        )


def _with_encoding(state: TrainState, value: str | None) -> TrainState:
    groups = tuple(_group(group, value) for group in state.optimizer.groups)
    return replace(state, optimizer=replace(state.optimizer, groups=groups))


def _group(group: Group, value: str | None) -> Group:
    return replace(
        group,
        hyperparameters={**group.hyperparameters, ENCODING: value},
        known_from={**group.known_from, ENCODING: "file"},
    )
