"""Where a tree has its parameters, and which optimizer moves them, where it has several networks.

    {actor: {params, opt_state}, critic: {params, opt_state}}      the optimizer of the same branch
    {g_params, g_opt, d_params, d_opt}                             the optimizer of the same prefix, which is assumed

Where names pair nothing, `--model-key` and `--optimizer-key` say both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from statekit.converters.layouts.optax.kinds import IDLE, NEIGHBOURS, STRANGERS, WRAPPERS
from statekit.converters.layouts.optax.links import (
    CORE_LINKS,
    LABELLED,
    Link,
    at,
    chain_items,
    children,
    is_tensor,
    leaves,
    under,
)
from statekit.errors import StateError, UsageError
from statekit.tensors.tree import Path, Tree

Pair: TypeAlias = tuple[Path, Path]
"""Where parameters are, and where an optimizer's state is."""
_WORDS = re.compile(r"[^A-Za-z0-9]+")
_GENERIC = {
    "params", "param", "weights", "model", "net", "network", "opt", "optim", "optimizer", "state", "tx",
}  # fmt: skip
"""Words in the names of parameters and optimizers that don't say whose they are."""


@dataclass(frozen=True)
class Network:
    """Parameters, and the links that move them.

    Attributes:
        where: The path of the parameters.
        links: All links of the tree but those of other networks' optimizers.
        assumed: How their names pair both, in a sentence; "" if nothing was assumed.
    """

    where: Path
    links: list[Link]
    assumed: str = ""


def find_network(
    tree: Tree,
    all_links: list[Link],
    cores: Collection[str],
    model_key: str | None,
    optimizer_key: str | None,
    place: object,
) -> Network:
    """Returns the parameters of a tree, and what moves them.

    Args:
        tree: The tree.
        all_links: Its links.
        cores: The kinds of those whose slots are the parameters'.
        model_key: Where the user says that the parameters are, keys joined by `/`.
        optimizer_key: The same of the optimizer's state.
        place: The checkpoint.

    Raises:
        StateError: There are none, or several may be they.
        UsageError: There are none where the user says.
    """
    optimizers = _optimizers(tree, [link for link in all_links if link.kind in cores])
    if optimizer_key is None and (len(optimizers) == 1 or _is_one_network(tree, optimizers)):
        where = _only(find_params(tree, all_links, cores, model_key), "--model-key", "parameters", place)
        return Network(where, all_links)
    chosen = optimizers if optimizer_key is None else _below(optimizers, optimizer_key)
    pairs = [
        (where, top)
        for top, links in chosen.items()
        for where in (find_params if model_key is None else covering)(tree, links, cores, among=all_links)
    ]
    (where, top), assumed = _chosen(pairs, model_key, optimizer_key, place)
    elsewhere = [other for other in optimizers if other != top]
    return Network(where, [link for link in all_links if not _is_in(link.path, elsewhere)], assumed)


def _chosen(
    pairs: Sequence[Pair], model_key: str | None, optimizer_key: str | None, place: object
) -> tuple[Pair, str]:
    """Returns the parameters and the optimizer that the keys mean, or the names; and what was assumed for that."""
    if model_key is not None:
        where = _at_key([where for where, _ in pairs], model_key)
        return _paired([pair for pair in pairs if pair[0] == where], place, "--optimizer-key")
    if optimizer_key is None or not pairs:
        _only([where for where, _ in pairs], "--model-key", "parameters", place)
    return _paired(pairs, place, "--model-key")


def has_network(tree: Tree, all_links: list[Link], cores: Collection[str]) -> bool:
    """Tells whether a tree has the parameters of one of its optimizers."""
    core_links = [link for link in all_links if link.kind in cores]
    groups = [core_links, *_optimizers(tree, core_links).values()] if core_links else []
    return any(find_params(tree, links, cores, among=all_links) for links in groups)


def find_params(
    tree: Tree,
    core_links: Sequence[Link],
    cores: Collection[str] = CORE_LINKS,
    key: str | None = None,
    among: Sequence[Link] = (),
) -> list[Path]:
    """Returns where the parameters are: the node that has a tensor wherever a slot is; none if there is none.

    An average of parameters is such a node too. One that is called `params` goes before others, then the one that is
    nearest to the top and to the optimizer; several come back where that doesn't tell.

    Args:
        tree: The tree.
        core_links: Links, of which those of these kinds count.
        cores: The kinds of those whose slots are the parameters'.
        key: Where somebody says that they are, keys joined by `/`.
        among: All links of the tree; `core_links` if there are none. In a link's state are no parameters.

    Raises:
        UsageError: There is no such node at the key.
    """
    places = covering(tree, core_links, cores, among)
    if key is not None:
        return [_at_key(places, key)]
    return _likeliest(places, [link.path for link in core_links if link.kind in cores])


def _likeliest(places: Sequence[Path], tops: Sequence[Path]) -> list[Path]:
    places = [path for path in places if path[-1:] == ("params",)] or list(places)
    near = {path: max(_shared(path, top) for top in tops) for path in places}
    nearest = [path for path in places if near[path] == max(near.values())]
    highest = [path for path in places if len(path) == min(map(len, places))]
    return [path for path in highest if path in nearest] or [*highest, *nearest]


def covering(
    tree: Tree, core_links: Sequence[Link], cores: Collection[str], among: Sequence[Link] = ()
) -> list[Path]:
    """Returns every node that has a tensor wherever a slot is, from the top; arguments are those of `find_params`."""
    slots = _slots(link for link in core_links if link.kind in cores)
    inside = [link.path for link in among or core_links]
    places: list[Path] = []
    level: list[tuple[Path, Any]] = [((), tree)] if slots else []
    while level:
        places += [path for path, node in level if all(is_tensor(at(node, slot)) for slot in slots)]
        below = [((*path, name), child) for path, node in level for name, child in children(node)]
        level = [(path, node) for path, node in below if children(node) and not _is_in(path, inside)]
    return _without_fields(tree, places)


def _without_fields(tree: Tree, places: Sequence[Path]) -> list[Path]:
    """Returns places without the fields of what a link or a wrapper keeps, which may be shaped like the parameters."""
    return [path for path in places if not path or not _is_state(under(tree, path[:-1]))]


_STATES = frozenset({*WRAPPERS, *NEIGHBOURS, *STRANGERS, *IDLE})


def _is_state(node: Any) -> bool:
    """Tells whether a node is what a link or a wrapper keeps."""
    return isinstance(node, Mapping) and frozenset(map(str, node)) in _STATES


def _slots(core_links: Iterable[Link]) -> list[Path]:
    trees = (field_tree for link in core_links for _, field_tree in link.trees())
    return [path for field_tree in trees for path, leaf in leaves(field_tree) if is_tensor(leaf)]


def _is_in(path: Path, places: Sequence[Path]) -> bool:
    return any(path[: len(place)] == place for place in places)


def _optimizers(tree: Tree, core_links: Sequence[Link]) -> dict[Path, list[Link]]:
    """Returns core links by the optimizer that they are parts of, which is under a key of the program's own."""
    above = core_links[0].path[:-1] if core_links else ()
    for link in core_links:
        above = above[: _shared(above, link.path[:-1])]
    node = under(tree, above)
    of_optax = chain_items(node) is not None or above[-1:] == (LABELLED,)
    wrapped = isinstance(node, Mapping) and frozenset(map(str, node)) in WRAPPERS
    if len(core_links) < 2 or of_optax or wrapped:
        return {above: list(core_links)}
    tops: dict[Path, list[Link]] = {}
    for link in core_links:
        tops.setdefault(link.path[: len(above) + 1], []).append(link)
    return tops


def _is_one_network(tree: Tree, optimizers: Mapping[Path, Sequence[Link]]) -> bool:
    """Tells whether optimizers move different parameters of one tree."""
    all_links = [link for links in optimizers.values() for link in links]
    moved = [path for links in optimizers.values() for path in {*_slots(links)}]
    return len(moved) == len({*moved}) and bool(
        find_params(tree, all_links, {link.kind for link in all_links})
    )


def _only(places: Sequence[Path], option: str, subject: str, place: object) -> Path:
    """Returns the only place."""
    names = list(dict.fromkeys("/".join(map(str, path)) for path in places))
    if not names:
        raise StateError("There are no states of links with their parameters.", place=place)
    if len(names) > 1:
        keyword = option.strip("-").replace("-", "_")
        raise StateError(
            f"Several parts of the checkpoint may be the {subject}.",
            place=place,
            found=", ".join(names),
            remedy=f"name one: {option} {names[0]}, in Python {keyword}={names[0]!r}",
        )
    return places[0]


def _at_key(places: Sequence[Path], key: str) -> Path:
    names = {"/".join(map(str, path)): path for path in places}
    if key not in names:
        raise UsageError(
            "There are no parameters at this key.",
            place="--model-key",
            expected=", ".join(names) or "there are none",
            found=key,
        )
    return names[key]


def _below(optimizers: Mapping[Path, list[Link]], key: str) -> dict[Path, list[Link]]:
    """Returns the optimizers at a key, or below it."""
    parts = tuple(key.split("/"))
    names = {top: tuple(map(str, top)) for top in optimizers}
    chosen = {
        top: links
        for top, links in optimizers.items()
        if names[top][: len(parts)] == parts or parts[: len(top)] == names[top]
    }
    if not chosen:
        raise UsageError(
            "There is no optimizer at this key.",
            place="--optimizer-key",
            expected=", ".join("/".join(name) for name in names.values()),
            found=key,
        )
    return chosen


def _paired(pairs: Sequence[Pair], place: object, option: str) -> tuple[Pair, str]:
    """Returns the parameters and the optimizer that belong together, and what was assumed for that."""
    branches = {pair: _shared(*pair) for pair in pairs}
    nearest = [pair for pair in pairs if branches[pair] == max(branches.values())]
    if len(nearest) == 1:
        return nearest[0], ""
    words = {pair: len(_words(pair[0]) & _words(pair[1])) for pair in nearest}
    called = [pair for pair in nearest if words[pair] == max(words.values())]
    if len(called) > 1:
        by_optimizer = option == "--optimizer-key"
        tops = [top if by_optimizer else where for where, top in called]
        _only(tops, option, "optimizer's state" if by_optimizer else "parameters", place)
    where, top = ("/".join(map(str, path)) for path in called[0])
    return called[
        0
    ], f"The optimizer of {where} is taken to be {top}, by its name (--optimizer-key says otherwise)."


def _words(path: Path) -> set[str]:
    return {word.lower() for key in path for word in _WORDS.split(str(key))} - _GENERIC - {""}


def _shared(path: Path, other: Path) -> int:
    """Returns how many keys two paths begin with together."""
    pairs = enumerate(zip(path, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(path), len(other)))
