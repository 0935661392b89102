"""Container `easylm`: the streams that EasyLM and EasyDeL save a run in, one msgpack record for each leaf.

It reads them; statekit writes none. Input: a file, called `streaming_train_state_<step>` or `streaming_params_<step>`:

    [[params, params, dense, kernel], bytes]      keys, and what flax.serialization.to_bytes made of the leaf
    [[opt_state, 1, 0, count], bytes]

Output: the tree. States that hold nothing were left out, with their indices; floats were rounded to bfloat16 unless
the program was told otherwise.
Source: young-geng/EasyLM EasyLM/checkpoint.py, `StreamingCheckpointer`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from statekit.budget import Budget
from statekit.conversion.contracts import Evidence, ReadOnly
from statekit.converters.containers.flax_msgpack import with_tensors
from statekit.converters.containers.step_folders import check_step
from statekit.converters.formats.msgpack.reader import parse_stream
from statekit.errors import FormatError, StatekitError
from statekit.files.checkpoint import EMPTY_LEFT_OUT, SEQUENCES_AS_MAPS, Checkpoint, Finding
from statekit.files.source import first_bytes, opening
from statekit.files.tree import Place
from statekit.tensors.tree import Path as Keys
from statekit.tensors.tree import Tree, nested

_BEGINS = re.compile(rb"\x92[\x91-\x9f](?:[\xa1-\xbf]|\xd9.)[A-Za-z_]", re.DOTALL)
"""A record of two, whose first is an array of keys, whose first is a name."""
_NUMBERED = re.compile(r"_(\d+)$")


@dataclass(frozen=True)
class EasyLM(ReadOnly):
    """Streams of msgpack records."""

    name: str = "easylm"
    title: str = "EasyLM and EasyDeL: streaming_train_state, a msgpack record for each leaf"

    def detect(self, path: Place) -> Evidence | None:
        try:
            fits = not path.is_dir() and _BEGINS.match(first_bytes(path, 16)) is not None
        except (OSError, StatekitError):
            return None
        return Evidence(10, "it begins with the msgpack record of a leaf: its keys") if fits else None

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Parses the records, skipping the values of arrays."""
        numbered = _NUMBERED.search(path.name)
        number = int(numbered[1]) if numbered else None
        check_step(step, number, path)
        with opening(path, budget) as files:
            source = files.source(path)
            leaves: dict[Keys, Tree] = {}
            for keys, leaf in parse_stream(source):
                if keys in leaves:
                    raise FormatError(
                        "A stream has two records in one place.", place=path, found="/".join(map(str, keys))
                    )
                leaves[keys] = with_tensors(leaf, keys, source.place)
            if not leaves:
                raise FormatError("A stream has no records.", place=path, expected="a record for each leaf")
            meta = {"generation": "msgpack stream", SEQUENCES_AS_MAPS: True, EMPTY_LEFT_OUT: True}
            checkpoint = Checkpoint(self.name, path, nested(leaves), meta, number, on_close=files.close)
            return replace(checkpoint, findings=_rounded(checkpoint))


def _rounded(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Returns the finding that a stream's floats are rounded, parameters as well as slots.

    Source: young-geng/EasyLM EasyLM/checkpoint.py, `StreamingCheckpointer.__init__`: float_dtype is bf16.
    """
    tensors = checkpoint.tensors.items()
    names = [name for name, tensor in tensors if tensor.dtype.name == "bfloat16"]
    if not names or any(tensor.dtype.name == "float32" for _, tensor in tensors):
        return ()
    note = "all floats, parameters too, are bfloat16, to which EasyLM rounds them unless float_dtype says otherwise"
    return (Finding(note, names[0], kind="slots-narrow"),)


CONTAINER = EasyLM()
