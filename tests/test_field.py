"""Each kind of file that people have has a test with a further case, made with the real library; the list is held."""

from __future__ import annotations

import ast
import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import statekit
from statekit.cli.main import main
from statekit.conversion.belonging import half_of
from statekit.errors import NamesError, UnknownFormatError, UnknownRuleError
from statekit.state.param_names import wrapped_names
from statekit.torch import attest, load_optimizer

pytestmark = pytest.mark.torch
HERE = Path(__file__).parent
SHARED = HERE.parents[1] / "shared" / "cases"

KINDS: Mapping[str, Mapping[str, str]] = {
    "HF Adafactor with bf16 weights": {
        "case": "test_torch_cases.py::test_slots_of_bfloat16_weights_are_proven_in_the_dtype_that_the_run_has",
        "further": "test_field.py::test_adafactor_of_transformers_over_bfloat16_goes_on_in_the_drop_in",
    },
    "1 evidence, a weakest fact in the headline": {
        "case": "test_optax_recognised.py::test_a_masked_decay_is_asked_for",
        "further": "test_evidence.py::test_an_order_that_nothing_proves_stands_in_the_headline_of_every_verb",
    },
    "1 a target that stores values asks by name": {
        "case": "test_evidence.py::test_a_layout_that_stores_values_asks_for_them_by_name",
        "further": "test_field.py::test_megatron_asks_for_what_its_groups_store",
    },
    "1 documented defaults never stand for what has none": {
        "case": "test_evidence.py::test_documented_defaults_never_stand_for_what_has_none",
        "further": "test_evidence.py::test_a_program_that_builds_the_optimizer_itself_is_asked_for",
    },
    "2 signature, not resemblance": {
        "case": "test_torch_cases.py::test_no_optimizer_is_called_by_anothers_name",
        "further": "test_field.py::test_a_wrapper_whose_rule_is_unknown_is_named_with_what_it_wraps",
    },
    "3 companions": {
        "case": "test_companions.py::test_no_half_is_lost_in_silence",
        "further": "test_field.py::test_names_that_end_in_opt_are_optimizers",
    },
    "4 no false alarm": {
        "case": "test_companions.py::test_a_loader_names_an_average_beside_a_whole_run",
        "further": "test_field.py::test_an_average_that_lies_beside_a_run_of_lightning_stops_no_resume",
    },
    "the counterweight": {
        "case": "test_evidence.py::test_no_recording_needs_an_option_that_needed_none",
        "further": "test_evidence.py::test_a_target_that_leaves_facts_open_asks_for_nothing",
    },
    "Trainer's folders by default": {
        "case": "test_trainer_matrix.py::test_a_right_resume_passes_and_each_wrong_one_is_named",
        "further": "test_field.py::test_experts_that_transformers_saves_apart_are_one_parameter_of_the_run",
    },
    "a file of names": {
        "case": "test_names_beside.py::*",
        "further": "test_field.py::test_a_file_of_names_tells_the_order_of_a_run_with_a_frozen_encoder",
    },
    "clipping and the rest of training_args.bin": {
        "case": "test_torch_cases.py::test_another_limit_of_the_gradients_norm_is_no_resume_of_a_trainers_run",
        "further": "test_field.py::test_what_else_trainers_arguments_do_to_gradients_is_named",
    },
    "schedules": {
        "case": "test_schedules_attested.py::*",
        "further": "test_trainer_schedules.py::test_trainer_goes_on_at_the_runs_rates",
    },
    "PEFT and LoRA": {
        "case": "test_torch_cases.py::test_an_adapters_names_are_those_of_its_model_or_of_its_file",
        "further": "test_torch_cases.py::test_adapters_in_folders_of_their_names_are_the_model",
    },
    "two halves": {
        "case": "test_torch_cases.py::test_halves_of_one_step_are_one_checkpoint",
        "further": "test_field.py::test_the_files_of_verls_only_rank_are_one_checkpoint",
    },
    "files that each rank pickles": {
        "case": "test_rank_files.py::test_the_files_of_two_ranks_are_one_checkpoint",
        "further": "test_rank_files.py::test_what_fsdp2_and_tensor_parallelism_save_is_joined",
    },
    "a file for each object": {
        "case": "test_field.py::test_each_object_of_speechbrain_lies_in_a_file_and_all_are_one_checkpoint",
        "further": "test_field.py::test_several_optimizers_of_speechbrain_are_named",
    },
    "averages": {
        "case": "test_torch_cases.py::test_where_lightning_averages_the_runs_own_weights_go_on",
        "further": "test_field.py::test_a_file_whose_only_weights_are_an_average_is_no_fault_for_doctor",
    },
    "Adam is not AdamW": {
        "case": "test_torch_cases.py::test_files_of_older_torch_are_read_and_do_not_say_adam_or_adamw",
        "further": "test_field.py::test_adam_with_decay_in_the_gradient_is_carried_and_refused_where_it_is_stepped",
    },
    "dialects of Adam": {
        "case": "test_torch_cases.py::test_fused_adam_counts_in_its_group_and_its_mode_is_assumed",
        "further": "test_field.py::test_two_groups_of_the_adamw_of_older_transformers_are_called_so",
    },
    "prefixes": {
        "case": "test_torch_cases.py::test_a_compiled_models_file_fits_the_model_inside",
        "further": "test_torch_cases.py::test_a_module_around_the_network_is_no_part_of_its_names",
    },
    "an empty parameter group": {
        "case": "test_field.py::test_a_group_without_parameters_is_kept_named_and_goes_on",
        "further": "test_field.py::test_a_group_without_parameters_in_a_file_by_index_is_named_too",
    },
    "bitsandbytes": {
        "case": "test_field.py::test_folders_of_trainer_with_bitsandbytes_are_called_so",
        "further": "test_low_bit.py::*",
    },
    "doctor and diff of what isn't known": {
        "case": "test_torch_cases.py::test_no_optimizer_is_called_by_anothers_name",
        "further": "test_field.py::test_a_schedule_alone_and_weights_by_position_are_called_so",
    },
    "muon_attest": {
        "case": "test_field.py::test_a_partition_of_muon_is_attested_and_a_new_one_is_found",
        "further": "test_several_optimizers.py::test_each_group_is_of_its_own_optimizer",
    },
    "silent_wrappers": {
        "case": "test_field.py::test_wrappers_and_look_alikes_of_optax_are_not_converted_as_adam",
        "further": "test_optax_recognised.py::test_every_optimizer_of_optax_fits_its_own_name_or_is_described_by_it",
    },
    "two_nets": {
        "case": "test_field.py::test_of_two_networks_in_one_tree_each_goes_with_its_own_optimizer",
        "further": "test_optax_recognised.py::test_each_network_has_the_optimizer_of_its_branch_or_of_its_name",
    },
    "a count that no file has": {
        "case": "test_uncounted.py::test_a_count_that_no_file_has_is_unknown_everywhere",
        "further": "test_mxnet.py::test_a_count_that_states_alone_lack_is_unknown_in_every_verdict",
    },
    "Optax: links around Adam": {
        "case": "test_optax_recognised.py::test_what_changes_the_updates_is_said_by_its_name",
        "further": "test_optax_recognised.py::test_four_links_with_adam_first_are_lambs_or_those_of_another_chain",
    },
    "Optax: rates by label": {
        "case": "test_optax_recognised.py::test_each_label_of_a_partition_has_its_own_rate_and_may_begin_anew",
        "further": "test_printed_nnx.py::*",
    },
    "nnx.Optimizer": {
        "case": "test_optax_recognised.py::test_a_module_and_an_optimizer_of_nnx_are_read_attested_and_written_again",
        "further": "test_printed_nnx.py::test_the_printed_block_loads_what_nnx_saved_goes_on_and_saves",
    },
    "EasyLM's streams": {
        "case": "test_names_beside.py::test_a_stream_of_easylm_says_that_it_rounded_parameters_and_slots",
        "further": "test_jax_trees.py::test_a_stream_of_easylm_of_an_optimizer_without_a_schema_is_carried",
    },
    "copies of pmap": {
        "case": "test_jax_trees.py::test_the_copies_of_pmap_are_one_and_differing_ones_an_error",
        "further": "test_jax_trees.py::test_the_copies_of_an_optimizer_without_a_schema_are_one_too",
    },
    "big_vision's npz": {
        "case": "test_jax_trees.py::test_big_vision_s_npz_names_the_fields_of_states_by_their_place",
        "further": "test_jax_trees.py::test_an_npz_by_the_keys_of_jax_is_the_tree",
    },
    "pickled pairs": {
        "case": "test_jax_trees.py::test_a_pickled_tree_is_read_without_running_it",
        "further": "test_optax_recognised.py::"
        "test_of_a_pickled_pair_no_field_of_the_optimizers_state_is_taken_for_the_parameters",
    },
    "Keras 2": {
        "case": "test_keras2.py::test_every_form_of_keras_2_holds_what_its_whole_model_file_names",
        "further": "test_keras2.py::test_a_model_of_branches_with_a_frozen_layer_has_its_slots_by_name",
    },
    "Keras 2's other optimizers": {
        "case": "test_keras2.py::test_objects_of_another_optimizer_are_neither_adams_nor_weights_alone",
        "further": "test_keras2.py::test_a_legacy_optimizer_of_a_name_of_its_own_is_asked_for",
    },
    "Keras' OrbaxCheckpoint": {
        "case": "test_keras_callbacks.py::test_the_optimizer_inside_a_loss_scale_is_read_with_its_own_count",
        "further": "test_keras_callbacks.py::"
        "test_the_callbacks_own_form_is_read_only_and_the_remedy_names_what_keras_loads",
    },
    "several replicas": {
        "case": "test_tensorflow_replicas.py::test_two_replicas_make_the_update_of_the_whole_gradient",
        "further": "test_tensorflow_replicas.py::test_a_wrong_reduction_is_noticed",
    },
    "GluonNLP's names": {
        "case": "test_names_beside.py::test_the_states_of_a_local_rank_belong_to_the_parameters_of_their_stem",
        "further": "test_names_beside.py::test_an_earlier_checkpoint_of_gluonnlp_is_chosen_by_its_step",
    },
    "icefall with buffers and names": {
        "case": "test_names_beside.py::test_icefall_goes_to_icefall_with_buffers_by_the_names_that_were_given",
        "further": "test_field.py::test_icefalls_whole_file_goes_back_with_its_average_scaler_and_sampler",
    },
    "doctor of steps by name": {
        "case": "test_doctor.py::test_moments_that_a_later_step_repeats_are_found",
        "further": "test_doctor.py::test_stale_moments_are_found_however_the_steps_are_named",
    },
    "the catalogue's reasons": {
        "case": "test_service_catalogue.py::test_what_opens_and_cannot_be_decoded_is_never_called_weights",
        "further": "test_service_catalogue.py::"
        "test_a_folder_with_a_part_that_is_cut_off_is_one_checkpoint_that_cannot_be_read",
    },
}
"""Every kind of issues' sections -> the test of its case, and that of a further case of the real library."""


def named_in(file: str) -> set[str]:
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    return {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"
    }


REPORTED: Mapping[str, str] = {
    "adam_or_adamw_old": "test_torch_cases.py::test_transformers_own_adamw_is_carried_and_refused_elsewhere",
    "apex_fusedadam": "test_torch_cases.py::test_fused_adam_counts_in_its_group_and_its_mode_is_assumed",
    "batchnorm": "test_torch_cases.py::test_statistics_of_batch_norms_are_known_by_name",
    "bnb8_trainer": "test_field.py::test_folders_of_trainer_with_bitsandbytes_are_called_so",
    "ds_zero2_lora": "test_torch_cases.py::test_trainers_folders_under_deepspeed_open_with_their_optimizer",
    "empty_group_dcp": "test_field.py::test_a_group_without_parameters_is_kept_named_and_goes_on",
    "fsdp_sharded_trainer": "test_torch_cases.py::test_fsdp_shards_of_model_and_optimizer_are_one_checkpoint",
    "lightning_ema": "test_torch_cases.py::test_where_lightning_averages_the_runs_own_weights_go_on",
    "lora_trainer": "test_torch_cases.py::test_an_adapters_names_are_those_of_its_model_or_of_its_file",
    "muon_attest": "test_field.py::test_a_partition_of_muon_is_attested_and_a_new_one_is_found",
    "nanogpt_compiled": "test_torch_cases.py::test_a_compiled_models_file_fits_the_model_inside",
    "old_torch_adamw": "test_torch_cases.py::test_files_of_older_torch_are_read_and_do_not_say_adam_or_adamw",
    "olmo_unsharded": "test_torch_cases.py::"
    "test_olmos_folder_is_one_checkpoint_whose_configuration_names_the_optimizer",
    "plain_adam_resume": "test_field.py::test_the_lines_of_torchs_adam_name_adam",
    "silent_wrappers": "test_field.py::test_wrappers_and_look_alikes_of_optax_are_not_converted_as_adam",
    "two_nets": "test_field.py::test_of_two_networks_in_one_tree_each_goes_with_its_own_optimizer",
    "decay_schedule": "test_optax_recognised.py::"
    "test_a_schedule_right_behind_adam_is_of_the_decay_or_of_the_rate",
    "easylm_streaming": "test_names_beside.py::"
    "test_a_stream_of_easylm_says_that_it_rounded_parameters_and_slots",
    "flax_nnx_optimizer": "test_optax_recognised.py::"
    "test_a_module_and_an_optimizer_of_nnx_are_read_attested_and_written_again",
    "gluonnlp_names": "test_names_beside.py::"
    "test_the_states_of_a_local_rank_belong_to_the_parameters_of_their_stem",
    "icefall_resume": "test_names_beside.py::"
    "test_icefall_goes_to_icefall_with_buffers_by_the_names_that_were_given",
    "keras215": "test_keras2.py::test_every_form_of_keras_2_holds_what_its_whole_model_file_names",
    "keras3_h5": "test_keras2.py::test_a_whole_model_file_of_keras_3_is_the_state_of_the_keras_file_beside_it",
    "maxtext_adam_pax": "test_optax_recognised.py::"
    "test_moments_that_maxtext_corrects_in_advance_become_averages",
    "maxtext_skip_spikes": "test_optax_recognised.py::"
    "test_what_wrappers_of_optax_do_is_a_finding_of_a_conversion_that_leaves_optax",
    "multisteps_mid": "test_optax_recognised.py::"
    "test_what_wrappers_of_optax_do_is_a_finding_of_a_conversion_that_leaves_optax",
    "partition_reset": "test_optax_recognised.py::"
    "test_each_label_of_a_partition_has_its_own_rate_and_may_begin_anew",
    "resume_trainstate": "test_field.py::test_the_lines_of_a_train_state_of_flax_run",
    "schedule_before_adam": "test_field.py::test_a_schedule_before_adam_is_asked_for_or_refused",
}
"""Every case that people report -> its test."""


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_case_and_a_further_one(kind: str) -> None:
    places = [place.split("::") for place in KINDS[kind].values()]
    assert len({tuple(place) for place in places}) == len(places) == 2
    for file, name in places:
        assert named_in(file) if name == "*" else name in named_in(file)


@pytest.mark.parametrize("name", REPORTED)
def test_each_reported_case_has_a_test(name: str) -> None:
    file, _, test = REPORTED[name].partition("::")
    assert test in named_in(file)
    assert not SHARED.is_dir() or (SHARED / name).is_dir()


class Net(torch.nn.Module):
    """A small network whose shapes are all of one parameter alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.second = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return y


def trained(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, updates: int = 4
) -> torch.optim.Optimizer:
    random = torch.Generator().manual_seed(0)
    for _ in range(updates):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape, generator=random)
        optimizer.step()
    return optimizer


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return trained(model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))


def first_moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        name.replace(".", "/"): optimizer.state[param]["exp_avg"].numpy()
        for name, param in model.named_parameters()
    }


def assert_moments(path: Path, expected: Mapping[str, Any], **options: Any) -> None:
    with statekit.open(path, **options) as opened:
        for name, value in expected.items():
            assert np.array_equal(np.asarray(opened.slots[name]["m"].read()), value)


def told(arguments: list[Any], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main([*map(str, arguments)]) == code
    shown = capsys.readouterr()
    return " ".join((shown.out + shown.err).split())


# Wrappers, and what stands alone


def test_two_groups_of_the_adamw_of_older_transformers_are_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is that of transformers 4.46.3: three updates of a Sequential, matrices decayed and vectors not."""
    path = HERE / "cases" / "old_transformers_adamw" / "two_groups.pt"
    stored = torch.load(path, weights_only=True)["optimizer"]["state"]
    with statekit.open(path) as opened:
        groups = [group.hyperparameters for group in opened.state.optimizer.groups]
        assert [group["weight_decay_rate"] for group in groups] == [0.1, 0.0]
        assert {group["epsilon"] for group in groups} == {1e-6}
    assert_moments(path, {"0/weight": stored[0]["exp_avg"].numpy(), "2/bias": stored[3]["exp_avg"].numpy()})
    refused = told(["convert", path, tmp_path / "run", "--to", "orbax", "--layout", "optax"], 3, capsys)
    assert "transformers' own AdamW" in refused
    assert told(["convert", path, tmp_path / "run.statekit"], 0, capsys).startswith("BITWISE")


def test_masters_of_a_wrapper_for_mixed_precision_are_what_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Apex' FP16_Optimizer, after its source. Seen red: an optimizer that isn't known."""
    model = Net()
    masters = copy.deepcopy(model)
    optimizer = adamw(masters)
    around: dict[str, Any] = {
        "loss_scaler": 1.0, "dynamic_loss_scale": True, "overflow": False, "first_closure_call_this_step": False,
        "optimizer_state_dict": optimizer.state_dict(),
        "fp32_from_fp16": [[param.detach() for param in masters.parameters()]],
    }  # fmt: skip
    half = copy.deepcopy(masters).half()
    torch.save({"model": half.state_dict(), "optimizer": around}, tmp_path / "run.pt")
    assert_moments(tmp_path / "run.pt", first_moments(masters, optimizer))
    assert "BITWISE" in told(["convert", tmp_path / "run.pt", tmp_path / "again.pt"], 0, capsys)
    again = torch.load(tmp_path / "again.pt", weights_only=True)["model"]
    assert all(torch.equal(again[name], param) for name, param in masters.named_parameters())
    lacking = {**around, "fp32_from_fp16": [around["fp32_from_fp16"][0][1:]]}
    torch.save({"model": half.state_dict(), "optimizer": lacking}, tmp_path / "lacking.pt")
    assert "or a wrapper, which keeps" in told(["inspect", tmp_path / "lacking.pt"], 0, capsys)


def test_a_wrapper_whose_rule_is_unknown_is_named_with_what_it_wraps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Net()
    tree = {"base_optimizer": adamw(model).state_dict(), "rho": 0.05}  # as wrappers of SAM save themselves
    torch.save({"model": model.state_dict(), "optimizer": tree}, tmp_path / "run.pt")
    said = "an optimizer that isn't known by its slots and options, or a wrapper, which keeps rho beside the slots of"
    for verb in (["inspect", tmp_path / "run.pt"], ["doctor", tmp_path / "run.pt"]):
        assert said in told(verb, 0, capsys)
    assert said in told(["convert", tmp_path / "run.pt", tmp_path / "x.pt"], 3, capsys)


def test_a_schedule_alone_and_weights_by_position_are_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Net()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    (tmp_path / "alone").mkdir()
    torch.save(schedule.state_dict(), tmp_path / "alone" / "scheduler.pt")
    said = "a learning-rate schedule alone (OneCycleLR): no weights and no optimizer"
    assert said in told(["inspect", tmp_path / "alone" / "scheduler.pt"], 0, capsys)
    with pytest.raises(UnknownFormatError, match="a learning-rate schedule alone"):
        statekit.open(tmp_path / "alone" / "scheduler.pt")
    captured = (3, *model.parameters(), optimizer.state_dict(), 2.5)  # as Gaussian splatting saves a scene
    torch.save((captured, 7000), tmp_path / "chkpnt7000.pth")
    assert "whose weights have no names" in told(["inspect", tmp_path / "chkpnt7000.pth"], 0, capsys)
    with pytest.raises(NamesError, match="no weights that have names"):
        statekit.open(tmp_path / "chkpnt7000.pth")
    live: Any = load_optimizer(tmp_path / "chkpnt7000.pth", model.named_parameters())
    assert [group["step"] for group in live.param_groups] == [4]


@pytest.mark.parametrize("kind", ["list", "tuple", "pair"])
def test_a_file_that_is_a_list_as_a_whole_converts(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: an AttributeError of each conversion."""
    model = Net()
    optimizer = adamw(model)
    parts = model.state_dict(), optimizer.state_dict()
    trees = {
        "list": [*parts, 7],
        "tuple": parts,
        "pair": (dict(zip(("model", "optimizer"), parts, strict=True)), 7),
    }
    torch.save(trees[kind], tmp_path / "run.pt")
    assert "BITWISE" in told(["convert", tmp_path / "run.pt", tmp_path / "again.pt"], 0, capsys)
    assert "BITWISE" in told(
        ["convert", tmp_path / "run.pt", tmp_path / "neutral", "--to", "statekit"], 0, capsys
    )
    for path in (tmp_path / "run.pt", tmp_path / "again.pt", tmp_path / "neutral"):
        assert_moments(path, first_moments(model, optimizer))
    program: dict[str, Any] = {"model": Net()}
    exec(told_lines(tmp_path / "run.pt", capsys), program)
    assert torch.equal(program["model"].first.weight, model.first.weight)


# Companions and averages


def test_names_that_end_in_opt_are_optimizers() -> None:
    """SpeechBrain's recipes save wav2vec_opt.ckpt beside wav2vec2.ckpt, and modelopt.ckpt beside model.ckpt."""
    assert {half_of(name) for name in ("modelopt.ckpt", "wav2vec_opt.ckpt", "gen_opt.pth")} == {"optimizer"}
    assert {half_of(name) for name in ("opt-125m.bin", "adopt.pt", "facebook_opt_350m.bin")} == {None}


def test_an_average_that_lies_beside_a_run_of_lightning_stops_no_resume(tmp_path: Path) -> None:
    """NeMo's run-last-EMA.ckpt beside run-last.ckpt. Seen red: attest failed a right resume."""
    model = Net()
    optimizer = adamw(model)
    run = {
        "epoch": 0, "global_step": 4, "pytorch-lightning_version": "2.5.0", "loops": {}, "callbacks": {},
        "lr_schedulers": [], "state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()],
    }  # fmt: skip
    torch.save(run, tmp_path / "run-last.ckpt")
    torch.save({**run, "state_dict": Net().state_dict()}, tmp_path / "run-last-EMA.ckpt")
    result = attest(optimizer, model, tmp_path / "run-last.ckpt")
    assert result.passed and any(
        "run-last-EMA.ckpt looks like an average" in line for line in result.warnings
    )
    fresh = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    assert not attest(fresh, model, tmp_path / "run-last.ckpt").passed


def test_the_steps_of_several_optimizers_of_lightning_are_counted_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: doctor took a right checkpoint of two optimizers for files of several steps."""
    model = Net()
    optimizers = [trained(model, torch.optim.AdamW(part.parameters(), lr=0.01)) for part in model.children()]
    run = {
        "epoch": 0, "global_step": 8, "pytorch-lightning_version": "2.5.0", "loops": {}, "callbacks": {},
        "lr_schedulers": [], "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
    }  # fmt: skip
    torch.save(run, tmp_path / "last.ckpt")
    assert "nothing found" in told(["doctor", tmp_path / "last.ckpt"], 0, capsys)
    torch.save({**run, "global_step": 9}, tmp_path / "last.ckpt")
    assert "says step 9" in told(["doctor", tmp_path / "last.ckpt"], 1, capsys)


class Adapted(torch.nn.Module):
    """A frozen layer with adapters under PEFT's names, two of one shape in either layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(self.layer() for _ in range(2))

    def layer(self) -> torch.nn.Module:
        adapters = {"lora_A": torch.nn.Linear(6, 2, bias=False), "lora_B": torch.nn.Linear(2, 6, bias=False)}
        parts: dict[str, torch.nn.Module] = {"base_layer": torch.nn.Linear(6, 6), **adapters}
        parts["base_layer"].requires_grad_(False)
        return torch.nn.ModuleDict(parts)


def test_an_optimizer_that_was_given_the_frozen_model_too_is_read_by_its_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """AdamW(model.parameters()) under Accelerate. Seen red: nothing told which parameters had slots."""
    from accelerate import Accelerator

    model = Adapted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.randn(param.shape) if param.requires_grad else None
        optimizer.step()
    accelerator.save_state(str(tmp_path / "run"))
    accelerator.free_memory()
    moved = {name: p for name, p in model.named_parameters() if "lora" in name and "weight" in name}
    assert_moments(
        tmp_path / "run",
        {name.replace(".", "/"): optimizer.state[param]["exp_avg"].numpy() for name, param in moved.items()},
    )
    assert "nothing found" in told(["doctor", tmp_path / "run"], 0, capsys)
    live: Any = load_optimizer(tmp_path / "run", model.named_parameters())
    assert live.param_groups[0]["step"] == 3


def test_a_file_whose_only_weights_are_an_average_is_no_fault_for_doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ultralytics' last.pt has no model and an average, which SGD doesn't move. Seen red: doctor ended with 3."""
    model = Net()
    optimizer = trained(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    tree = {
        "epoch": 5,
        "model": None,
        "ema": model.half().state_dict(),
        "updates": 4,
        "optimizer": optimizer.state_dict(),
    }
    torch.save(tree, tmp_path / "last.pt")
    assert "nothing found" in told(["doctor", tmp_path / "last.pt"], 0, capsys)
    assert "--model-key ema takes the average" in told(
        ["convert", tmp_path / "last.pt", tmp_path / "x.pt"], 3, capsys
    )


def test_the_files_of_verls_only_rank_are_one_checkpoint(tmp_path: Path) -> None:
    """Seen red: none of the three was told to be the checkpoint."""
    model = Net()
    optimizer = adamw(model)
    parts = {"model": model.state_dict(), "optim": optimizer.state_dict(), "extra_state": {"rng": {}}}
    for name, part in parts.items():
        torch.save(part, tmp_path / f"{name}_world_size_1_rank_0.pt")
    assert_moments(tmp_path, first_moments(model, optimizer))
    assert attest(optimizer, model, tmp_path).passed


# Rules


def test_adam_with_decay_in_the_gradient_is_carried_and_refused_where_it_is_stepped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: verify ended with an error, and the loaded optimizer failed at its first step."""
    model = Net()
    optimizer = trained(model, torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    assert "BITWISE" in told(["convert", tmp_path / "run.pt", tmp_path / "again.pt"], 0, capsys)
    said = "no step of Adam with weight decay in the gradient"
    shown = told(["verify", tmp_path / "run.pt", tmp_path / "again.pt"], 0, capsys)
    assert shown.startswith("NOT COMPARABLE") and said in shown
    with pytest.raises(UnknownRuleError, match=said):
        load_optimizer(tmp_path / "run.pt", model.named_parameters())


def test_what_verify_says_of_kept_bits_is_that_they_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Convert says BITWISE of a neutral folder, and verify steps it by another step than PyTorch's."""
    model = Net()
    torch.save({"model": model.state_dict(), "optimizer": adamw(model).state_dict()}, tmp_path / "run.pt")
    assert "BITWISE" in told(
        ["convert", tmp_path / "run.pt", tmp_path / "neutral", "--to", "statekit"], 0, capsys
    )
    shown = told(["verify", tmp_path / "run.pt", tmp_path / "neutral"], 0, capsys)
    assert "WITHIN THE ROUNDING BOUND. The same run: every stored bit is kept" in shown


def test_megatron_asks_for_what_its_groups_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen red: groups were written without betas and eps, which its own optimizer then filled in."""
    source = of_optax(tmp_path)
    across = ["convert", source, tmp_path / "run", "--to", "megatron"]
    asked = told(across, 3, capsys)
    assert all(name in asked for name in ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay_rate"))
    assert main([*map(str, across), "--assume-defaults"]) == 3  # a learning rate has no default
    assert "ROUNDING" in told([*across, "--assume-defaults", "--hparams", "learning_rate=0.01"], 0, capsys)


def of_optax(folder: Path) -> Path:
    """Saves a run of optax.adamw, which stores no hyperparameter."""
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp

    params = {"decoder": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "optax", {"params": params, "opt_state": optax.adamw(0.01).init(params)})
    return folder / "optax"


# Groups without parameters (empty_group_dcp)


def two_towers() -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    model.first.requires_grad_(False)
    none: list[torch.nn.Parameter] = []
    groups: list[dict[str, Any]] = [
        {"params": none, "lr": 1e-4, "weight_decay": 0.0},
        {"params": list(model.second.parameters())},
    ]
    return model, trained(model, torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_group_without_parameters_is_kept_named_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """empty_group_dcp: set_optimizer_state_dict drops the options of such a group, and a step ended with KeyError."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = two_towers()
    parts = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    state_dict_saver.save(parts, checkpoint_id=tmp_path / "run", no_dist=True)
    with statekit.open(tmp_path / "run") as opened:
        assert [len(group.paths) for group in opened.groups] == [0, 2]
    assert "group 0 moves no parameter" in told(["doctor", tmp_path / "run"], 0, capsys)
    lines = told_lines(tmp_path / "run", capsys)
    program: dict[str, Any] = {"model": Net()}
    program["model"].first.requires_grad_(False)
    exec(lines, program)
    program["model"](torch.ones(2, 4)).sum().backward()
    program["optimizer"].step()
    assert [group["lr"] for group in program["optimizer"].param_groups][1] == 0.01


def told_lines(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Returns the printed lines of Python that go on with a run."""
    capsys.readouterr()
    assert main(["resume", str(path), *options]) == 0
    return capsys.readouterr().out.partition("\n\n")[0]


def test_printed_lines_load_the_network_that_is_meant_and_not_its_average(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of a StyleGAN2. Seen red: `g_ema` was loaded as the weights, and both optimizers into one's groups."""
    model, other = Net(), Net()
    optimizers = [
        trained(net, torch.optim.Adam(net.parameters(), lr=rate))
        for net, rate in ((model, 0.01), (other, 0.02))
    ]
    average = {name: 0.5 * param.detach() for name, param in model.named_parameters()}
    optim = dict(zip(("g_optim", "d_optim"), (part.state_dict() for part in optimizers), strict=True))
    tree = {"d": other.state_dict(), "g_ema": average, "g": model.state_dict(), **optim}
    torch.save(tree, tmp_path / "000004.pt")
    assert "--model-key g, in Python model_key='g'" in told(
        ["convert", tmp_path / "000004.pt", "x.pt"], 3, capsys
    )
    converted = ["convert", tmp_path / "000004.pt", tmp_path / "g.pt", "--model-key", "g"]
    assert told(converted, 0, capsys).startswith("BITWISE")
    for path, options in ((tmp_path / "000004.pt", ("--model-key", "g")), (tmp_path / "g.pt", ())):
        program: dict[str, Any] = {"model": Net()}
        exec(told_lines(path, capsys, *options), program)
        assert_goes_on_alike(program["model"], program["optimizer"], model, optimizers[0])


def assert_goes_on_alike(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    first: torch.nn.Module,
    run: torch.optim.Optimizer,
) -> None:
    first, run = copy.deepcopy((first, run))
    trained(model, optimizer)
    trained(first, run)
    assert all(map(torch.equal, model.parameters(), first.parameters()))


def test_a_group_without_parameters_in_a_file_by_index_is_named_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = two_towers()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "index.pt")
    assert "group 0 moves no parameter" in told(["doctor", tmp_path / "index.pt"], 0, capsys)
    assert "BITWISE" in told(["convert", tmp_path / "index.pt", tmp_path / "again.pt"], 0, capsys)
    again = torch.load(tmp_path / "again.pt", weights_only=True)["optimizer"]
    assert [group["lr"] for group in again["param_groups"]] == [1e-4, 0.01]


# Cases that people report


def case(name: str) -> Path:
    if not (SHARED / name).is_dir():
        pytest.skip("the shared cases lie beside the checkout, and are not here")
    return SHARED / name


def test_the_lines_of_torchs_adam_name_adam(capsys: pytest.CaptureFixture[str]) -> None:
    """plain_adam_resume: they named AdamW with an argument that it doesn't take."""
    lines = told_lines(HERE / "cases" / "plain_adam_resume" / "adam.pt", capsys)
    assert "torch.optim.Adam(" in lines and "decoupled_weight_decay" not in lines


def test_folders_of_trainer_with_bitsandbytes_are_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """bnb8_trainer: the newer wrapper key, the older form, and the paged state, which is plain Adam in float32."""
    folder = case("bnb8_trainer")
    for form in ("adamw_bnb_8bit", "old_form", "paged_adamw_32bit"):
        shown = told(["inspect", folder / form / "checkpoint-4"], 0, capsys)
        assert "bitsandbytes" in shown and "step 4 updates done" in shown
    stored = torch.load(folder / "paged_adamw_32bit" / "checkpoint-4" / "optimizer.pt", weights_only=True)[
        "state"
    ]
    shapes = {tuple(record["__bnb_optimizer_quant_state__"]["state1"].shape) for record in stored.values()}
    assert (96, 64) in shapes


def test_a_partition_of_muon_is_attested_and_a_new_one_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """muon_attest: the right state passes, a new one is named, doctor is content and diff of a copy finds nothing."""
    folder = case("muon_attest") / "ckpt"
    assert "nothing found" in told(["doctor", folder], 0, capsys)
    assert "Equal" in told(["diff", folder, folder], 0, capsys)
    import optax
    import orbax.checkpoint as ocp

    import statekit.jax

    with ocp.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(folder)["params"]
    rule = optax.contrib.muon(1e-2)
    fresh = rule.init(params)
    with ocp.StandardCheckpointer() as checkpointer:
        stored = checkpointer.restore(folder, {"params": params, "opt_state": fresh})
    assert statekit.jax.attest(params, stored["opt_state"], folder).passed
    assert not statekit.jax.attest(params, fresh, folder).passed


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("adabelief", "adabelief"),
        ("adamax", "adamax"),
        ("radam", "radam"),
        ("sam_adam", ""),
        ("adam_then_trace", ""),
    ],
)
def test_wrappers_and_look_alikes_of_optax_are_not_converted_as_adam(
    name: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """silent_wrappers: each is asked for or refused across frameworks, and carried into the neutral folder."""
    folder = case("silent_wrappers") / name
    assert sentence in told(["convert", folder, tmp_path / "x.pt"], 3, capsys)
    assert main(["convert", str(folder), str(tmp_path / "neutral"), "--to", "statekit"]) == 0


@pytest.mark.parametrize(
    ("tree", "key", "updates"),
    [("nested", "actor/params", 5), ("flat_names", "critic_params", 9), ("crossed_names", "g_params", 5)],
)
def test_of_two_networks_in_one_tree_each_goes_with_its_own_optimizer(
    tree: str, key: str, updates: int
) -> None:
    """two_nets: by the branch that both are in, or by the prefix of their names."""
    with statekit.open(case("two_nets") / tree, model_key=key) as opened:
        assert opened.counts.updates == updates


def test_the_lines_of_a_train_state_of_flax_run(capsys: pytest.CaptureFixture[str]) -> None:
    """resume_trainstate: CheckpointManager's step, params and opt_state; a program has params of their shapes."""
    import jax

    folder = case("resume_trainstate") / "run"
    with statekit.open(folder) as opened:
        stored = {path: np.asarray(tensor.read()) for path, tensor in opened.params.items()}
        moments = {path: np.asarray(slots["m"].read()) for path, slots in opened.slots.items()}
    params: dict[str, Any] = {}
    for path, value in stored.items():
        *above, last = path.split("/")
        node = params
        for key in above:
            node = node.setdefault(key, {})
        node[last] = np.zeros_like(value)
    program: dict[str, Any] = {"params": jax.tree.map(jax.numpy.asarray, params)}
    exec(told_lines(folder, capsys).replace("learning_rate=...", "learning_rate=0.01"), program)
    restored = program["state"]
    assert restored["step"] == 5 == restored["opt_state"][0].count
    for path, value in stored.items():
        param, moment = restored["params"], restored["opt_state"][0].mu
        for key in path.split("/"):
            param, moment = param[key], moment[key]
        assert np.array_equal(param, value) and np.array_equal(moment, moments[path])


def test_a_schedule_before_adam_is_asked_for_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """schedule_before_adam: what scales gradients before Adam is no rate behind it."""
    [folder] = [path for path in case("schedule_before_adam").iterdir() if path.is_dir()]
    refusal = told(["convert", folder, tmp_path / "x.pt"], 3, capsys)
    assert "before Adam" in refusal
    assert main(["convert", str(folder), str(tmp_path / "neutral"), "--to", "statekit"]) == 0


def test_icefalls_whole_file_goes_back_with_its_average_scaler_and_sampler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """icefall's checkpoint.py, `save_checkpoint`, around a recorded ScaledAdam of bfloat16, saved under DDP."""
    [recorded] = (HERE / "golden" / "scaled_adam" / "zipformer2025_bf16" / "checkpoint").glob("*.pt")
    tree = torch.load(recorded, weights_only=False)
    weights = {f"module.{name}": value for name, value in tree["model"].items()}
    sampler = {"epoch": 2, "rank": 0, "time_constraint": {"max_duration": 600.0, "max_cuts": None}}
    tree |= {
        "model": weights,
        "model_avg": {name: value.double() for name, value in tree["model"].items()},
        "grad_scaler": {"scale": 2.0, "growth_factor": 2.0, "growth_interval": 2000, "_growth_tracker": 7},
        "sampler": {**sampler, "diagnostics": {"stats_per_epoch": {2: {"num_batches": 7}}}},
        "exp_dir": Path("zipformer/exp"),
        "use_fp16": True,
    }
    torch.save(tree, tmp_path / "checkpoint-4.pt")
    assert "BITWISE" in told(["convert", tmp_path / "checkpoint-4.pt", tmp_path / "again.pt"], 0, capsys)
    assert "nothing found" in told(["doctor", tmp_path / "checkpoint-4.pt"], 0, capsys)
    again = torch.load(tmp_path / "again.pt", weights_only=False)
    assert again["grad_scaler"] == tree["grad_scaler"] and again["sampler"] == tree["sampler"]
    for place in ("model", "model_avg"):
        assert again[place].keys() == tree[place].keys()
        assert all(torch.equal(again[place][name], value) for name, value in tree[place].items())
    for number, slots in tree["optimizer"]["state"].items():
        kept = again["optimizer"]["state"][number]
        assert all(
            torch.equal(kept[name], value) for name, value in slots.items() if isinstance(value, torch.Tensor)
        )


# Transformers


def trainers_run(model: Any, data: list[dict[str, Any]], folder: Path, **arguments: Any) -> Any:
    import transformers

    settings = transformers.TrainingArguments(
        str(folder), max_steps=3, save_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, lr_scheduler_type="cosine",
    )  # fmt: skip
    trainer = transformers.Trainer(model, settings, train_dataset=data, **arguments)
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_experts_that_transformers_saves_apart_are_one_parameter_of_the_run(
    kind: str, tmp_path: Path
) -> None:
    """Seen red: attest raised for a right resume, as no tensor of the file had the name of a live parameter."""
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    experts = (
        {"num_local_experts": 4} if kind == "Mixtral" else {"num_experts": 4, "moe_intermediate_size": 8}
    )
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **experts, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(3, 32, (16, 8))]
    trainer = trainers_run(model, data, tmp_path)
    run = tmp_path / "checkpoint-3"
    live = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert attest(live, model, run, scheduler=trainer.lr_scheduler).passed
    name = "model/layers/0/mlp/experts/gate_up_proj"
    param = model.model.layers[0].mlp.experts.gate_up_proj
    with statekit.open(run) as opened:
        assert np.array_equal(np.asarray(opened.params[name].read()), param.detach().numpy())
        assert np.array_equal(
            np.asarray(opened.slots[name]["m"].read()), live.state[param]["exp_avg"].numpy()
        )
    (tmp_path / "again").mkdir()
    statekit.convert(run, tmp_path / "again" / "checkpoint-3", to="hf-trainer")
    again = type(model).from_pretrained(tmp_path / "again" / "checkpoint-3")
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())
    fresh = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    assert not attest(fresh, model, run).passed


@pytest.mark.slow
def test_a_file_of_names_tells_the_order_of_a_run_with_a_frozen_encoder(tmp_path: Path) -> None:
    """A frozen tower leaves more parameters of a shape than the optimizer moves: only the run knows which."""
    import transformers

    from statekit.hf import NamesCallback

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    )
    model.transformer.h[0].requires_grad_(False)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (16, 8))]
    trainer = trainers_run(model, data, tmp_path, callbacks=[NamesCallback()])
    run = tmp_path / "checkpoint-3"
    live = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    name, param = next(
        pair for pair in model.named_parameters() if pair[0] == "transformer.h.1.attn.c_attn.weight"
    )
    with statekit.open(run) as opened:
        moment = opened.slots[name.replace(".", "/")]["m"].read()
        assert np.array_equal(np.asarray(moment), live.state[param]["exp_avg"].numpy())
    (run / "parameter_names.json").unlink()
    with pytest.raises(NamesError, match=r"in the optimizer, .* in the model"):
        statekit.open(run)


# SpeechBrain


SPEECHBRAIN = HERE / "cases" / "speechbrain"
"""Checkpoints of SpeechBrain 1.1.2's Checkpointer: two modules under one AdamW, and each under its own."""


def test_each_object_of_speechbrain_lies_in_a_file_and_all_are_one_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: a folder with two models was no checkpoint, and lr_annealing.ckpt was lost in silence."""
    folder = SPEECHBRAIN / "two_models"
    state = torch.load(folder / "optimizer.ckpt", weights_only=True)["state"]
    # The run's modules are enc and dec, and their files lie the other way round: shapes tell.
    names = ["enc/0/weight", "enc/0/bias", "dec/weight", "dec/bias"]
    assert_moments(folder, {name: state[i]["exp_avg"].numpy() for i, name in enumerate(names)})
    with statekit.open(folder) as opened:
        assert "lr_annealing" in opened.state.extra["torch"]
    assert "nothing found" in told(["doctor", folder], 0, capsys)
    assert "BITWISE" in told(["convert", folder, tmp_path / "run.pt"], 0, capsys)
    assert "checkpointer.recover_if_possible" in told(["resume", folder], 0, capsys)


def test_of_modules_with_equal_shapes_the_order_of_files_tells_nothing(tmp_path: Path) -> None:
    parts = {name: torch.nn.Linear(3, 3) for name in ("query", "key")}
    optimizer = trained(
        torch.nn.ModuleDict(parts), torch.optim.AdamW(torch.nn.ModuleDict(parts).parameters())
    )
    objects: dict[str, Any] = {**parts, "optimizer": optimizer}
    for name, part in objects.items():
        torch.save(part.state_dict(), tmp_path / f"{name}.ckpt")
    (tmp_path / "CKPT.yaml").write_text("end-of-epoch: true\n")
    with pytest.raises(NamesError):
        statekit.open(tmp_path)
    order = [f"{name}.{kind}" for name in parts for kind in ("weight", "bias")]
    moments = [
        optimizer.state[param]["exp_avg"].numpy() for part in parts.values() for param in part.parameters()
    ]
    expected = {name.replace(".", "/"): moment for name, moment in zip(order, moments, strict=True)}
    assert_moments(tmp_path, expected, param_names=order)


def test_several_optimizers_of_speechbrain_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = SPEECHBRAIN / "two_optimizers"
    asked = told(["convert", folder, tmp_path / "x.pt"], 3, capsys)
    assert "optimizers at modelopt, wav2vec_opt" in asked and "--model-key model --optimizer-key" in asked
    told_of = ["--model-key", "wav2vec2", "--optimizer-key", "wav2vec_opt"]
    assert "BITWISE" in told(["convert", folder, tmp_path / "x.pt", *told_of], 0, capsys)


# LoRA of diffusers


class Attention(torch.nn.Module):
    """The projections of diffusers' attention with PEFT's adapters, by the names of a live UNet."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k = self.adapted(), self.adapted()
        self.to_out = torch.nn.ModuleList([self.adapted()])

    def adapted(self) -> torch.nn.Module:
        pairs = {"lora_A": torch.nn.Linear(4, 2, bias=False), "lora_B": torch.nn.Linear(2, 4, bias=False)}
        return torch.nn.ModuleDict(
            {key: torch.nn.ModuleDict({"default": part}) for key, part in pairs.items()}
        )


def name_of_diffusers(name: str, is_old: bool) -> str:
    """Returns the name in a file of diffusers 0.42, or of those before PEFT, whose processors had the matrices."""
    name = name.replace(".lora_A.default", ".lora.down").replace(".lora_B.default", ".lora.up")
    if is_old:
        name = (
            name.replace("to_out.0", "to_out").replace(".lora", "_lora").replace("attn1.", "attn1.processor.")
        )
    return f"unet.{name}"


@pytest.mark.parametrize("is_old", [False, True])
def test_the_lora_names_of_diffusers_are_those_of_the_live_adapter(is_old: bool, tmp_path: Path) -> None:
    """Seen red with diffusers 0.42.1 and PEFT 0.21.2: attest raised that the model hasn't the names."""
    from safetensors.torch import save_file

    model = torch.nn.ModuleDict({"attn1": Attention()})
    optimizer = adamw(model)
    weights = {name_of_diffusers(name, is_old): part.detach() for name, part in model.named_parameters()}
    assert f"unet.attn1.{'processor.to_out_' if is_old else 'to_out.0.'}lora.down.weight" in weights
    save_file(weights, tmp_path / "pytorch_lora_weights.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    assert attest(optimizer, model, tmp_path).passed
    live: Any = load_optimizer(tmp_path, model.named_parameters(), param_names=[*weights])
    param = model.get_parameter("attn1.to_out.0.lora_B.default.weight")
    assert torch.equal(live.state[param]["m"], optimizer.state[param]["exp_avg"])
    swapped = copy.deepcopy(optimizer.state_dict())
    swapped["state"][0], swapped["state"][2] = swapped["state"][2], swapped["state"][0]
    optimizer.load_state_dict(swapped)
    assert not attest(optimizer, model, tmp_path).passed


def test_the_old_lora_names_of_text_encoders_are_those_of_peft() -> None:
    """Seen red with the names of diffusers' `DIFFUSERS_OLD_TO_PEFT` beside a PEFT model's."""
    layer = "text_model.encoder.layers.0.self_attn"
    live = [f"{layer}.{part}_proj.lora_{m}.default.weight" for part in ("q", "k", "v", "out") for m in "AB"]
    old = [
        f"text_encoder.{layer}.to_{part}_lora.{m}.weight"
        for part in ("q", "k", "v", "out")
        for m in ("down", "up")
    ]
    assert wrapped_names(live, old) == dict(zip(live, old, strict=True))


@pytest.mark.parametrize("is_scaled", [False, True])
def test_adafactor_of_transformers_over_bfloat16_goes_on_in_the_drop_in(
    is_scaled: bool, tmp_path: Path
) -> None:
    """Seen red: verify refuted it though right, since torch's load casts the source's own slots."""
    transformers = pytest.importorskip("transformers.optimization")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)).bfloat16()
    options = {"lr": 0.01, "relative_step": False, "scale_parameter": is_scaled}
    optimizer = transformers.Adafactor(model.parameters(), **options)
    for _ in range(3):
        model(torch.randn(5, 4).bfloat16()).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    source, target = tmp_path / "run.pt", tmp_path / "there.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    assert main(["convert", str(source), str(target), "--layout", "statekit-torch"]) == 0
    assert main(["verify", str(source), str(target)]) == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("gradient_accumulation_steps", 4),
        ("label_smoothing_factor", 0.1),
        ("neftune_noise_alpha", 5.0),
        ("average_tokens_across_devices", False),
    ],
)
def test_what_else_trainers_arguments_do_to_gradients_is_named(
    option: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    step = tmp_path / "checkpoint-6"
    shutil.copytree(HERE / "cases" / "lora_trainer" / "run" / "checkpoint-6", step)
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, **{option: value})
    torch.save(arguments, step / "training_args.bin")
    names = str(HERE / "cases" / "lora_trainer" / "names.txt")
    for given in (["--param-names", names], []):  # an order of parameters isn't needed for it
        assert main(["inspect", str(step), *given]) == 0
        assert f"{option}={value}" in capsys.readouterr().out


def test_slots_of_matrices_alone_are_no_fault_of_an_optimizer_whose_rule_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As CAME, SOAP and timm's Adafactor save them. Seen red: doctor ended with 1, as vectors lacked the matrices'."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    params = [*model.parameters()]
    state: dict[int, dict[str, Any]] = {
        i: {"tide": torch.rand(param.shape), **({"row": torch.rand(len(param))} if param.ndim > 1 else {})}
        for i, param in enumerate(params)
    }
    groups = [{"tempo": 0.5, "params": [*range(len(params))]}]
    tree = {"model": model.state_dict(), "optimizer": {"state": state, "param_groups": groups}, "step": 3}
    torch.save(tree, tmp_path / "run.pt")
    assert "nothing found" in told(["doctor", tmp_path / "run.pt"], 0, capsys)
    del state[0]["row"]
    torch.save(tree, tmp_path / "cut.pt")
    assert "slots/0/weight/row" in told(["doctor", tmp_path / "cut.pt"], 1, capsys)
