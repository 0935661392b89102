"""A checkpoint of every kind that a container reads, with what its format leaves open and what its names mean.

Whoever adds a container or a layout adds a row, and has its conformance tests. The systems' own checkpoints are
recordings; statekit's are written when they are asked for.
"""

from __future__ import annotations

import pickle
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from goldens import GOLDEN
from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import NO_HINTS, Hints
from statekit.files.stage import staged
from statekit.state.schema import WEIGHTS
from statekit.state.train_state import Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Tensor
from statekit.testing.container_trials import Sample
from statekit.testing.layouts import made_state

Write = Callable[[Path], Path]


@dataclass(frozen=True)
class Row:
    """A checkpoint.

    Attributes:
        name: Its place among the recordings, or what was written.
        sample: The checkpoint, and what its container can't notice.
        layout: Name of the layout of its names.
        hints: What the layout must be told.
        write: Writes it into a folder, if it isn't recorded.
    """

    name: str
    sample: Sample
    layout: str
    hints: CheckpointRef = NO_HINTS
    write: Write | None = None

    def sample_in(self, folder: Path) -> Sample:
        """Returns the sample, written into a folder if it must be."""
        return replace(self.sample, path=self.write(folder)) if self.write else self.sample

    @property
    def here(self) -> bool:
        """Whether it is at hand: the compact copy of the recordings lacks some."""
        return self.write is not None or (self.sample.root or self.sample.path).exists()


CASES = Path(__file__).parent / "cases"


def recorded(
    container: str,
    layout: str,
    place: str,
    within: str = "",
    *,
    unchecked: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    plain: bool = True,
    writes: Literal["same", "anew", "nothing"] = "same",
    joint: bool = False,
    hints: CheckpointRef = NO_HINTS,
) -> Row:
    """Makes a row of a place among the recordings; `within` says what in that folder is opened."""
    root = (CASES if place.startswith(("foreign/", "train/")) else GOLDEN) / place
    sample = Sample(container, root / within, root, unchecked, optional, plain, writes, joint)
    return Row(f"{place}/{within}" if within else place, sample, layout, hints)


def written(
    container: str,
    layout: str,
    schema: str,
    variant: str,
    *,
    unchecked: tuple[str, ...] = (),
    optional: tuple[str, ...] = (),
    writes: Literal["same", "anew"] = "same",
) -> Row:
    """Makes a row of a state that statekit writes."""

    sample = Sample(container, Path(), None, unchecked, optional, False, writes)
    write = state_writer(container, layout, lambda: made_state(schema, variant))
    return Row(schema, sample, layout, Hints(variant=variant), write)


def mixed_state(*kinds: tuple[str, str]) -> TrainState:
    """Makes a state of several optimizers, each of parameters of its own, below the name of its schema."""
    params: dict[str, Tensor] = {}
    slots: dict[str, Mapping[str, Tensor]] = {}
    rules: dict[str, Rule] = {}
    groups: list[Group] = []
    for schema, variant in kinds:
        one = made_state(schema, variant)
        params |= {f"{schema}/{path}": tensor for path, tensor in one.params.items()}
        slots |= {f"{schema}/{path}": tensors for path, tensors in one.slots.items()}
        rules |= {f"{schema}/{path}": rule for path, rule in one.rules.items()}
        groups += [
            replace(group, paths=tuple(f"{schema}/{path}" for path in group.paths))
            for group in one.optimizer.groups
        ]
    return TrainState(params, slots, Optimizer.of(groups, kinds), one.counts, rules)


def mixed(
    container: str,
    layout: str,
    *kinds: tuple[str, str],
    unchecked: tuple[str, ...] = (),
    writes: Literal["same", "anew"] = "same",
) -> Row:
    """Makes a row of a run with several optimizers."""
    sample = Sample(container, Path(), None, unchecked, (), False, writes)
    write = state_writer(container, layout, lambda: mixed_state(*kinds))
    return Row("+".join(schema for schema, _ in kinds), sample, layout, NO_HINTS, write)


def state_writer(container: str, layout: str, make: Callable[[], TrainState]) -> Write:
    """Returns what writes a state into a folder."""

    def write(folder: Path) -> Path:
        home = registry.container(container)
        target = folder / f"written{next(iter(home.suffixes), '')}"
        assert home.target_kind is not None
        with staged(target, home.target_kind) as stage:
            home.write(registry.layout(layout).encode(make()), stage)
            stage.commit(home.open)
        return target

    return write


def alone(
    container: str, layout: str, *, unchecked: tuple[str, ...] = (), writes: Literal["same", "anew"] = "same"
) -> Row:
    """Makes a row of weights without an optimizer."""

    def write(folder: Path) -> Path:
        home, state = registry.container(container), made_state("adamw", "torch")
        bare = TrainState(state.params, {}, Optimizer(WEIGHTS, None, ()), Counts(0, 0))
        target = folder / f"alone{next(iter(home.suffixes), '')}"
        assert home.target_kind is not None
        with staged(target, home.target_kind) as stage:
            home.write(registry.layout(layout).encode(bare), stage)
            stage.commit(home.open)
        return target

    return Row(
        "weights", Sample(container, Path(), None, unchecked, (), False, writes), layout, NO_HINTS, write
    )


def case_of(container: str, layout: str, place: str, *, unchecked: tuple[str, ...] = ()) -> Row:
    """Makes a row of a small file of the original among the tests' cases."""
    source = Path(__file__).parent / "cases" / place

    def write(folder: Path) -> Path:
        if source.is_dir():
            return Path(shutil.copytree(source, folder / source.name))
        return Path(shutil.copy(source, folder / source.name))

    sample = Sample(container, Path(), None, unchecked, (), False)
    return Row(place, sample, layout, NO_HINTS, write)


def streamed() -> Row:
    """Makes a row of EasyLM's stream: Adam with a rate that counts, in a chain of three."""

    def leaf(array: Any) -> bytes:
        if array.ndim == 0:
            return bytes([int(array)])  # flax.serialization.to_bytes of a number
        shape, dtype = bytes([0x90 + array.ndim, *array.shape]), str(array.dtype).encode()
        values: bytes = array.tobytes()
        whole = b"\x93" + shape + bytes([0xA0 + len(dtype)]) + dtype + _sized(0xC5, values)
        return b"\xc8" + struct.pack(">H", len(whole)) + b"\x01" + whole

    def write(folder: Path) -> Path:
        random = np.random.default_rng(0)
        names = ("params/params/w", "opt_state/0/mu/params/w", "opt_state/0/nu/params/w")
        tree: dict[str, Any] = {name: random.random((4, 3)).astype(np.float32) for name in names}
        tree |= {f"{name}/count": np.asarray(5, np.int32) for name in ("opt_state/0", "opt_state/2")}
        target = folder / "streaming_train_state"
        with target.open("wb") as stream:
            for name, array in tree.items():
                keys = [bytes([0xA0 + len(key)]) + key.encode() for key in name.split("/")]
                stream.write(bytes([0x92, 0x90 + len(keys)]) + b"".join(keys) + _sized(0xC5, leaf(array)))
        return target

    sample = Sample("easylm", Path(), None, ANYWHERE, (), True, "nothing")
    return Row("stream", sample, "optax", NO_HINTS, write)


def numbered(container: str) -> Row:
    """Makes a row of a tree of JAX, Adam with a constant rate: in an npz as big_vision has it, or pickled."""

    def write(folder: Path) -> Path:
        random = np.random.default_rng(0)
        params, m, v = ({"w": random.random((4, 3)).astype(np.float32)} for _ in range(3))
        count = np.asarray(5, np.int32)
        if container == "npz":
            target = folder / "checkpoint.npz"
            leaves = {"params/w": params["w"], "opt/0/0": count, "opt/0/1/w": m["w"], "opt/0/2/w": v["w"]}
            np.savez(target, **leaves)  # type: ignore[arg-type]  # the stub knows no names with slashes
            return target
        target = folder / "tree.pkl"
        target.write_bytes(pickle.dumps((params, ({"count": count, "mu": m, "nu": v}, {}))))
        return target

    unchecked = ANYWHERE if container == "pickle" else ()
    return Row(
        f"numbered {container}",
        Sample(container, Path(), None, unchecked, (), True, "nothing"),
        "optax",
        CheckpointRef(optimizer="adam"),
        write,
    )


def _sized(head: int, data: bytes) -> bytes:
    return bytes([head]) + struct.pack(">H", len(data)) + data


ANYWHERE = ("*",)
"""For formats without a checksum."""
T5X = ("checkpoint", "*/.zarray")
"""An index of msgpack and the headers of arrays have no checksum, gzip has one."""
ZARR = ("*/.zarray", "*/_METADATA", "*/[0-9]*")
"""Chunks of Orbax' own compressor have none."""
VALUES = ("*.safetensors", "*.json", "rng_state*.pth", "training_args.bin", "random_states_*.pkl")
"""Safetensors and JSON have no checksum; what can't be read without running it is kept as it is, byte for byte."""
OPTIONS = ("optimizer_hyperparameters.json",)
MXNET = ("*.params", "*.states")
"""Either may lie alone."""
TRAINER = (
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state*.pth",
    "training_args.bin",
    "*.json",
)
ACCELERATE = ("optimizer.bin", "scheduler.bin", "random_states_*.pkl")

ALL = (
    written("statekit", "statekit", "adafactor", "t5x"),
    recorded("t5x", "t5x", "t5x/momentum_f32/checkpoint/checkpoint_4", unchecked=T5X),
    recorded("t5x", "t5x", "t5x/multi_optimizer/checkpoint/checkpoint_4", unchecked=T5X),
    recorded("t5x", "t5x", "t5x_checkpoints/sharded_2x2/legacy", unchecked=ANYWHERE),
    recorded("orbax", "t5x", "t5x/momentum_f32/checkpoint_orbax/checkpoint_4", plain=False, writes="anew"),
    recorded(
        "orbax", "optax", "optax_adafactor/adafactor_orbax_v1/checkpoint/ckpt", plain=False, writes="anew"
    ),
    recorded(
        "orbax",
        "optax",
        "optax_adafactor/adamw_bf16mu_manager_multiitem/checkpoint/run",
        unchecked=("*/data_iter/metadata",),
        plain=False,
        writes="nothing",
    ),
    recorded(
        "orbax", "optax", "optax_adafactor/lamb_pytree_noocdbt/checkpoint/ckpt", unchecked=ZARR, writes="anew"
    ),
    written("orbax", "optax", "lamb", "optax", writes="anew"),
    written("flax", "optax", "adamw", "optax"),
    written("accelerate", "torch-optim", "adamw", "torch", unchecked=VALUES, optional=ACCELERATE),
    written("keras-h5", "statekit-keras", "scaled_adam", "zip2025", unchecked=ANYWHERE),
    written("dcp-safetensors", "torch-fqn-flat", "adamw", "torch", unchecked=VALUES, optional=OPTIONS),
    written("dcp", "torch-fqn-flat", "adamw", "torch", unchecked=(".metadata",)),
    written("mxnet", "mxnet-lamb", "lamb", "mxnet_fused", unchecked=ANYWHERE, optional=MXNET),
    written("orbax", "statekit-jax", "adafactor", "t5x", writes="anew"),
    recorded("flax", "optax", "optax_adafactor/adamw_flax_msgpack/checkpoint", unchecked=ANYWHERE),
    recorded("flax", "optax-native", "foreign/optax_adagrad", unchecked=ANYWHERE),
    recorded("mxnet", "mxnet-native", "foreign/mxnet_nadam", unchecked=ANYWHERE, optional=MXNET),
    recorded("orbax", "maxtext", "train/maxtext_llama_scanned/3", unchecked=ZARR, plain=False, writes="anew"),
    streamed(),
    numbered("npz"),
    numbered("pickle"),
    recorded("torch", "torch-optim", "torch_adafactor/adafactor_bf16/checkpoint", "checkpoint.pt"),
    recorded(
        "torch", "torch-optim", "torch_formats/adamw_legacy/checkpoint", "checkpoint.pt", unchecked=ANYWHERE
    ),
    recorded("torch", "torch-optim", "torch_formats/adafactor_lightning/checkpoint", "epoch=0-step=4.ckpt"),
    recorded("torch", "icefall", "scaled_adam/zipformer2025_bf16/checkpoint", "checkpoint-4.pt"),
    recorded("torch", "icefall", "scaled_adam/gptsovits_basic/checkpoint", "checkpoint-6.pt"),
    written("torch", "statekit-torch", "scaled_adam", "zip2025"),
    recorded("tf-bundle", "t2t", "t2t/late_bf16_encoded_beta1/checkpoint"),
    recorded("tf-bundle", "t2t", "t2t/late_beta1_scaled_extlr/checkpoint"),
    recorded("tf-bundle", "t2t", "t2t/late_partitioned_unfactored/checkpoint"),
    recorded("tf-bundle", "mesh-tf", "mesh_tf/adafactor_bf16_master_t5/checkpoint"),
    recorded("tf-bundle", "mesh-tf-adam", "mesh_tf/adamw_2device_stacked_sharded/checkpoint"),
    written("tf-bundle", "tf-adam", "adamw", "tf1"),
    recorded("keras-h5", "keras", "keras/adafactor_default/checkpoint/model.weights.h5", unchecked=ANYWHERE),
    recorded("keras", "keras", "keras/adamw_ema_schedule_clip/checkpoint/model.keras"),
    recorded(
        "mxnet",
        "mxnet-lans",
        "mxnet_lans/fused_bounds_clip_rescale/checkpoint",
        unchecked=ANYWHERE,
        optional=MXNET,
    ),
    recorded(
        "dcp", "torch-fqn", "torch_formats/adafactor_dcp_single/checkpoint/dcp", unchecked=(".metadata",)
    ),
    recorded(
        "dcp",
        "torch-fqn",
        "torch_formats/adamw_fsdp1_sharded_dcp/checkpoint/dcp",
        plain=False,
        unchecked=(".metadata",),
    ),
    recorded(
        "dcp-safetensors",
        "torch-fqn-flat",
        "torch_formats/adafactor_dcp_hf_safetensors/checkpoint/hf",
        unchecked=VALUES,
        optional=OPTIONS,
    ),
    recorded(
        "deepspeed",
        "deepspeed",
        "torch_formats/adamw_deepspeed_bf16_zero1/checkpoint/global_step4",
        joint=True,
    ),
    recorded(
        "deepspeed",
        "deepspeed",
        "torch_formats/adamw_deepspeed_bf16_zero1/checkpoint/global_step4_universal",
        joint=True,
    ),
    recorded(
        "deepspeed",
        "deepspeed",
        "torch_formats/adamw_deepspeed_zero3/checkpoint/global_step4",
        plain=False,
        joint=True,
    ),
    recorded(
        "megatron",
        "megatron",
        "torch_formats/adamw_megatron_core/checkpoint/iter_0000004",
        unchecked=(".metadata",),
    ),
    written("megatron", "megatron-float16", "adamw", "torch", unchecked=(".metadata",)),
    written("megatron", "megatron-distributed", "adamw", "torch", unchecked=(".metadata",)),
    recorded("fsdp1-ranks", "torch-optim", "torch_formats/adamw_fsdp1_rank_local_flat/checkpoint"),
    mixed("torch", "torch-optim", ("adafactor", "torch"), ("adamw", "torch")),
    mixed("orbax", "optax", ("adafactor", "optax"), ("adamw", "optax"), writes="anew"),
    mixed("statekit", "statekit", ("adafactor", "t5x"), ("adamw", "optax")),
    mixed("torch", "statekit-torch", ("adafactor", "hf"), ("scaled_adam", "zip2025")),
    alone("torch", "torch-weights"),
    alone("flax", "jax-weights"),
    alone("tf-bundle", "tf-weights"),
    alone("tf-bundle", "tf2-weights"),
    alone("keras-h5", "keras-weights", unchecked=ANYWHERE),
    alone("mxnet", "mxnet-weights", unchecked=ANYWHERE),
    written("keras-h5", "keras", "lamb", "keras", unchecked=ANYWHERE),
    case_of("keras-h5", "keras-model-h5", "keras2/adam/model.h5", unchecked=ANYWHERE),
    case_of("tf-bundle", "tf2-keras2", "keras2/adam/tfckpt"),
    case_of("torch", "bitsandbytes-8bit", "low_bit/bnb_adamw8bit/checkpoint/checkpoint.pt"),
    case_of("torch", "bitsandbytes-32bit", "low_bit/bnb_adamw32bit_bf16/checkpoint/checkpoint.pt"),
    case_of("torch", "torchao-8bit", "low_bit/ao_adamw8bit/checkpoint/checkpoint.pt"),
    case_of("torch", "torchao-4bit", "low_bit/ao_adamw4bit/checkpoint/checkpoint.pt"),
    case_of("torch", "torchao-fp8", "low_bit/ao_adamwfp8_bf16/checkpoint/checkpoint.pt"),
    written("mxnet", "mxnet-adam", "adamw", "mxnet_unfused", unchecked=ANYWHERE, optional=MXNET),
    written("tf-bundle", "tf2-keras", "adamw", "keras"),
    written("tf-bundle", "tf2-t2t", "adafactor", "t2t_late"),
    written("tf-bundle", "tf2-adam", "adamw", "tf1"),
    written("tf-bundle", "tf2-statekit", "scaled_adam", "zip2025"),
    recorded(
        "hf-trainer",
        "torch-optim",
        "torch_formats/adamw_trainer/checkpoint/checkpoint-4",
        unchecked=VALUES,
        optional=TRAINER,
    ),
    recorded(
        "accelerate",
        "torch-optim",
        "torch_formats/adafactor_accelerate/checkpoint/checkpoint_0",
        unchecked=VALUES,
        optional=ACCELERATE,
    ),
    recorded(
        "safetensors",
        "torch-optim",
        "hf_adafactor/fixedlr_scale_beta1_wd/checkpoint",
        unchecked=VALUES,
        optional=TRAINER,
    ),
    recorded(
        "safetensors",
        "torch-optim",
        "torch_formats/adamw_safetensors_shards/checkpoint",
        unchecked=VALUES,
        optional=TRAINER,
    ),
)
ROWS = tuple(row for row in ALL if row.here)


def writable() -> dict[str, Row]:
    """Returns, by container, the first sample of each that statekit writes."""
    rows: dict[str, Row] = {}
    for row in ROWS:
        if registry.container_card(row.sample.container).target_kind and row.sample.writes != "nothing":
            rows.setdefault(row.sample.container, row)
    return rows


def target_name(container: str) -> str:
    """Returns a name for a target of a container: a file's with its suffix, which is how it is told."""
    card = registry.container_card(container)
    return f"target{next(iter(card.suffixes), '') if card.target_kind == 'file' else ''}"
