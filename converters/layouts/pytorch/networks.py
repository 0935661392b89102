"""Several networks in one file of PyTorch, each with an optimizer: which moves which, by their names.

    {netG, netD, optimizerG, optimizerD}                       the optimizer of the same words
    {actor: {model, optimizer}, critic: {model, optimizer}}    the optimizer of the same branch

A word may be cut short, as `g` for `generator`, where one name alone begins so. Where names pair nothing,
`--model-key` and `--optimizer-key` name both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from statekit.errors import StateError, UsageError
from statekit.state.run import words_of
from statekit.tensors.tree import Path


def paired(models: Mapping[Path, Any], optimizers: Mapping[Path, Any]) -> dict[Path, Path]:
    """Returns the path of the optimizer of each network that has one by its name.

    Example:
        >>> paired(dict.fromkeys([("netG",), ("netD",)]), dict.fromkeys([("optG",), ("optD",)]))
        {('netG',): ('optG',), ('netD',): ('optD',)}
    """
    if len(optimizers) < 2:
        return {}
    pairs: dict[Path, Path] = {}
    for optimizer in optimizers:
        fits = [model for model in models if words_of(model) == words_of(optimizer)]
        fits = fits or [model for model in models if _begin_alike(words_of(model), words_of(optimizer))]
        if len(fits) == 1 and fits[0] not in pairs:
            pairs[fits[0]] = optimizer
    return pairs


def _begin_alike(some: tuple[str, ...], others: tuple[str, ...]) -> bool:
    pairs = list(zip(some, others, strict=False))
    return len(some) == len(others) > 0 and all(a.startswith(b) or b.startswith(a) for a, b in pairs)


def several_networks(pairs: Mapping[Path, Path], place: object) -> StateError:
    """Returns the question which of several networks is meant."""
    named = [("/".join(map(str, model)), "/".join(map(str, optimizer))) for model, optimizer in pairs.items()]
    return StateError(
        "The checkpoint has several networks, each with an optimizer.",
        place=place,
        found="; ".join(f"{model}, moved by {optimizer}" for model, optimizer in named),
        remedy=by_model_key(named[0][0]),
    )


def by_model_key(first: str) -> str:
    """Returns the remedy where several parts may be the model."""
    return f"name one: --model-key {first}, in Python model_key={first!r}"


def unpaired_network(model: str, optimizers: Iterable[Path]) -> UsageError:
    """Returns the question which of several optimizers moves what a key names."""
    named = ["/".join(map(str, path)) for path in optimizers]
    return UsageError(
        f"Nothing tells which optimizer moves {model}.",
        place="--model-key",
        expected=f"--optimizer-key too, one of {', '.join(named)}",
        remedy=f"--optimizer-key {named[0]}, in Python optimizer_key={named[0]!r}",
    )


def unpaired_networks(optimizers: Iterable[Path], models: Sequence[str], place: object) -> StateError:
    """Returns the question which of several optimizers moves which network, where names pair none."""
    named = ["/".join(map(str, path)) for path in optimizers]
    keys = f"--model-key {(*models, 'MODEL')[0]} --optimizer-key {named[0]}"
    return StateError(
        "The checkpoint has several optimizers, and nothing tells which network each moves.",
        place=place,
        found=f"optimizers at {', '.join(named)}; weights at {', '.join(models) or 'no place'}",
        remedy=f"name both: {keys}",
    )
