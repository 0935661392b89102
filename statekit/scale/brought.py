"""What a split read of a source in a store: a worker plans from it, and sends none of these requests again.

A count of each parameter takes a request of its own where large tensors lie between. The file has the BLAKE3 of what
follows, a line that says which run of which file each is, and the bytes of all runs. A worker takes those of the
identities that it was told by the store itself; of a torn file none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import cast

from blake3 import blake3

from statekit.files.ahead import ReadAhead
from statekit.files.tree import Place, StoredPlace
from statekit.tensors.tree import strict_json
from statekit.tensors.typed import Name, Natural, typed

MOST_BYTES = 2**25
"""Bytes that are kept at most, the smallest runs first: each saves a worker a request."""


def brought_of(place: Place) -> bytes:
    """Returns what was read so far of a checkpoint's store, as it stands in a work's folder; empty of a disk."""
    tree = _tree(place)
    if tree is None:
        return b""
    brought = tree.brought()
    ends = accumulate(len(data) for _, _, data in brought)
    runs = [run for run, end in zip(brought, ends, strict=True) if end <= MOST_BYTES]
    return packed(
        [(facts.name, facts.identity, start) for facts, start, _ in runs], [data for _, _, data in runs]
    )


def put_brought(place: Place, whole: bytes, file: Place) -> None:
    """Gives a worker's tree the bytes that a split read, if the store's facts of them are unchanged.

    Args:
        place: The source.
        whole: What `brought_of` returned.
        file: Where it stands, for messages.

    Raises:
        FormatError: The file isn't what a split writes.
    """
    tree = _tree(place)
    if tree is None:
        return
    for (name, identity, start), data in unpacked(whole, file):
        facts = tree.facts(name)
        if facts is not None and facts.identity == identity:
            tree.put(facts, start, data)


def packed(heading: Sequence[tuple[str, str, int]], runs: Sequence[bytes | memoryview]) -> bytes:
    """Returns runs of bytes as one file: its BLAKE3, a line of JSON with what each run is and its size, and the runs.

    Args:
        heading: A name, an identity and a position of each run.
        runs: The runs.
    """
    sizes = [(*fields, len(data)) for fields, data in zip(heading, runs, strict=True)]
    rest = b"".join([json.dumps(sizes).encode("ascii"), b"\n", *runs])
    return blake3(rest).hexdigest().encode("ascii") + b"\n" + rest


def unpacked(whole: bytes, file: Place) -> Iterator[tuple[tuple[str, str, int], memoryview]]:
    """Yields what `packed` was given; nothing of a torn file.

    Raises:
        FormatError: It isn't what `packed` returns.
    """
    digest, _, rest = whole.partition(b"\n")
    if blake3(rest).hexdigest().encode("ascii") != digest:
        return
    line, _, _ = rest.partition(b"\n")
    data = memoryview(rest)[len(line) + 1 :]
    for *fields, count in typed(strict_json(line, file), list[tuple[Name, str, Natural, Natural]], file):
        if len(data) < count:
            return
        yield cast(tuple[str, str, int], tuple(fields)), data[:count]
        data = data[count:]


def _tree(place: Place) -> ReadAhead | None:
    tree = place.tree if isinstance(place, StoredPlace) else None
    return tree if isinstance(tree, ReadAhead) else None
