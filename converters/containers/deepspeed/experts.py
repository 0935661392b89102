"""Experts that ranks hold apart: their weights by file, and what ZeRO cut of them over fewer ranks.

Input: the files of a run's experts, and what each rank keeps of the optimizer. Output: weights and slots by the names
that experts have in the whole model. A rank numbers its own experts from 0, and a file's name has an expert's number in
the whole model. Ranks that hold the same experts share their slots, so a group of experts has fewer parts than ranks.

    layer_<l>_expert_<e>_mp_rank_00_model_states.pt     the weights of one expert of the l-th layer of experts
    expp_rank_<r>_mp_rank_00_optim_states.pt            without ZeRO: the optimizer of a rank with its experts

Source: deepspeedai/DeepSpeed deepspeed/runtime/engine.py, `_save_moe_checkpoint`; deepspeed/utils/groups.py,
`_create_expert_and_data_parallel`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from statekit.converters.containers.deepspeed.files import ExpertFiles
from statekit.converters.containers.deepspeed.zero import Part, Shapes, joined
from statekit.errors import CorruptError, FormatError, RefusedError, some
from statekit.tensors.tensor import Tensor

_NAME = re.compile(r"(.*\.deepspeed_experts\.)(\d{1,6})(\..*)")
_DATA_FIRST = "use_data_before_expert_parallelism"
"""Configuration: ranks that hold the same experts follow one another, instead of those that hold different ones."""
_COUNTS = "num_experts"
_AUTOMATIC = "ds_autoep_layers"


@dataclass(frozen=True)
class Spread:
    """How groups of parameters are spread over ranks.

    Attributes:
        shapes: The parameters of each group, by the names that one rank gives them.
        holders: For each group, the ranks that share its slots: one list for each rank that has other experts.
        experts: How many experts a rank has of a layer, by how the layer's names begin.
    """

    shapes: Shapes
    holders: Sequence[Sequence[Sequence[int]]]
    experts: Mapping[str, int]

    @property
    def whole(self) -> Shapes:
        """The parameters of each group, by their names in the whole model, layer by layer."""
        groups = []
        for group, holders in zip(self.shapes, self.holders, strict=True):
            names = dict[str, tuple[int, ...]]()
            for _, of_layer in groupby(group.items(), lambda item: _layer_of(item[0])):
                layer = dict(of_layer)
                for rank in range(len(holders)):
                    names |= {self._global_name(name, rank): shape for name, shape in layer.items()}
            groups.append(names)
        return groups

    def joined(self, parts: Sequence[Part], stage: int) -> dict[str, dict[str, Any]]:
        """Returns the optimizer's state by the parameter's name in the whole model.

        Raises:
            CorruptError: What ranks hold doesn't make up the parameters.
        """
        state = dict[str, dict[str, Any]]()
        for number, holders in enumerate(self.holders):
            for rank, sharers in enumerate(holders):
                slots = joined([parts[i] for i in sharers], self.shapes, stage, number)
                state |= {self._global_name(name, rank): of_param for name, of_param in slots.items()}
        return state

    def _global_name(self, name: str, rank: int) -> str:
        """Returns the name that an expert of a rank has in the whole model."""
        match = _NAME.fullmatch(name)
        if match is None:
            return name
        return f"{match[1]}{rank * self.experts[match[1]] + int(match[2])}{match[3]}"


def spread(shapes: Shapes, counts: Any, ranks: int, config: Any, place: str) -> Spread:
    """Returns how groups are spread over ranks.

    Args:
        shapes: The parameters of each group, by the names that one rank gives them.
        counts: Over how many ranks each group is cut (`partition_count`).
        ranks: How many there are.
        config: The run's configuration.
        place: For messages.

    Raises:
        FormatError: The counts don't divide the ranks.
    """
    if not isinstance(counts, list) or len(counts) != len(shapes) or any(_is_odd(n, ranks) for n in counts):
        raise FormatError(
            "Groups of experts are cut over a number of ranks that doesn't divide all.",
            place=place,
            expected=f"for each of {len(shapes)} groups a divisor of {ranks}",
            found=str(counts)[:80],
        )
    follow = isinstance(config, Mapping) and config.get(_DATA_FIRST) is True
    holders = [
        [
            [*range(i * n, (i + 1) * n)] if follow else [*range(i, ranks, ranks // n)]
            for i in range(ranks // n)
        ]
        for n in counts
    ]
    matches = [match for group in shapes for name in group if (match := _NAME.fullmatch(name))]
    numbers = {(match[1], match[2]) for match in matches}
    return Spread(shapes, holders, Counter(layer for layer, _ in numbers))


def check_experts(experts: ExpertFiles, model: Mapping[str, Any], place: str) -> None:
    """Refuses experts that aren't joined, and a folder that lacks some.

    Args:
        experts: Their files.
        model: What the model's file holds.
        place: The checkpoint, for messages.

    Raises:
        RefusedError: DeepSpeed made the experts of a model's own.
        CorruptError: An expert's file is missing.
    """
    if model.get(_AUTOMATIC):
        raise RefusedError(
            "DeepSpeed made the experts of this run by itself (AutoEP), and statekit doesn't join those.",
            place=place,
            expected="layers of deepspeed.moe.layer.MoE",
            found=_AUTOMATIC,
            remedy="save the run without expert parallelism (ep_size 1)",
        )
    counts = model.get(_COUNTS)
    for layer, count in enumerate(counts if isinstance(counts, list) else ()):
        numbers = {expert for of_layer, expert in experts.weights if of_layer == layer}
        if type(count) is int and (len(numbers) != count or max(numbers, default=0) >= max(count, 1)):
            raise CorruptError(
                "A DeepSpeed checkpoint lacks files of experts.",
                place=place,
                expected=f"{count} experts of layer {layer}",
                found=f"the files of {len(numbers)}",
                remedy="copy what every machine of the run wrote into one folder",
            )


def check_names(expert: int, weights: Mapping[str, Tensor], place: object) -> None:
    """Refuses an expert's weights in another's file: the file's number tells whose slots are theirs.

    Raises:
        CorruptError: A name has another number than its file.
    """
    others = [name for name in weights if (match := _NAME.fullmatch(name)) and int(match[2]) != expert]
    if others:
        raise CorruptError(
            "A file of an expert holds another's weights.", place=place, expected=expert, found=some(others)
        )


def is_of_expert(name: object) -> bool:
    """Tells whether a name is of one of DeepSpeed's experts; a foreign tree may have names that are no text."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def own_experts(
    weights: Mapping[tuple[int, int], Mapping[str, Tensor]], rank: int, ranks: int, place: str
) -> dict[str, Tensor]:
    """Returns the weights of a rank's experts in the order in which its optimizer has them, layer by layer.

    Raises:
        FormatError: A layer's experts don't divide among the ranks.
    """
    module = dict[str, Tensor]()
    for layer in sorted({layer for layer, _ in weights}):
        experts = sorted(expert for of_layer, expert in weights if of_layer == layer)
        if len(experts) % ranks:
            raise FormatError(
                "A layer's experts don't divide among the ranks.",
                place=place,
                expected=f"a multiple of {ranks} in layer {layer}",
                found=len(experts),
            )
        count = len(experts) // ranks
        for expert in experts[rank * count : (rank + 1) * count]:
            module |= weights[layer, expert]
    return module


def _is_odd(count: Any, ranks: int) -> bool:
    return type(count) is not int or count < 1 or ranks % count != 0


def _layer_of(name: str) -> str | None:
    match = _NAME.fullmatch(name)
    return match and match[1]
