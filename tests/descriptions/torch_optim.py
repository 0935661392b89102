"""Descriptions of `torch.optim`, alone or under Trainer, Lightning, FSDP, DeepSpeed and Megatron-Core.

What counts in `meta.json`, in this order: `extra.param_groups`, the groups in the checkpoint itself (DeepSpeed), then
`hyperparameters`; `learning_rate` per step and group. PyTorch ran operation by operation, unless its kernel was fused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from descriptions.words import checkpoint_of, described, kind
from statekit.conversion.registry import container
from statekit.errors import NotFoundError
from statekit.state.constants import of_torch

KINDS = {"AdamW": ("adamw", "torch"), "Adafactor": ("adafactor", "torch"), "Muon": ("muon", "torch")}


BY_RANK = ("DeepSpeed", "FSDP1")
"""Wrappers under which an optimizer sees flat pieces of the parameters: only elementwise rules don't notice."""


def recorded_groups(folder: Path, meta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the arguments of each parameter group, and its paths as `params`."""
    extra = meta["extra"]
    path_of = {name: path for path, name in extra["fqn"].items()}
    if extra.get("param_groups"):
        for group in extra["param_groups"]:
            paths = [path_of.get(name, name.replace(".", "/")) for name in group["params"]]
            yield {**group, "params": paths}
    elif "groups" in extra:
        stored = _stored_groups(folder, meta)
        for arguments, names in zip(stored, extra["groups"], strict=True):
            yield {**arguments, "params": [path_of[name] for name in names]}
    else:
        yield {**meta["hyperparameters"], "params": list(extra["fqn"])}


def _of_its_optimizer(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's arguments, with schema and variant where it says which of several optimizers moves it."""
    if "optimizer" not in group:
        return dict(group)
    schema, variant = kind(group, KINDS)
    rest = {name: value for name, value in group.items() if name != "optimizer"}
    return {**rest, "schema": schema, "variant": variant}


def _stored_groups(folder: Path, meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the groups that a DeepSpeed checkpoint holds: `meta.json` names their parameters only."""
    with container("deepspeed").open(folder / checkpoint_of(meta["checkpoint"]["files"])) as opened:
        return [
            {key: list(value) if isinstance(value, tuple) else value for key, value in group.items()}
            for group in opened.tree["optimizer"]["param_groups"]
        ]


def describe(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of `recording.json` for a `meta.json` of PyTorch."""
    by_rank = next((name for name in BY_RANK if name in meta["optimizer"]), None)
    if by_rank and "Adafactor" in meta["optimizer"]:
        raise NotFoundError(
            "Adafactor acted on the pieces that ranks hold, which no step on whole parameters can follow.",
            expected="Adafactor on whole parameters",
            found=by_rank,
        )
    groups = [_of_its_optimizer(group) for group in recorded_groups(folder, meta)]
    has_schemas = all("schema" in group for group in groups)
    spec: dict[str, Any] = {
        **({} if has_schemas else dict(zip(("schema", "variant"), kind(meta, KINDS), strict=True))),
        "groups": groups,
        "counts": {"slots": ["step"], "dtype": "float32"},
    }
    config = meta["extra"].get("ds_config")
    if config is not None:
        stage = config["zero_optimization"]["stage"]
        spec["partitions"] = {
            "ranks": meta["extra"]["world_size"],
            "by": "parameter" if stage == 3 else "group",
        }
    path = checkpoint_of(meta["checkpoint"]["files"])
    # A fused kernel keeps everything float32 until it stores; else each operation rounds what it returns.
    fused, capturable = (all(group.get(key) for group in groups) for key in ("fused", "capturable"))
    ran = of_torch(
        "cuda" if "cuda" in meta.get("versions", {}) else "cpu", fused=fused, capturable=capturable
    )
    return described(meta, [(1, int(meta["steps"]), spec)], path, ran)
