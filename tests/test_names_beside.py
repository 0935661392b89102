"""Files whose names say what belongs together, and names that a conversion must remember when it reads its target."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from goldens import GOLDEN
from statekit.cli.main import main
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state

LANS = GOLDEN / "mxnet_lans/fused_bounds_clip_rescale/checkpoint"
ICEFALL = Path(__file__).parent / "cases/icefall_buffers"


@pytest.fixture
def gluonnlp(tmp_path: Path) -> Path:
    """Returns a folder as GluonNLP's run_pretraining.py leaves it: two checkpoints of two local ranks."""
    for stem in ("0001999", "0002999"):
        shutil.copy(LANS / "net.params", tmp_path / f"{stem}.params")
        for rank in range(2):
            shutil.copy(LANS / "trainer.states", tmp_path / f"{stem}.states.{rank:02d}")
    return tmp_path


@pytest.mark.parametrize("name", ["", "0002999.params", "0002999.states.00", "0002999.states.01"])
def test_the_states_of_a_local_rank_belong_to_the_parameters_of_their_stem(gluonnlp: Path, name: str) -> None:
    with open_state(gluonnlp / name) as opened, open_state(LANS) as plain:
        assert opened.layout == "mxnet-lans" and opened.checkpoint.step == 2999
        assert {part.name.partition(".")[0] for part in opened.checkpoint.parts} == {"0002999"}
        for path, slots in plain.slots.items():
            for slot, tensor in slots.items():
                np.testing.assert_array_equal(opened.slots[path][slot].read(), tensor.read(), strict=True)


def test_an_earlier_checkpoint_of_gluonnlp_is_chosen_by_its_step(gluonnlp: Path) -> None:
    with open_state(gluonnlp, step=1999) as opened:
        assert opened.checkpoint.step == 1999


def test_icefall_goes_to_icefall_with_buffers_by_the_names_that_were_given(tmp_path: Path) -> None:
    names = (ICEFALL / "names.txt").read_text().split()
    ref = CheckpointRef(ICEFALL / "checkpoint-5.pt", param_names=tuple(names), variant="zip2025")
    target = tmp_path / "again.pt"
    convert(plan(ref, target))
    with open_state(ref) as first, open_state(CheckpointRef(target, **ref.options("meaning"))) as again:
        assert first.layout == again.layout == "icefall"
        for path, slots in first.slots.items():
            for slot, tensor in slots.items():
                np.testing.assert_array_equal(again.slots[path][slot].read(), tensor.read(), strict=True)


def test_a_batch_norm_s_statistics_are_no_parameters_of_scaled_adam() -> None:
    names = tuple((ICEFALL / "names.txt").read_text().split())
    with (
        open_state(CheckpointRef(ICEFALL / "checkpoint-5.pt", param_names=names)) as named,
        open_state(ICEFALL / "checkpoint-5.pt") as plain,
    ):
        assert plain.groups[0].paths == named.groups[0].paths and plain.counts.updates == 5


def test_printed_lines_load_the_states_of_a_local_rank(
    gluonnlp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(gluonnlp)]) == 0
    assert f'trainer.load_states("{gluonnlp}/0002999.states.00")' in capsys.readouterr().out


def test_a_stream_of_easylm_says_that_it_rounded_parameters_and_slots() -> None:
    stream = Path(__file__).parent / "cases/easylm_streaming/streaming_train_state"
    with open_state(stream) as opened:
        assert [finding.kind for finding in opened.checkpoint.findings] == ["slots-narrow"]
