"""Slices of a model that tensor-parallel ranks of DeepSpeed hold: joined as `universal_checkpoint_info` says."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from statekit.budget import Account
from statekit.conversion.open_state import open_state
from statekit.converters.containers.deepspeed.joins import Joins
from statekit.errors import BudgetError, CorruptError, FormatError, RefusedError
from statekit.tensors.distance import distance
from statekit.tensors.tensor import Array, in_memory, parts_of

pytestmark = pytest.mark.torch

RECORDED = Path(__file__).parent / "cases" / "deepspeed_tp2"
WHOLE = np.arange(48, dtype=np.float32).reshape(8, 6)


@pytest.mark.parametrize("tag", ["global_step3", "global_step3_universal"])
def test_a_recorded_run_of_two_by_two_ranks_is_joined_exactly(tag: str) -> None:
    expected = load_file(RECORDED / "trajectory.safetensors")
    with open_state(RECORDED / "checkpoint" / tag) as opened:
        state = opened.state
        assert state.counts.updates == 3 and state.params["embed/weight"].shape == (7, 4)
        for path, param in state.params.items():
            slots = {"exp_avg": state.slots[path]["m"], "exp_avg_sq": state.slots[path]["v"]}
            said = {f"3/param/{path}": param} | {f"3/slot/{path}/{k}": t for k, t in slots.items()}
            for name, tensor in said.items():
                assert tensor.read().tobytes() == expected[name][: tensor.shape[0]].tobytes(), name


def test_rows_that_pad_a_vocabulary_are_named() -> None:
    with open_state(RECORDED / "checkpoint" / "global_step3") as opened:
        assert any("embed.weight" in finding.place for finding in opened.checkpoint.findings)


def test_slices_without_information_are_refused_by_name(tmp_path: Path) -> None:
    run = tmp_path / "global_step3"
    shutil.copytree(RECORDED / "checkpoint" / "global_step3", run)
    for file in run.glob("mp_rank_*"):
        saved = torch.load(file, weights_only=True)
        del saved["universal_checkpoint_info"]
        torch.save(saved, file)
    with pytest.raises(RefusedError, match="universal_checkpoint_info"):
        open_state(run)


@pytest.mark.parametrize(
    "files", ["*mp_rank_00*", "*mp_rank_01*", "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"]
)
def test_a_missing_slice_is_noticed(files: str, tmp_path: Path) -> None:
    run = tmp_path / "global_step3"
    shutil.copytree(RECORDED / "checkpoint" / "global_step3", run)
    for file in run.glob(files):
        file.unlink()
    with pytest.raises(CorruptError, match="lacks a slice"):
        open_state(run)


def joined(info: Mapping[str, Any], *pieces: Array) -> Array:
    """Returns what pieces of `w` make up."""
    return Joins(info, "here", Account()).whole("w", [in_memory(piece) for piece in pieces]).read()


def fused(shape: object, **others: object) -> dict[str, Any]:
    return {
        "parameter_with_sub_params": [{"patterns": ["^w$"], "shape": shape, "partition_dim": 0}],
        **others,
    }


def block(shape: list[Any], source: list[Any], dest: list[Any]) -> dict[str, Any]:
    return {"shape": shape, "source": source, "dest": dest, "locations": [0]}


AFFINE = {
    "affine_map": {
        "version": 1,
        "params": {
            "^w$": {
                "logical_shape": [8, 6],
                "ranks": {
                    0: {"shard_shape": [5, 6], "pieces": [block([5, 6], [0, [6, 1]], [0, [6, 1]])]},
                    1: {"shard_shape": [3, 6], "pieces": [block([3, 6], [30, [6, 1]], [0, [6, 1]])]},
                },
            }
        },
    }
}
JOINS: dict[str, tuple[dict[str, Any], list[Array]]] = {
    "no pattern": ({"universal_checkpoint_version": 0.3}, [WHOLE[:4], WHOLE[4:]]),
    "unevenly": ({"universal_checkpoint_version": 0.3}, [WHOLE[:5], WHOLE[5:]]),
    "rows": ({"parameter_with_row_parallelism_patterns": ["^w$"]}, [WHOLE[:, :3], WHOLE[:, 3:]]),
    "replicated": ({"tp_replicated_parameter_patterns": ["w"]}, [WHOLE, WHOLE]),
    "halves": (
        {"parameter_with_2_sub_params_cat_dim_0": ["w"]},
        [WHOLE[[0, 1, 4, 5]], WHOLE[[2, 3, 6, 7]]],
    ),
    "counted parts": (fused([2, -1]), [WHOLE[[0, 1, 4, 5]], WHOLE[[2, 3, 6, 7]]]),
    "parts of sizes": (fused([[4, 2, 2], 6]), [WHOLE[[0, 1, 4, 6]], WHOLE[[2, 3, 5, 7]]]),
    "parts of widths": (
        fused(
            [[5, 3], 6], universal_checkpoint_version=0.4, sub_param_shard_widths={"^w$": [[3, 2], [2, 1]]}
        ),
        [WHOLE[[0, 1, 2, 5, 6]], WHOLE[[3, 4, 7]]],
    ),
    "affine": (AFFINE, [WHOLE[:5], WHOLE[5:]]),
}


@pytest.mark.parametrize("kind", JOINS)
def test_each_kind_of_pattern_joins_as_deepspeed_does(kind: str) -> None:
    info, pieces = JOINS[kind]
    assert joined(info, *pieces).tobytes() == WHOLE.tobytes()


def test_averages_and_vocabularies() -> None:
    assert np.array_equal(joined({"parameter_to_average_patterns": ["w"]}, WHOLE, WHOLE + 2), WHOLE + 1)
    padded = {"vocabulary_parameter_patterns": ["w"], "original_vocab_size": 7}
    assert np.array_equal(joined(padded, WHOLE[:4], WHOLE[4:]), WHOLE[:7])


@pytest.mark.parametrize("pattern", ["(w+)+$", "w*w*w*w*", "[", "(?=w)", "w" * 300, 3])
def test_a_pattern_that_could_match_for_ever_is_refused(pattern: object) -> None:
    with pytest.raises((RefusedError, FormatError)):
        joined({"tp_replicated_parameter_patterns": [pattern]}, WHOLE, WHOLE)


FAULTS: dict[str, tuple[dict[str, Any], list[Array], type[Exception]]] = {
    "copies differ": ({"tp_replicated_parameter_patterns": ["w"]}, [WHOLE, WHOLE + 1], CorruptError),
    "other axes": ({"parameter_with_row_parallelism_patterns": ["w"]}, [WHOLE[0], WHOLE[1]], CorruptError),
    "pieces don't fit": ({"x": 1}, [WHOLE[:, :2], WHOLE], CorruptError),
    "uneven parts": (fused([[5, 3], 6]), [WHOLE[:4], WHOLE[4:]], RefusedError),
    "no widths": (fused([[5, 3], 6], universal_checkpoint_version=0.4), [WHOLE[:4], WHOLE[4:]], FormatError),
    "not made so": (
        {"parameter_with_sub_params": [{"patterns": ["w"]}]},
        [WHOLE[:4], WHOLE[4:]],
        FormatError,
    ),
    "unsupported": ({"autotp_unsupported_parameter_patterns": {"w": "why"}}, [WHOLE, WHOLE], RefusedError),
    "affine, other pieces": (AFFINE, [WHOLE[:4], WHOLE[4:]], CorruptError),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_join_is_refused(fault: str) -> None:
    info, pieces, error = FAULTS[fault]
    with pytest.raises(error):
        joined(info, *pieces)


@pytest.mark.parametrize(
    "info",
    [
        fused([300_000_000, 0]),
        {"vocabulary_parameter_patterns": [f"a{number}b.*c.*" for number in range(100_000)]},
    ],
    ids=["parts", "patterns"],
)
def test_what_the_information_counts_draws_on_the_budget(info: Mapping[str, Any]) -> None:
    piece = np.zeros((150_000_000, 0), np.float32)
    with pytest.raises(BudgetError):
        joined(info, piece, piece)


@pytest.mark.parametrize(
    "info",
    [
        fused([[4, 4], 6], universal_checkpoint_version=0.4, sub_param_shard_widths={"^w$": [[2.0, 2.0], [2, 2]]}),
        fused([[4, 4], 6], universal_checkpoint_version=0.4, sub_param_shard_widths={"^w$": [[-1, 5], [5, -1]]}),
        {"affine_map": {"params": {"^w$": {
            "logical_shape": [8, 6],
            "ranks": {
                rank: {"shard_shape": [4, 6], "pieces": [block([n, 6], [24 * rank, [6, 1]], [0, [6, 1]])]}
                for rank, n in enumerate((4.0, 4))
            },
        }}}},
        {"vocabulary_parameter_patterns": ["[[a]"]},
    ],
    ids=["floats", "negative", "float block", "a pattern that Python warns of"],
)  # fmt: skip
def test_numbers_and_patterns_of_another_kind_are_refused(info: Mapping[str, Any]) -> None:
    with pytest.raises((FormatError, RefusedError)):
        joined(info, WHOLE[:4], WHOLE[4:])


def test_joined_pieces_are_compared_like_any_tensor() -> None:
    halves = [in_memory(WHOLE[:4]), in_memory(WHOLE[4:])]
    whole = Joins({"x": 1}, "here", Account()).whole("w", halves)
    assert parts_of(whole) is None and distance(in_memory(WHOLE + 1), whole, parts_of(whole)).unequal == 48


@pytest.mark.parametrize(
    "key", ["shared_params", "frozen_param_shapes", "frozen_param_fragments", "buffer_names"]
)
@pytest.mark.parametrize("value", ["text", 7, [["a"]]])
def test_names_that_a_model_s_file_gives_in_another_form_are_refused(
    key: str, value: Any, tmp_path: Path
) -> None:
    """They ended in an AttributeError."""
    run = tmp_path / "global_step3"
    shutil.copytree(RECORDED / "checkpoint" / "global_step3", run)
    for file in run.glob("mp_rank_00*"):
        saved = torch.load(file, weights_only=True)
        torch.save({**saved, key: value}, file)
    with pytest.raises(FormatError):
        open_state(run)
