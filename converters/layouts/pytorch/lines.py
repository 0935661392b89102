"""The lines by which PyTorch, Accelerate, Lightning and Transformers' Trainer go on from a checkpoint.

Groups are made by name: of the manifest of a conversion, or as statekit reads them where a file only numbers them.

Source: pytorch/pytorch torch/optim/optimizer.py, `Optimizer.load_state_dict`; torch/distributed/checkpoint
(state_dict.py, hf_storage.py); torch/distributed/fsdp `optim_state_dict_to_load`;
huggingface/accelerate src/accelerate/accelerator.py, `Accelerator.load_state`; huggingface/transformers
src/transformers/trainer.py, `Trainer.train`; src/transformers/modeling_utils.py, `PreTrainedModel.from_pretrained`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any

from statekit.files.checkpoint import CLASSES as REFUSED_CLASSES
from statekit.files.checkpoint import RANK, Checkpoint
from statekit.lines.printing import (
    UNKNOWN,
    SavedRun,
    State,
    after_loading,
    given_options,
    has_several,
    kind_of,
    listed,
    model_place,
    native_arguments,
    own_call,
    paths_of,
    quoted,
    subscripts,
)
from statekit.lines.rate_code import MATH
from statekit.lines.rates import RatesOf
from statekit.state.evidence import BEYOND, DIALECT, OPTIMIZER, SCALED
from statekit.state.param_names import WRAPPERS
from statekit.state.schema import is_native, load_schema

_ADAMW, _ADAM = "torch.optim.AdamW", "torch.optim.Adam"
CLASSES: Mapping[tuple[str, str | None], str] = {
    ("adamw", "torch"): _ADAMW,
    ("adafactor", "torch"): "torch.optim.Adafactor",
    ("muon", "torch"): "torch.optim.Muon",
    ("adafactor", "hf"): "transformers.optimization.Adafactor",
}
_BY_NAME: Mapping[str, Sequence[str]] = {
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
    "Adagrad": ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize"),
    "Adadelta": ("lr", "rho", "eps", "weight_decay", "maximize"),
    "Adamax": ("lr", "betas", "eps", "weight_decay", "maximize"),
    "NAdam": ("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize"),
    "RAdam": ("lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize"),
    "Rprop": ("lr", "etas", "step_sizes", "maximize"),
    "ASGD": ("lr", "lambd", "alpha", "t0", "weight_decay", "maximize"),
    "SparseAdam": ("lr", "betas", "eps", "maximize"),
}
"""Arguments by which PyTorch makes an optimizer that has no schema, by the word behind `torch` in its signature's name.

Source: pytorch/pytorch torch/optim/sgd.py, rmsprop.py, adagrad.py, adadelta.py, adamax.py, nadam.py, radam.py,
rprop.py, asgd.py, sparse_adam.py.
"""
CLASS, OPTIONS = "optimizer_class", "optimizer_options"
"""Keys of a state with the class of an optimizer that isn't its schema's usual one in PyTorch, and its options."""
_STATE = ("/state/", "/state.")
"""What stands between an optimizer's place and a parameter's, in its forms by index or name, and flat."""
_LIGHTNING = '["state_dict"]', '["optimizer_states"][0]'
"""Where Lightning keeps the model and the first optimizer."""
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
"""Names of what batch normalisation keeps beside its parameters."""
_BY_LIBRARY = {
    "mmengine.": [
        "import os",
        "# without it PyTorch refuses what MMEngine saves, from 2.6 on: only of a file you trust",
        'os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"',
        "runner._load_from, runner._resume = {path}, True  # as Runner(load_from=..., resume=True) has them",
        "runner.train()  # which loads it once hooks have their averages",
    ],
    "stable_baselines3": [
        "# Algorithm: the class that saved it, such as stable_baselines3.PPO",
        "model = Algorithm.load({path}, env=env)",
        "model.learn(total_timesteps=..., reset_num_timesteps=False)",
    ],
    "ultralytics.": ["import ultralytics", "ultralytics.YOLO({path}).train(resume=True)"],
    "speechbrain": [
        "# checkpointer: that of the run's Brain, which has each object under the name of its file",
        "checkpointer.recover_if_possible(ckpt_predicate=lambda checkpoint: str(checkpoint.path) == {path})",
    ],
}
"""What goes on from a library's whole file, by what the classes in it are called.

Source: open-mmlab/mmengine mmengine/runner/runner.py, `Runner.resume`; DLR-RM/stable-baselines3
stable_baselines3/common/base_class.py, `BaseAlgorithm.load`; speechbrain/speechbrain, utils/checkpoints.py,
`Checkpointer.recover_if_possible`; ultralytics/ultralytics, ultralytics/engine/trainer.py, `check_resume`.
"""
_CLIP = "global_norm_clip_threshold"
_DECOUPLED = "decoupled_weight_decay"
_ENGINE_CLIPS = "# without gradient_clipping in config DeepSpeed clips at a norm of 1.0; 0.0 is none"
_WITHOUT_ADAPTER = '.replace(".modules_to_save.default", "").replace(".default", "")'
_WITHOUT_WRAPPER = '.replace("_fsdp_wrapped_module.", "")'
_FSDP1 = "FullyShardedDataParallel"
_BEFORE = "before the state is loaded: making it sets the rate"
_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_FLAT = "options = StateDictOptions(flatten_optimizer_state_dict=True)"
_RANK = "rank = torch.distributed.get_rank()  # as many ranks as wrote it, each with its own file"
_OF_RANK, _ALL = f'.replace("{RANK}", str(rank))', ""
"""What makes the name of a rank's file, and the part of a run that is all of it."""


def torch_file_lines(state: State, saved: SavedRun, form: str | None) -> list[str]:
    """Returns the lines for a file of torch.save.

    Args:
        state: The state.
        saved: Its checkpoint.
        form: How the optimizer lies in it: by index, or by `name`, or `flat`.
    """
    path, keys = quoted(saved.path), _optimizer_keys(saved)
    model, optimizer = model_keys(state, saved), [*keys, '["optimizer"]'][0]
    if form is None and (model, optimizer) == _LIGHTNING:
        return [f"trainer.fit(model, ckpt_path={path})"]
    if lines := _library_lines(saved, path):
        return lines
    if form is None and len(keys) == 1 and has_several(state):
        call = _two_rule_call(state)
        return _one_class_lines(state, saved, call) if call else _several_lines(state, saved)
    if form is None and len(keys) > 1:
        return _several_lines(state, saved)
    modules = {
        "name": [f"from {_STATE_DICT} import set_optimizer_state_dict"],
        "flat": [f"from {_STATE_DICT} import StateDictOptions, set_optimizer_state_dict"],
    }
    record = f"checkpoint{optimizer}"
    load = {
        None: [f"optimizer.load_state_dict({_as_loaded(record, saved)})"],
        "name": [f"set_optimizer_state_dict(model, optimizer, {record})"],
        "flat": [_FLAT, f"set_optimizer_state_dict(model, optimizer, {record}, options=options)"],
    }
    rates = saved.rates(state)
    return [
        *_group_imports(state, saved),
        *_imports(state),
        *modules.get(form or "", []),
        *_load_lines(state, saved),
        *_wrapper_lines(saved),
        *_model_lines(state, saved),
        *after_loading(state, saved),
        *(['manifest = json.loads(checkpoint["statekit"])'] if saved.is_converted else []),
        *_group_lines(state, saved),
        *_optimizer_lines(state, saved),
        *(_apart_lines(state) if form == "flat" else []),
        *load[form],
        *_mode_lines(state),
        *(_back_lines(state) if form == "flat" else _empty_group_lines(state) if form else []),
        *_late_schedule(rates, f"checkpoint{subscripts(rates.torch_place)}"),
    ]


def _mode_lines(state: State) -> list[str]:
    """Returns the line that a schedule-free optimizer needs whose weights were saved as averages."""
    averaged = any(group["hyperparameters"].get("train_mode") is False for group in state["groups"])
    return ["optimizer.train()  # the weights were saved as averages, as eval() leaves them"] * averaged


def program_lines(checkpoint: Checkpoint) -> list[str]:
    """Returns the lines that load a whole checkpoint in the program that saved it; none if the library has none.

    They need neither the parameters' names nor a known optimizer.
    """
    path, tree, meta = checkpoint.path, checkpoint.tree, checkpoint.meta
    classes = meta.get(REFUSED_CLASSES, "")
    match checkpoint.container:
        case "hf-trainer":
            return [*_trusted(classes), f"trainer.train(resume_from_checkpoint={quoted(path)})"]
        case "accelerate":
            prepared = "after accelerator.prepare of all that the run prepared, in its order"
            return [*_trusted(classes), f"accelerator.load_state({quoted(path)})  # {prepared}"]
        case "torch" if isinstance(tree, Mapping) and "pytorch-lightning_version" in tree:
            return [f"trainer.fit(model, ckpt_path={quoted(path)})"]
    saved = SavedRun(checkpoint.container, "", path, None, classes=classes)
    return _library_lines(saved, quoted(path))


def _trusted(classes: str) -> list[str]:
    """Returns the lines without which libraries refuse a state that has objects of some classes.

    Source: huggingface/transformers src/transformers/trainer.py, `_load_optimizer_and_scheduler`: weights_only=True.
    """
    names = classes.split(", ")
    if not all(re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name) for name in names):
        return [f"# torch.load(weights_only=True) refuses {classes}, and it loads the optimizer"] * bool(
            classes
        )
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
    return [
        "import torch",
        *(f"import {module}" for module in modules),
        "# weights_only=True, by which the optimizer is loaded, refuses these: only of a file you trust",
        f"torch.serialization.add_safe_globals([{', '.join(names)}])",
    ]


def _library_lines(saved: SavedRun, path: str) -> list[str]:
    """Returns the lines of the library that saves a whole file and loads it; none of a file that programs load."""
    lines = (lines for name, lines in _BY_LIBRARY.items() if name in saved.classes)
    return [line.format(path=path) for line in next(lines, [])]


def _load_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines that read `checkpoint`: a file, or the files that lie in a folder as its parts."""
    if not saved.halves:
        return [f"checkpoint = {saved.torch_load(quoted(saved.path))}"]
    if _ALL in saved.halves:
        file = quoted(saved.path / saved.halves[_ALL])
        return [_RANK, f"checkpoint = {saved.torch_load(f'{file}{_OF_RANK}')}"]
    rates = saved.rates(state)
    keys = [model_keys(state, saved), *_optimizer_keys(saved)]
    needed = {"optimizer", *rates.torch_place.split("/")[:1]}
    needed |= {part for part in saved.halves if any(key.startswith(f'["{part}"]') for key in keys)}
    files = {part: str(saved.path / name) for part, name in saved.halves.items() if part in needed}
    of_ranks = any(RANK in file for file in saved.halves.values())
    return [
        *([_RANK] if of_ranks else []),
        f"files = {{{', '.join(f'{quoted(part)}: {quoted(file)}' for part, file in files.items())}}}",
        "checkpoint = {}",
        "for part, file in files.items():",
        f"    checkpoint[part] = {saved.torch_load(f'file{_OF_RANK}' if of_ranks else 'file')}",
    ]


def _two_rule_call(state: State) -> list[str]:
    """Returns the lines that make an optimizer of `groups` whose class has two rules; none of several classes.

    Source: KellerJordan/Muon muon.py, `SingleDeviceMuonWithAuxAdam`; MoonshotAI/Moonlight toy_train.py, `Muon`.
    """
    kinds = [
        (kind["schema"], kind["variant"]) for kind in (kind_of(state, group) for group in state["groups"])
    ]
    is_muon = [schema == "muon" for schema, _ in kinds]
    variants = {variant for _, variant in kinds}
    if variants == {"keller"}:
        return [
            "import muon",
            f'rules = [{{**group, "use_muon": rule}} for group, rule in zip(groups, {is_muon})]',
            "optimizer = muon.SingleDeviceMuonWithAuxAdam(rules)",
        ]
    if variants == {"moonlight"} and is_muon == [True, False]:
        arguments = 'muon_params=groups[0]["params"], adamw_params=groups[1]["params"]'
        return ["from toy_train import Muon  # of Moonlight's examples", f"optimizer = Muon({arguments})"]
    return []


def _one_class_lines(state: State, saved: SavedRun, call: Sequence[str]) -> list[str]:
    """Returns the lines for a file of torch.save with one optimizer whose class has two rules."""
    return [
        *_group_imports(state, saved),
        "import torch",
        *_load_lines(state, saved),
        *_model_lines(state, saved),
        *(['manifest = json.loads(checkpoint["statekit"])'] if saved.is_converted else []),
        *_group_lines(state, saved),
        *call,
        f"optimizer.load_state_dict(checkpoint{_optimizer_keys(saved)[0]})",
    ]


def distributed_lines(state: State, saved: SavedRun, form: str | None) -> list[str]:
    """Returns the lines for a folder of torch.distributed.checkpoint."""
    rates = saved.rates(state)
    schedule = f"parts{subscripts(rates.torch_place)}"
    flat = form == "flat"
    names = "StateDictOptions, get_state_dict, set_state_dict" if flat else "get_state_dict, set_state_dict"
    options = ", options=options" if flat else ""
    weights, slots = 'model_state_dict=parts["model"]', 'optim_state_dict=parts["optimizer"]'
    is_loose = any(path.replace("/", ".") in saved.tensors for path in paths_of(state))
    loaded = "{key: part for key, part in parts.items() if key != 'model'}" if is_loose else "parts"
    put = [
        'states = {"model_state_dict": parts["model"], "optim_state_dict": parts["optimizer"]}',
        "set_state_dict(model, optimizer, **states, options=options)",
    ]
    return [
        *_group_imports(state, saved, "import pathlib"),
        *_imports(state),
        "import torch.distributed.checkpoint as dcp",
        f"from {_STATE_DICT} import {names}",
        *_manifest_in_folder(saved),
        *_group_lines(state, saved),
        *_optimizer_lines(state, saved),
        *([_FLAT, *_apart_lines(state)] if flat else []),
        f'parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer{options})))',
        *([f"{schedule} = scheduler.state_dict()"] if rates.torch_call() else []),
        *(
            ["parts = {**parts, **parts['model']}  # as torchtitan has weights: at the top"]
            if is_loose
            else []
        ),
        f"dcp.load({loaded}, checkpoint_id={quoted(saved.path)})",
        *(put if flat else [f"set_state_dict(model, optimizer, {weights}, {slots})"]),
        *(_back_lines(state) if flat else _empty_group_lines(state)),
        *_late_schedule(rates, schedule),
    ]


def distributed_safetensors_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for torch.distributed.checkpoint's storage of Hugging Face: tensors and counts in shards."""
    rates, options = saved.rates(state), quoted(saved.path / "optimizer_hyperparameters.json")
    schedule = UNKNOWN  # a program of torch keeps it elsewhere
    if saved.is_converted:
        schedule = f'manifest["kept"]["extra"]["torch"]{subscripts(rates.torch_place)}'
    return [
        *_group_imports(state, saved),
        "import json",
        "import pathlib",
        *_imports(state),
        "import torch.distributed.checkpoint as dcp",
        f"from {_STATE_DICT} import StateDictOptions, get_state_dict, set_state_dict",
        *_manifest_in_folder(saved),
        *_group_lines(state, saved),
        *_optimizer_lines(state, saved),
        _FLAT,
        *_apart_lines(state),
        "weights, slots = get_state_dict(model, optimizer, options=options)",
        'tensors = {f"optim.{name}": value for name, value in slots.items() if torch.is_tensor(value)}',
        'counts = {f"optim.{name}": torch.tensor(value) for name, value in slots.items() '
        'if type(value) is int and name.startswith("state.")}',
        "dcp.load({**weights, **tensors, **counts}, "
        f"storage_reader=dcp.HuggingFaceStorageReader({quoted(saved.path)}))",
        'slots.update({name.removeprefix("optim."): value.item() for name, value in counts.items()})',
        f"slots.update(json.loads(pathlib.Path({options}).read_text()))",
        "set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=slots, options=options)",
        *_back_lines(state),
        *_late_schedule(rates, schedule),
    ]


def rank_lines(saved: SavedRun) -> list[str]:
    """Returns the lines for what each rank of FSDP 1 saved for itself."""
    return [_RANK, f'part = torch.load({quoted(saved.path)} + f"/rank{{rank}}.pt")']


_EXPERT = re.compile("/deepspeed_experts/")
_ANY_STAGE = "with any ZeRO stage from 1 to 3, on any ranks"


def deepspeed_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for a checkpoint of DeepSpeed: what it wrote itself needs the engine alone.

    Source: deepspeedai/DeepSpeed deepspeed/runtime/engine.py, `load_checkpoint`; runtime/zero/stage3.py,
    `load_hp_checkpoint_state_from_checkpoint_dir_stage3`.
    """
    path = saved.step_path("global_step{step}_universal") if saved.is_converted else saved.path
    where = f"{quoted(path.parent)}, tag={quoted(path.name)}"
    if not saved.is_converted:
        return [f"engine.load_checkpoint({where})"]
    rates, weights = saved.rates(state), quoted(path / "mp_rank_00_model_states.pt")
    schedule = ", lr_scheduler=scheduler" if rates.torch_call() else ""
    without = "" if rates.torch_call() else ", load_lr_scheduler_states=False"
    norms = {group["hyperparameters"].get(_CLIP) for group in state["groups"]} - {None, 0.0}
    record, why = f'torch.load({weights}, weights_only=True)["module"]', "what DeepSpeed leaves as it is"
    loading = [f"model.load_state_dict({record})  # {why}: buffers, frozen weights"]
    if _is_pipeline(state):
        loads = "model.load_state_dict({name: weights[name] for name in model.state_dict()})"
        loading = [f"weights = {record}", f"{loads}  # a stage has its own layers alone"]
    marking, stages, again = _experts_lines(state) or ([], _ANY_STAGE, _after_stage_3(state))
    return [
        *_group_imports(state, saved, "import pathlib"),
        *_imports(state),
        "import deepspeed",
        *loading,
        *_manifest_in_folder(saved),
        *_group_lines(state, saved),
        *marking,
        *_optimizer_lines(state, saved),
        *([f"# config['gradient_clipping'] is {norm!r} in the run" for norm in norms] or [_ENGINE_CLIPS]),
        f'config = {{**config, "checkpoint": {{"load_universal": True}}}}  # {stages}',
        f"engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config{schedule})[0]",
        f"engine.load_checkpoint({where}{without})",
        *again,
        *([] if rates.torch_call() else rates.torch_lines() or rates.comment()),
    ]


def _experts_lines(state: State) -> tuple[list[str], str, list[str]] | None:
    """Returns the lines that mark groups of experts, before loading and behind it, and under which stages they go on.

    DeepSpeed marks them itself only where it makes the optimizer. None where there are no experts.
    Source: deepspeedai/DeepSpeed deepspeed/moe/utils.py, `configure_moe_param_groups`; runtime/zero/stage_1_and_2.py,
    `_configure_moe_settings`.
    """
    numbers = [i for i, group in enumerate(state["groups"]) if any(map(_EXPERT.search, group["paths"]))]
    if not numbers:
        return None
    marking = [
        f'experts = {{i: groups[i]["params"][0].group_name for i in {numbers}}}  # the name of their ranks',
        "for i, name in experts.items():",
        "    groups[i].update(moe=True, name=name)  # without the mark DeepSpeed refuses the optimizer",
    ]
    again = [
        "for i, name in experts.items():",
        '    optimizer.param_groups[i]["name"] = name  # loading brings that of the run before',
    ]
    return marking, "with ZeRO stage 1 or 2 and layers of ep_size=1, on any ranks", again


def _is_pipeline(state: State) -> bool:
    """Tells whether all parameters have names as in a pipeline: the number of a layer, or what layers share."""
    heads = {path.partition("/")[0] for group in state["groups"] for path in group["paths"]}
    return all(head == "tied_modules" or head.isdigit() for head in heads)


def _after_stage_3(state: State) -> list[str]:
    """Returns the lines that give back what ZeRO 3 shares: one count of all sub-groups, the first group's options."""
    schema, variant = load_schema(state["schema"]), state["variant"]
    options = [schema.native(variant, group["hyperparameters"]) for group in state["groups"] if variant]
    apart = {name for values in options for name, value in values.items() if value != options[0].get(name)}
    differing = [{name: values[name] for name in values if name in apart} for values in options]
    groups = [
        f"for group, options in zip(optimizer.param_groups, {differing!r}):",
        "    group.update(options)  # ZeRO 3 gives every group the first's",
    ]
    return [
        "for slots in optimizer.state.values():",
        '    slots["step"] = slots["step"].clone()  # which all sub-groups of ZeRO 3 share when loaded',
        *(groups if apart else []),
    ]


def accelerate_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for a folder of Accelerate."""
    if len(sides := _sides(state, saved)) > 1:
        rates, (making, schedules) = saved.rates(state), _made_in_folder(state, saved, sides)
        both = "*optimizers, *schedulers" if schedules else "*optimizers"
        return [
            *making,
            f"model, *prepared = accelerator.prepare(model, {both})",
            f"optimizers, schedulers = prepared[:{len(sides)}], prepared[{len(sides)}:]",
            f"accelerator.load_state({quoted(saved.path)})",
            *([] if schedules else rates.torch_lines_of_each(sides) or rates.comment()),
        ]
    return [
        *_group_imports(state, saved, "import pathlib"),
        *_imports(state),
        *_manifest_in_folder(saved),
        *_group_lines(state, saved),
        *_optimizer_lines(state, saved),
        *prepared_lines(saved.rates(state), saved),
    ]


def prepared_lines(rates: RatesOf, saved: SavedRun) -> list[str]:
    """Returns the lines that give Accelerate a model, an `optimizer` and its schedule, and load their states."""
    names = "model, optimizer, scheduler" if rates.torch_call() else "model, optimizer"
    schedule = [] if rates.torch_call() else rates.torch_lines()
    return [
        f"{names} = accelerator.prepare({names})",
        f"accelerator.load_state({quoted(saved.path)})",
        *(schedule or ([] if rates.torch_call() else rates.comment())),
        *(["scheduler = accelerator.prepare(scheduler)  # which saves it, too"] if schedule else []),
    ]


_OPTIMIZERS = re.compile(r"optimizer(_\w+)?\.(pt|bin)")
"""The files of several optimizers, in whose order they lie."""


def pretrained_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for a model of Transformers in safetensors, beside which lies optimizer.pt."""
    path, rates, sides = saved.path, saved.rates(state), _sides(state, saved)
    if len(sides) > 1:
        loaded = f"model = type(model).from_pretrained({quoted(path)})  # with the model's config.json in the folder"
        making, _ = _made_in_folder(state, saved, sides, loaded)
        files = [quoted(path / file) for file in sorted(saved.files) if _OPTIMIZERS.fullmatch(file)]
        return [
            *making,
            f"for optimizer, file in zip(optimizers, [{', '.join(files)}]):",
            "    optimizer.load_state_dict(torch.load(file, weights_only=True))",
            *(rates.torch_lines_of_each(sides) or rates.comment()),
        ]
    return [
        *_group_imports(state, saved, "import pathlib"),
        *_imports(state),
        f"model = type(model).from_pretrained({quoted(path)})  # with the model's config.json in the folder",
        *_manifest_in_folder(saved),
        *_group_lines(state, saved),
        *_optimizer_lines(state, saved),
        f"optimizer.load_state_dict(torch.load({quoted(path / 'optimizer.pt')}, weights_only=True))",
        *_late_schedule(rates, f"torch.load({quoted(path / 'scheduler.pt')}, weights_only=True)"),
    ]


def trainer_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for a folder of Transformers' Trainer: what it wrote itself needs no optimizer."""
    path = saved.step_path("checkpoint-{step}")
    train = f"trainer.train(resume_from_checkpoint={quoted(path)})"
    norms = {group["hyperparameters"].get(_CLIP) for group in state["groups"]}
    clipped = [f"# args.max_grad_norm is {norm!r} in the run" for norm in norms if norm not in (None, 1.0)]
    if {*scales_of(state)} != {1.0} and any(norms):
        by_hand = "# args.max_grad_norm=0, and clip in a callback's on_pre_optimizer_step: Trainer's norm is another"
        clipped = [by_hand, *clip_comment(state)]
    if not saved.is_converted:
        return [*_trusted(saved.classes), *clipped, train]
    schedule, scheduler = trainer_schedule(state, saved)
    named = 'named[name] for name in part["param_names"]'
    reason = "Trainer's own would number the parameters in another order"
    return [
        *_imports(state),
        "import transformers",
        f'parts = torch.load({quoted(path / "optimizer.pt")}, weights_only=True)["param_groups"]',
        "named = dict(model.named_parameters())",
        f'groups = [{{"params": [{named}], "lr": args.learning_rate}} for part in parts]',
        f"optimizer = {_call(state, 'groups')}  # {reason}",
        *schedule,
        *clipped,
        "trainer = transformers.Trainer(model, args, train_dataset=dataset, "
        f"optimizers=(optimizer, {scheduler}))",
        "class Intervals(transformers.TrainerCallback):",
        "    def on_train_begin(self, args, state, control, **others):",
        "        state.compute_steps(args, state.max_steps)  # Trainer takes those of the folder",
        "trainer.add_callback(Intervals())",
        train,
    ]


def trainer_schedule(state: State, saved: SavedRun) -> tuple[list[str], str]:
    """Returns the lines that make the schedule for Transformers' Trainer, and the argument that passes it."""
    rates = saved.rates(state)
    states = [part.value for part in saved.run.parts if part.place.endswith("/trainer_state")]
    # Trainer makes a LambdaLR by its arguments; a batch size of 0 is what a conversion writes.
    by_trainer = any(isinstance(value, Mapping) and value.get("train_batch_size") != 0 for value in states)
    if rates.may_be_trainers and by_trainer:
        return ([] if rates.torch_lines() else rates.comment()), "None"
    if call := rates.torch_call():
        return [*(["import math"] if MATH in call else []), "import torch", *rates.function_comment()], call
    if lines := rates.torch_lines():
        return lines, "scheduler"
    unknown = "# nothing tells the run's schedule: args makes the rates after the next update's"
    return rates.comment() or [unknown], "None"


def with_given(state: State, saved: SavedRun, lines: list[str]) -> list[str]:
    """Returns lines that keep the options that the user gave, in whose place loading puts the file's."""
    options = [_given_of(state, group) for group in state["groups"]]
    if saved.is_converted or not any(options):
        return lines
    if any(line.startswith("optimizer = ") for line in lines):
        return [*lines, *updating("optimizer.param_groups", options)]
    if "optimizers = [" in lines:
        groups = "(group for optimizer in optimizers for group in optimizer.param_groups)"
        return [*lines, *updating(groups, [options[i] for side in _sides(state, saved) for i in side])]
    given = {name: value for group in options for name, value in group.items()}
    return [
        f"# it goes on with the file's options: after loading, update the optimizer's groups by {given!r}",
        *lines,
    ]


def _given_of(state: State, group: Mapping[str, Any]) -> dict[str, Any]:
    given = given_options(state, group, _DECOUPLED)
    return {name: value for name, value in given.items() if name in state.get(OPTIONS, given)}


def updating(groups: str, options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines that give each group its options, once where all have the same."""
    reason = "you gave it; loading brings the file's"
    if all(group == options[0] for group in options):
        return [f"for group in {groups}:", f"    group.update({options[0]!r})  # {reason}"]
    return [f"for group, given in zip({groups}, {options!r}):", f"    group.update(given)  # {reason}"]


def class_of(state: State) -> str:
    """Returns the class of an optimizer of PyTorch or Transformers; `...` where it isn't known."""
    if other := state.get(CLASS):
        return str(other)
    if name := _class_without_schema(state):
        return f"torch.optim.{name}"
    name = CLASSES.get((state["schema"], state["variant"]), UNKNOWN)
    return name.replace("AdamW", "Adam") if _is_plain_adam(state) else name


def _class_without_schema(state: State) -> str:
    """Returns the class of torch.optim that moved a state without a schema; "" for other libraries."""
    library, _, rest = str(state["variant"]).partition(" ")
    name = rest.partition(" ")[0]
    # The options of releases before 1.11 are those of other libraries' classes, too.
    is_of_today = all("maximize" in group["hyperparameters"] for group in state["groups"])
    is_torch = is_native(state["schema"]) and library == "torch" and is_of_today
    return name if is_torch and name in _BY_NAME else ""


def _is_plain_adam(state: State) -> bool:
    """Tells whether every group decays its weights by way of the gradient, as torch.optim.Adam does."""
    is_adam = (state["schema"], state["variant"]) == ("adamw", "torch")
    return is_adam and "decoupled_weight_decay=False" in native_arguments(state)[0]


def _arguments(state: State) -> list[str]:
    """Returns the arguments of an optimizer's class that all groups share; its state has those of each group."""
    if name := _class_without_schema(state):
        return _shared_options(state, _BY_NAME[name])
    arguments = [argument for argument in native_arguments(state)[0] if UNKNOWN not in argument]
    if CLASS in state:
        return [argument for argument in arguments if argument.partition("=")[0] in state[OPTIONS]]
    if not _is_plain_adam(state):
        return arguments
    decayed = any(argument.startswith("weight_decay=") for argument in arguments)
    passed_over = ("decoupled_weight_decay=False", "weight_decay=0", "weight_decay=0.0")
    usual = [] if decayed else ["weight_decay=0.01"]
    return [*(argument for argument in arguments if argument not in passed_over), *usual]


def _shared_options(state: State, names: Sequence[str]) -> list[str]:
    """Returns the options of some names that all groups have alike; zero and False are the usual ones."""
    groups = [group["hyperparameters"] for group in state["groups"]]
    shared = {
        name: groups[0].get(name) for name in names if len({str(group.get(name)) for group in groups}) == 1
    }
    given = {name: value for name, value in shared.items() if value}
    return [f"{name}={tuple(value) if isinstance(value, list) else value!r}" for name, value in given.items()]


def _imports(state: State) -> list[str]:
    """Returns the import of PyTorch, and of the package of an optimizer's class."""
    module = class_of(state).rpartition(".")[0] if class_of(state) != UNKNOWN else ""
    return ["import torch", *([f"import {module}"] if not module.startswith("torch.") and module else [])]


def _group_imports(state: State, saved: SavedRun, *beside: str) -> list[str]:
    """Returns the imports that the lines of `groups` need."""
    if saved.is_converted:
        return ["import json", *beside]
    return [] if _is_whole_model(state, saved) else ["import statekit"]


def _manifest_in_folder(saved: SavedRun) -> list[str]:
    path = quoted(saved.manifest.absolute())
    return [f"manifest = json.loads(pathlib.Path({path}).read_text())"] if saved.is_converted else []


def _group_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines that make `groups` by name; none if they are the model's parameters in its order."""
    if not saved.is_converted and _is_whole_model(state, saved):
        return []
    paths = 'group["paths"]' if saved.is_converted else "group.paths"
    groups = 'manifest["state"]["groups"]' if saved.is_converted else "opened.groups"
    in_stages = saved.container == "deepspeed" and _is_pipeline(state)
    condition = ' if path.replace("/", ".") in named' if in_stages else ""
    model, around = _unwrapped(state, saved)
    name = f'path.replace("/", "."){f".removeprefix({quoted(around)})" if around else ""}'
    params = f'{{"params": [named[{name}] for path in {paths}{condition}]}}'
    code = f"groups = [{params} for group in {groups}]"
    named = f"named = dict({model}.named_parameters())"
    if _is_fsdp1(saved):  # whose wrappers add to names, where they keep the parameters apart
        named = f"named = {{name{_WITHOUT_WRAPPER}: param for name, param in model.named_parameters()}}"
    if _is_adapter(state):
        named = f"named = {{name{_WITHOUT_ADAPTER}: param for name, param in model.named_parameters()}}"
    if saved.is_converted:
        return [named, code]
    return [named, f"with statekit.open({saved.code()}) as opened:", f"    {code}"]


def _model_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines that load a model's weights; a file of PEFT has those of an adapter alone."""
    record = f"checkpoint{model_keys(state, saved)}"
    if _is_adapter(state):
        return ["import peft", f"peft.set_peft_model_state_dict(model, {record})"]
    inner, around = _unwrapped(state, saved)
    if not around:
        return [f"model.load_state_dict({record})"]
    first, *others = around.split(".")[:-1]
    prefix = quoted(around)
    named = f"name.removeprefix({prefix}): value for name, value in {record}.items()"
    return [
        f"{inner} = getattr(model, {quoted(first)}, model)  # whether or not it is wrapped as the run's model was",
        *(f"{inner} = getattr({inner}, {quoted(key)}, {inner})" for key in others),
        f"{inner}.load_state_dict({{{named} if name.startswith({prefix})}})",
    ]


def _unwrapped(state: State, saved: SavedRun) -> tuple[str, str]:
    """Returns what the model without a wrapper is called, and what the wrapper puts before each of its names.

    Source: pytorch/pytorch torch/nn/parallel/distributed.py, `DistributedDataParallel`, whose model is at `module`.
    """
    paths = [path.split("/") for path in paths_of(state)]
    around = list(
        takewhile(lambda keys: len({*keys}) == 1 and keys[0] in WRAPPERS, zip(*paths, strict=False))
    )
    if not around or _is_fsdp1(saved):
        return "model", ""
    return "inner", "".join(f"{keys[0]}." for keys in around)


def _is_adapter(state: State) -> bool:
    """Tells whether parameters are an adapter's of PEFT, under the names of its files.

    Source: huggingface/peft src/peft/utils/save_and_load.py, `get_peft_model_state_dict`.
    """
    paths = paths_of(state)
    return any("/lora_" in path for path in paths) and not any("/default" in path for path in paths)


def _empty_group_lines(state: State) -> list[str]:
    """Returns the lines that give groups without parameters their options again.

    Source: pytorch/pytorch torch/distributed/checkpoint/state_dict.py, `_split_optim_state_dict`, which drops them.
    """
    if all(group["paths"] for group in state["groups"]):
        return []
    return [
        "for group in optimizer.param_groups:",
        "    for name, value in optimizer.defaults.items():",
        "        group.setdefault(name, value)  # set_state_dict drops those of a group without parameters",
    ]


def _apart_lines(state: State) -> list[str]:
    """Returns the lines that take groups without parameters aside while a flat state is loaded.

    Source: pytorch/pytorch torch/distributed/checkpoint/state_dict.py, `_unflatten_optim_state_dict`, which asks each
    group for its first parameter.
    """
    if all(group["paths"] for group in state["groups"]):
        return []
    return [
        "all_groups = optimizer.param_groups",
        'optimizer.param_groups = [group for group in all_groups if group["params"]]  # a flat state has no others',
    ]


def _back_lines(state: State) -> list[str]:
    """Returns the lines that put groups without parameters in their places again."""
    if not _apart_lines(state):
        return []
    return [
        "loaded = iter(optimizer.param_groups)",
        'optimizer.param_groups = [next(loaded) if group["params"] else group for group in all_groups]',
    ]


def _is_fsdp1(saved: SavedRun) -> bool:
    """Tells whether a file has tensors that ranks of FSDP1 share."""
    return "ShardedTensor" in saved.classes


def _wrapper_lines(saved: SavedRun) -> list[str]:
    """Returns the lines that make a model of FSDP1 take tensors that ranks share."""
    if not _is_fsdp1(saved):
        return []
    return [
        f"from torch.distributed.fsdp import {_FSDP1}, StateDictType",
        f"{_FSDP1}.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)  # model: wrapped as in the run",
    ]


def _as_loaded(record: str, saved: SavedRun) -> str:
    """Returns the record of an optimizer as its class loads it."""
    return f"{_FSDP1}.optim_state_dict_to_load(model, optimizer, {record})" if _is_fsdp1(saved) else record


def _is_whole_model(state: State, saved: SavedRun) -> bool:
    """Tells whether the run has one group, of all of the model's parameters in the order of its file."""
    groups = state["groups"]
    if len(groups) != 1 or _is_fsdp1(saved):
        return len(groups) == 1
    moved = [path.replace("/", ".") for path in groups[0]["paths"]]
    place = model_place(saved, groups[0]["paths"])
    if place is None:
        return True
    names = [name.removeprefix(f"{place}/") for name in saved.tensors if name.startswith(f"{place}/")]
    return moved == [name for name in names if name.rpartition(".")[2] not in _BUFFERS]


def _optimizer_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines that make `optimizer`, and the schedule that its file has a state of."""
    grouped = saved.is_converted or not _is_whole_model(state, saved)
    params = f"{_unwrapped(state, saved)[0]}.parameters()"
    arguments = ", ".join(["groups" if grouped else params, *_arguments(state)])
    rates = saved.rates(state)
    making = [f"optimizer = {_call(state, arguments)}"]
    if reason := _own_class(state, saved):
        return [
            f"optimizer = {UNKNOWN}  # the run's own: {reason}",
            *clip_comment(state),
            *early_schedule(rates),
        ]
    if class_of(state) == _ADAMW and (others := _candidates(state)):
        making = [
            f"# the file doesn't say which optimizer it is of ({' or '.join(others)}): keep the run's own line",
            *making,
            *([making[0].replace(_ADAMW, _ADAM)] if "adam" in others else []),
        ]
    return [*making, *clip_comment(state), *early_schedule(rates, f"  # {_BEFORE}")]


def _own_class(state: State, saved: SavedRun) -> str:
    """Returns why no class of PyTorch goes on with a state that is of a dialect of its own; "" where one does."""
    facts = [fact for group in state["groups"] for fact in group.get("facts", ())]
    apart = [fact["because"] for fact in facts if fact["name"] == BEYOND]
    # A conversion writes a dialect's slots as PyTorch's own class has them.
    classes = [fact["value"] for fact in facts if fact["name"] == DIALECT and not saved.is_converted]
    return str(next(iter([*apart, *classes]), ""))


def _candidates(state: State) -> list[str]:
    """Returns the names of the optimizers that a state may be of, where nobody said which."""
    facts = [fact for group in state["groups"] for fact in group.get("facts", ())]
    open_facts = (fact for fact in facts if fact["name"] == OPTIMIZER and fact["source"] == "unknown")
    return next((fact.get("others", []) for fact in open_facts), [])


def _call(state: State, arguments: str) -> str:
    name = class_of(state)
    return own_call(state) if name == UNKNOWN else f"{name}({arguments})"


def clip_comment(state: State) -> list[str]:
    """Returns lines about the clipping of gradients, which a program of PyTorch does itself."""
    norms = {group["hyperparameters"].get(_CLIP) for group in state["groups"]}
    clipped = [norm for norm in norms if norm]
    factors = scales_of(state)
    if {*factors} == {1.0}:
        call = "torch.nn.utils.clip_grad_norm_(model.parameters(), {})"
        return [f"# before each optimizer.step(): {call.format(repr(norm))}" for norm in clipped]
    grads = f"[p.grad * c for group, c in zip(optimizer.param_groups, {factors}) for p in group['params']]"
    return [
        line
        for norm in clipped
        for line in (
            "# before each optimizer.step(), as gradients were before the map scaled their parameters:",
            f"# norm = torch.nn.utils.get_total_norm({grads})",
            f"# torch.nn.utils.clip_grads_with_norm_(model.parameters(), {norm!r}, norm)",
        )
    ]


def scales_of(state: State) -> list[float]:
    """Returns by what a map multiplied the parameters of each group that has some."""
    return [
        next((float(fact["value"]) for fact in group.get("facts", ()) if fact["name"] == SCALED), 1.0)
        for group in state["groups"]
        if group["paths"]
    ]


def early_schedule(rates: RatesOf, reason: str = "") -> list[str]:
    """Returns the lines that make a schedule whose state is loaded later; none if the file has no such state."""
    call = rates.torch_call()
    if call is None:
        return []
    math = ["import math"] if MATH in call else []
    return [*math, *rates.function_comment(), f"scheduler = {call}{reason}"]


def _late_schedule(rates: RatesOf, record: str) -> list[str]:
    """Returns the lines that load a schedule's state, or make the schedule where the file has none."""
    if rates.torch_call():
        return [f"scheduler.load_state_dict({record})"]
    return rates.torch_lines() or rates.comment()


def _several_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for a file with several optimizers, each with groups of its own."""
    sides, keys, rates = _sides(state, saved), _optimizer_keys(saved), saved.rates(state)
    modules, making, schedules = _made_lines(state, saved, sides)
    keys = keys if len(keys) == len(sides) else [f'["optimizers"][{i}]' for i in range(len(sides))]
    records = ", ".join(f"checkpoint{subscripts(place)}" for place in schedules)
    loading = [
        f"for scheduler, state in zip(schedulers, [{records}]):",
        "    scheduler.load_state_dict(state)",
    ]
    return [
        *_group_imports(state, saved),
        *modules,
        *_load_lines(state, saved),
        *_model_lines(state, saved),
        *after_loading(state, saved),
        *(['manifest = json.loads(checkpoint["statekit"])'] if saved.is_converted else []),
        *_group_lines(state, saved),
        *making,
        f"for optimizer, state in zip(optimizers, [{', '.join(f'checkpoint{key}' for key in keys)}]):",
        "    optimizer.load_state_dict(state)",
        *(loading if schedules else rates.torch_lines_of_each(sides) or rates.comment()),
    ]


def _made_lines(
    state: State, saved: SavedRun, sides: Sequence[Sequence[int]]
) -> tuple[list[str], list[str], Sequence[str]]:
    """Returns the imports of several optimizers, the lines that make them, and where their schedules' states lie."""
    modules, calls = ["import torch"], list[str]()
    for numbers in sides:
        kind = kind_of(state, state["groups"][numbers[0]])
        alone = {**state, **kind, "groups": [state["groups"][i] for i in numbers]}
        groups = ", ".join(f"groups[{i}]" for i in numbers)
        modules += _imports(alone)[1:]
        calls.append(_call(alone, ", ".join([f"[{groups}]", *_arguments(alone)])))
    schedules = saved.rates(state).torch_calls(sides)
    making = listed("schedulers", [*schedules.values()]) if schedules else [""]
    making[-1] += "  # before the states are loaded: making them sets the rates"
    lines = [*listed("optimizers", calls), *(making if schedules else [])]
    return [*dict.fromkeys(modules)], lines, [*schedules]


def _made_in_folder(
    state: State, saved: SavedRun, sides: Sequence[Sequence[int]], *model: str
) -> tuple[list[str], Sequence[str]]:
    """Returns all lines that make the optimizers of a folder, with those of its model, and what `_made_lines` does."""
    modules, making, schedules = _made_lines(state, saved, sides)
    groups = [*_manifest_in_folder(saved), *_group_lines(state, saved)]
    return [*_group_imports(state, saved, "import pathlib"), *modules, *model, *groups, *making], schedules


def _sides(state: State, saved: SavedRun) -> list[list[int]]:
    """Returns the numbers of the groups of each optimizer: as they lie side by side, or of each kind."""
    groups, counts = state["groups"], saved.run.optimizers
    ends = list(accumulate(counts))
    if ends and ends[-1] == len(groups) and len(ends) == len(_optimizer_keys(saved)):
        return [list(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]
    kinds = [kind_of(state, group) for group in groups]
    first = {kinds.index(kind): kind for kind in kinds}
    return [[i for i, other in enumerate(kinds) if other == kind] for kind in first.values()]


def model_keys(state: State, saved: SavedRun) -> str:
    """Returns the keys of a file's model, as `["model"]`, the usual one where no tensor's name tells."""
    place = model_place(saved, paths_of(state))
    return '["model"]' if place is None else subscripts(place)


def _optimizer_keys(saved: SavedRun) -> list[str]:
    """Returns the keys of each of a file's optimizers, as `["optimizers"][0]`, in its order, or of the one meant."""
    if saved.ref is not None and saved.ref.optimizer_key is not None:
        return [subscripts(saved.ref.optimizer_key)]
    places = (name.partition(mark)[0] for name in saved.tensors for mark in _STATE if mark in name)
    optimizers = [*dict.fromkeys(places)]
    if not saved.run.optimizers:  # the others move other networks
        marked = [place for place in (*saved.run.places[1:], "optimizer") if place in optimizers]
        optimizers = marked[:1] or optimizers
    return [subscripts(place) for place in optimizers]
