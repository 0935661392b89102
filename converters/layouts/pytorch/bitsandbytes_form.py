"""How bitsandbytes writes the state of its AdamW: codes, scales and levels beside each other, as plain tensors.

Since 0.49 the tensors of a parameter lie under `__bnb_optimizer_quant_state__`, so that FSDP doesn't gather them.
Adam and AdamW are one optimizer there: both decay the weights by themselves.

Source: bitsandbytes-foundation/bitsandbytes, bitsandbytes/optim/optimizer.py, `Optimizer8bit.state_dict`,
`Optimizer2State.init_state`; bitsandbytes/backends/cpu/ops.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from statekit.converters.layouts.pytorch.contents import WRAPPED, unwrapped_record
from statekit.converters.layouts.pytorch.low_bit import MOMENTS, Optimizer, Precision, number_of, without_off
from statekit.errors import Faults, StateError
from statekit.tensors.quantized import Quantized
from statekit.tensors.tensor import DType, Tensor

PRECISION = Precision(8, 256, only_whole_blocks=False)
_PRIVATE = {"alpha": 0.0, "t_alpha": None, "t_beta3": None}
"""Options of every group that only AdEMAMix uses."""
_BESIDE = ("unorm_vec", "gnorm_vec")
"""What LAMB and LARS keep beside their moments."""
NATIVE_SLOTS = ("state1", "state2", *_BESIDE)
"""Slots of Lion, SGD, RMSprop, Adagrad, AdEMAMix and LAMB."""
_STATES = {"1": "exp_avg", "2": "exp_avg_sq"}


@dataclass(frozen=True)
class Bitsandbytes:
    """The form of bitsandbytes."""

    keeps_decoupled: bool = True

    def precision_of(self, optimizer: Optimizer) -> Precision | str | None:
        """Returns the precision of a state_dict(): by whether a parameter has levels."""
        records = [unwrapped_record(record) for record in _records(optimizer)]
        if not any("state1" in record for record in records):
            return None
        return PRECISION if any("qmap1" in record for record in records) else "float32"

    def is_old(self, optimizer: Optimizer) -> bool:
        """Tells whether a state_dict() is from before 0.49."""
        records = _records(optimizer)
        return any("state1" in record for record in records)

    def plain(self, optimizer: Optimizer, place: object) -> Optimizer:
        """Returns a state_dict() with a quantized tensor in the place of codes, scale and levels."""
        faults = Faults()
        state = {key: self._plain_record(key, record, faults) for key, record in optimizer["state"].items()}
        if not any(map(_has_two_averages, _records(optimizer))):
            for i, group in enumerate(optimizer["param_groups"]):
                for name in _PRIVATE:
                    if group.get(name) not in (None, 0.0):
                        faults.add(f"{name} is {group[name]!r}, as AdEMAMix has it", f"param_groups/{i}")
        faults.check(StateError, "Moments in few bits can't be read", place=place)
        return {**optimizer, "state": state}

    def _plain_record(self, key: Any, record: Any, faults: Faults) -> Any:
        if not isinstance(record, Mapping):
            return record
        plain = dict(unwrapped_record(record))
        for number in _STATES:
            codes = plain.get(f"state{number}")
            parts = [plain.pop(f"{name}{number}", None) for name in ("absmax", "qmap")]
            if parts == [None, None]:
                continue
            tensors = [part for part in (codes, *parts) if isinstance(part, Tensor)]
            if len(tensors) < 3:
                faults.add(f"lacks absmax{number} or qmap{number}: not in blocks", f"state/{key}")
                continue
            codes, scale, levels = tensors
            try:
                plain[f"state{number}"] = Quantized(codes, scale, levels, codes.shape, PRECISION.block)
            except StateError as error:
                faults.add(f"state{number}: {error.line}", f"state/{key}")
        return plain

    def native(self, optimizer: Optimizer, dtypes: Mapping[Any, DType], is_old: bool) -> Optimizer:
        """Returns a state_dict() as bitsandbytes loads it."""
        state = {key: _native_record(record, is_old) for key, record in optimizer["state"].items()}
        is_adamw = any(MOMENTS["m"] in record for record in optimizer["state"].values())
        groups = [
            {**without_off(group), **_PRIVATE} if is_adamw else group for group in optimizer["param_groups"]
        ]
        return {**optimizer, "state": state, "param_groups": groups}


def _native_record(record: Mapping[str, Any], is_old: bool) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {}
    for number, name in _STATES.items():
        tensor = record.get(name, record.get(f"state{number}"))
        if tensor is None:
            continue
        if isinstance(tensor, Quantized) and tensor.levels is not None:
            tensors[f"state{number}"] = tensor.codes
            tensors[f"qmap{number}"], tensors[f"absmax{number}"] = tensor.levels, tensor.scale
        else:
            tensors[f"state{number}"] = tensor
    names = {*MOMENTS.values(), *tensors}
    tensors |= {key: record[key] for key in _BESIDE if key in record}
    rest = {key: number_of(value) for key, value in record.items() if key not in {*names, *_BESIDE}}
    return {**rest, **tensors} if is_old else {**rest, WRAPPED: tensors}


def _has_two_averages(record: Mapping[str, Any]) -> bool:
    """Tells whether a record is AdEMAMix', whose first state is two averages, one upon the other."""
    plain = unwrapped_record(record)
    first, second = plain.get("state1"), plain.get("state2")
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    return len(first.shape) == len(second.shape) + 1


def _records(optimizer: Optimizer) -> list[Mapping[str, Any]]:
    return [record for record in optimizer["state"].values() if isinstance(record, Mapping)]
