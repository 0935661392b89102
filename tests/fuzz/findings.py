"""What the fuzzers found, as the smallest inputs that showed it; each was an exception that isn't ours, or no end."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from fuzz import documents, pickles
from fuzz.binaries import dcp_tree, npz_of, torch_files, torch_tree
from fuzz.changing import at, put
from fuzz.readers import READERS
from statekit.converters.formats.tensor_bundle.entries import field_of, header
from statekit.converters.formats.tensor_bundle.table import write_table
from statekit.tensors.tensor import in_memory
from statekit.tensors.tree import Record


def _spec(**fields: Any) -> bytes:
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": "target.x"},
        "metadata": {"shape": [2], "chunks": [2], "compressor": None},
    }
    return json.dumps({"a": {**spec, **fields}}).encode()


def _dcp(**fields: Any) -> bytes:
    tree = dcp_tree()
    path = ["state", "storage_data", "args", 0, 1, "state"]
    return pickles.pickled(put(tree, path, {**at(tree, path), **fields}))


def _typeless() -> bytes:
    """Returns the metadata of a distributed checkpoint in which a tensor's properties are empty."""
    path = ["state", "state_dict_metadata", "model.w", "state", "properties", "state"]
    return pickles.pickled(put(dcp_tree(), path, ()))


def _endless_heap() -> bytes:
    """Returns an HDF5 file in whose global heap the object that is free space has no size."""
    sample = READERS["hdf5"].samples()[0]
    at = sample.index(b"GCOL") + 16
    while int.from_bytes(sample[at : at + 2], "little"):
        at += 16 + -(-int.from_bytes(sample[at + 8 : at + 16], "little") // 8) * 8
    return bytes(sample[: at + 8] + bytes(8) + sample[at + 16 :])


def _sequence_for_text() -> bytes:
    """Returns an HDF5 file in which an attribute's texts are sequences.

    Source: HDF5 File Format Specification, IV.A.2.d: class 9, whose first bits are 1 for texts and 0 for sequences.
    """
    sample: bytes = READERS["hdf5"].samples()[0]
    text, sequence = b"\x19\x01", b"\x19\x00"
    assert text in sample
    return sample.replace(text, sequence)


def _npy(shape: str) -> bytes:
    """Returns MXNet's parameters with an array of this shape, as its header says."""
    return npz_of(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode())


def _large_zstd(header: bytes) -> bytes:
    """Returns a chunk of an array whose zstd frame says that it holds more, and needs a window of as much."""
    document, key, chunk = json.loads(READERS["zarr chunks"].samples()[1])
    frame = bytes.fromhex(chunk)
    assert document["codecs"][1]["name"] == "zstd"
    assert frame[4] == 0x20  # one segment, its size in a byte
    return json.dumps([document, key, (frame[:4] + header + frame[6:]).hex()]).encode()


def _storage_in_a_key() -> bytes:
    """Returns a torch file with a dict in which a storage is a part of a key."""
    return torch_files(pickles.pickled({(torch_tree()["loose"], 0): 1}))


def _index_of_slices(*extents: bytes) -> list[bytes]:
    """Returns indices of a tensor of shape (4,) that says of its one slice these bytes of a protocol buffer."""
    shape = field_of(2, field_of(2, field_of(1, 4)))
    entries = (field_of(1, 1) + shape + field_of(7, field_of(1, extent)) for extent in extents)
    return [write_table({b"": header(1), b"w": entry}) for entry in entries]


BYTES: dict[str, list[bytes]] = {
    "tf index": _index_of_slices(
        field_of(1, b"1") + field_of(2, 2), field_of(1, 1) + field_of(2, b"2"), field_of(2, b"")
    ),
    "torch zip": [_storage_in_a_key()],
    "mxnet params": [_npy(f"b'{'x' * 3000}'"), _npy(f"({'9, ' * 3000})")],
    "hdf5": [_endless_heap(), _sequence_for_text()],
    "array specs": [
        _spec(dtype=["<f4"]),
        _spec(dtype={}),
        _spec(metadata={"shape": [2], "chunks": 2, "dtype": "<f4", "compressor": None}),
    ],
    "gin": [b"adafactor.Adafactor.decay_rate = 0\0.8\n"],
    "dcp metadata": [
        _dcp(transform_descriptors=5),
        _dcp(offset="1"),
        _dcp(relative_path=Record("a.B")),
        _typeless(),
    ],
    "zarr": [json.dumps({**documents.ZARRAY, "chunks": [1, 1], "fill_value": 1e308}).encode()],
    "zarr chunks": [_large_zstd(b"\xa0" + b"\xff" * 4), _large_zstd(b"\xe0" + b"\xff" * 8)],
}
"""By reader."""

Path = tuple[Any, ...]
TREES: list[tuple[str, str, Path, Any]] = [
    (
        "torch_formats/adamw_legacy/checkpoint/checkpoint.pt",
        "torch-optim",
        ("optimizer", "param_groups", 0, "betas"),
        5,
    ),
    ("torch", "torch-optim", ("optimizer", "param_groups", 0, "params", 0), {}),
    ("torch", "torch-optim", ("optimizer", "param_groups", 0, "param_names"), 5),
    ("torch", "torch-optim", ("optimizer", "param_groups", 0, "lr"), 2**2000),
    ("torch", "torch-optim", ("optimizer", "state", 0, "step"), "@"),
    ("torch", "torch-optim", ("optimizer", "state", 0, "step"), b""),
    ("torch", "torch-optim", ("model",), {5: 5}),
    ("torch", "icefall", ("optimizer", "state", 0, "delta"), [1]),
    ("torch", "icefall", ("optimizer", "state", 0, "num_clipped"), "@"),
    ("torch", "icefall", ("optimizer", "param_groups", 0, "betas"), (0.9, 0.98, 0.9)),
    ("torch", "icefall", ("optimizer", "param_groups", 0, "clipping_update_period"), 0.5),
    ("torch", "statekit-torch", ("optimizer", "param_groups", 0, "schema"), {}),
    ("torch", "statekit-torch", ("optimizer", "param_groups", 0, "rules"), {"a": 5}),
    (
        "hf-trainer",
        "torch-optim",
        ("trainer_arguments",),
        {"lr_scheduler_type": "linear", "warmup_steps": (1,)},
    ),
    ("statekit", "statekit", ("state", "schema"), 5),
    ("statekit", "statekit", ("state", "groups", 0, "paths"), 5),
    ("statekit", "statekit", ("state", "counts", "updates"), "4"),
    ("t5x", "t5x", ("state", "param_states"), 5),
    ("t5x", "t5x", ("state", "step"), "4"),
    ("mxnet", "mxnet-lamb", ("params",), {"w": 5}),
    ("mxnet", "mxnet-lamb", ("states",), [1]),
    ("mxnet", "mxnet-lamb", ("files",), [1]),
    ("mxnet", "mxnet-lamb", ("optimizer",), 5),
    ("mxnet", "mxnet-lamb", ("optimizer", "state", "idx2name"), {0: []}),
    ("mxnet", "mxnet-weights", ("params",), {5: 5}),
    ("tf-bundle", "t2t", ("global_step",), {5: b""}),
    ("tf-bundle", "mesh-tf", ("global_step",), 5),
    ("keras-h5", "keras", ("vars", "@"), "text"),
    ("keras-h5", "keras", ("layers", "dense"), 5),
    ("keras-h5", "statekit-keras", ("@", "statekit_keras"), {"class": {}, "kept": 5, "variables": [[]]}),
    ("keras-h5", "keras-weights", ("@",), 5),
    ("keras", "keras", ("@", "config.json"), [5]),
    ("keras", "keras", ("@", "metadata.json"), [5]),
    ("keras", "keras", ("@", "config.json", "compile_config"), "text"),
    ("tf-bundle", "tf2-weights", ("save_counter/.ATTRIBUTES/VARIABLE_VALUE",), in_memory(np.asarray(1j))),
    (
        "tf-bundle",
        "tf2-keras2",
        ("optimizer/_learning_rate/.ATTRIBUTES/VARIABLE_VALUE",),
        in_memory(np.asarray(1j)),
    ),
    ("keras-h5", "keras", ("@", "statekit_keras"), {"kept": {"rate": True, "x": True}}),
    ("deepspeed", "deepspeed", ("model",), {"w": b""}),
    ("deepspeed", "deepspeed", ("optimizer", "param_groups", 0, "params"), [{}]),
    ("megatron", "megatron", ("sharded",), {5: 5}),
    ("megatron", "megatron", ("common", "optimizer"), {"param_groups": [5]}),
]
"""Container or name of a sample, its layout, a path in its tree, and what stood there."""

PLANS: list[tuple[str, str, tuple[Any, ...], Any]] = [
    ("statekit-torch", "statekit-jax", ("assumptions",), [[0]]),
    ("optax", "statekit-jax", ("opt_state", "1"), ({}, {})),
    ("torch-fqn-flat", "optax", ("optimizer", "state.matrix_twin.exp_avg_sq"), ...),
    ("statekit-keras", "icefall", ("optimizer", "vars", "matrix_twin:param_rms"), ...),
    ("torch-optim", "torch-optim", ("optimizers", 0, "state", 6), Record("os.system", (1,))),
    ("statekit", "optax", ("state", "counts", "schedule"), 2**31),
    (
        "torch-optim",
        "optax",
        ("optimizers", 0, "param_groups", 0, "eps", 1),
        in_memory(np.asarray(0.25, np.float32)),
    ),
    ("statekit-torch", "statekit-jax", ("optimizer", "param_groups", 0, "params"), 5),
    ("statekit", "tf2-t2t", ("state", "groups", 0, "hyperparameters", "max_parameter_scale"), float("inf")),
    ("bitsandbytes-32bit", "deepspeed", ("model",), lambda model: (model,)),
]
"""Layout of a sample, the layout that is planned, a path in its tree, and what stood there; ... for nothing.

A function makes it of what the sample has there.
"""
