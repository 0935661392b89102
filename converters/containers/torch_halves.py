"""Files of torch.save that are one checkpoint: a model's and its optimizer's in a folder, or the members of an archive.

    model.pt, optim.pt, train.pt, config.yaml      OLMo's unsharded folder
    model.ckpt, optimizer.ckpt, CKPT.yaml          SpeechBrain's: a file for each object, several models among them
    params.pt, optimizer.pt, criterion.pt          skorch's
    model_world_size_2_rank_0.pt, optim_world_size_2_rank_0.pt, ..._rank_1.pt    verl's, a file of each for each rank
    checkpoint_rank_0.pt, checkpoint_rank_1.pt     what a program saves on each rank
    model, optimizer, lr_scheduler                 ColossalAI's, where each is a file
    model000500.pt, opt000500.pt                   guided-diffusion's, a pair for each step, and ema_0.9999_000500.pt
    model_state_e1_b0.th, training_state_e1_b0.th  AllenNLP's, a pair for each epoch and batch
    model.pt, training_state.pt                    what programs save by hand: the optimizer with counts beside it
    models/net_g_5000.pth, training_states/5000.state    BasicSR's, a folder of each
    policy.pth, policy.optimizer.pth, ...          PPO, A2C, DQN of Stable-Baselines3, members of a zip
    policy.pth, actor.optimizer.pth, ...           SAC, TD3, DDPG: an optimizer for each network in the policy

Of an archive, the algorithm's arguments are pickled code in part and aren't read. Its target networks, which no
optimizer moves, stand by themselves.

Source: allenai/OLMo, olmo/checkpoint.py, `FullCheckpointer.save_checkpoint`; speechbrain/speechbrain,
utils/checkpoints.py, `Checkpointer.save_checkpoint`; skorch-dev/skorch,
skorch/callbacks/training.py, `Checkpoint`; volcengine/verl,
verl/utils/checkpoint/fsdp_checkpoint_manager.py, `FSDPCheckpointManager`;
hpcaitech/ColossalAI, colossalai/booster/booster.py, `save_model`;
openai/guided-diffusion, train_util.py, `TrainLoop.save`;
allenai/allennlp, allennlp/training/checkpointer.py, `Checkpointer.save_checkpoint`;
XPixelGroup/BasicSR, basicsr/models/base_model.py, `save_network`, `save_training_state`; DLR-RM/stable-baselines3,
stable_baselines3/common/save_util.py, `save_to_zip_file`; common/base_class.py, `BaseAlgorithm.set_parameters`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from statekit.converters.formats.pytorch.reader import Opened, read_object
from statekit.converters.formats.zip_archive import Archive, directory_bytes
from statekit.errors import FormatError, NotFoundError
from statekit.files.checkpoint import RANK
from statekit.files.source import Part, Source, bytes_at, listing
from statekit.files.tree import Place
from statekit.tensors.tree import Tree

_HALF = re.compile(
    r"(model|net|network|params|weights|optim(?:izer)?|opt|train(?:ing|er)?_state)[-_.]?(\d{1,18})?"
    r"\.(?:pt|pth|ckpt|th)"
)
_RANK = re.compile(
    r"(.*?)(?:_world_size_(\d{1,6}))?[-_.]?rank[-_]?(\d{1,6})((?:[-_.](?!.*rank).*)?)\.(?:pt|pth|ckpt|bin|th)"
)
"""Name of a rank's file; its groups are the part before the rank, the number of ranks, the rank, the part behind."""
_OF_AN_AXIS = re.compile(r"(?:^|_)(?:mp|pp|tp|dp|ep)$")
"""End of what stands before the rank in names of DeepSpeed's files, which mp_rank_00_model_states.pt is one of."""
_OTHERS = frozenset({"extra_state", "rng", "rng_state", "random_states"})
"""What each rank has for itself beside the run."""
_AVERAGE = re.compile(r"(ema(?:_[0-9.]+)?)_(\d{1,18})\.(?:pt|pth|ckpt|th)")
_MODELS = ("model", "net", "network", "params", "weights", "model_state")
_BARE = ("model", "optimizer")
"""Names of ColossalAI's files where each half is one."""
_TRAINING = "training_state"
"""What AllenNLP calls an optimizer with all that it keeps beside it; so do programs that save two files by hand."""
_OF_ALLENNLP = re.compile(r"(model_state|training_state)_(?:epoch_|e)(\d{1,9})(?:_b(\d{1,9}))?\.th")
_NETWORKS, _STATES = "models", "training_states"
"""BasicSR's folders of networks, and of their optimizers and schedules."""
_OF_BASICSR, _STATE_OF_BASICSR = re.compile(r"(net\w*?)_(\d{1,18})\.pth"), re.compile(r"(\d{1,18})\.state")
_OF_SPEECHBRAIN, _OBJECT = "CKPT.yaml", ".ckpt"
_AN_OPTIMIZER = re.compile(r"opt(im(izer)?)?$|^optim")
"""In the names under which SpeechBrain's recipes save optimizers: optimizer, modelopt, wav2vec_opt."""
SB3, SPEECHBRAIN = "stable_baselines3", "speechbrain"
_POLICY, _SUFFIX, _OF_NETWORK, _TARGET = "policy", ".pth", ".optimizer", "_target"
_TARGETS, _REST = "targets", "policy_rest"
"""Keys of target networks, and of what of a policy no optimizer moves."""
BESIDE = (
    "train.pt", "criterion.pt", "lr_scheduler", "scheduler.pt", "scaler.pt", "scheduler.pth", "scaler.pth",
    "scheduler.ckpt", "scaler.ckpt",
)  # fmt: skip
"""Files that may stand beside the halves; the part of the tree is called by the name before the suffix."""


@dataclass(frozen=True)
class Ranks:
    """The files of all ranks of one save.

    Attributes:
        parts: Names of the ranks' files, in their order, by the part of the run that they hold; "" where it is all.
        others: Names of files with what each rank has for itself; those of rank 0.
        lacking: What is missing of them; "" if nothing is.
        step: The number in their names, where several saves lie in the folder.
        steps: The numbers of these.
    """

    parts: Mapping[str, Sequence[str]]
    others: Mapping[str, str]
    lacking: str = ""
    step: int | None = None
    steps: tuple[int, ...] = ()


def find_ranks(folder: Place, step: int | None = None) -> Ranks | None:
    """Returns the files of ranks in a folder, of the newest save or of the given step; None where there are none.

    Raises:
        NotFoundError: The folder has other steps.
    """
    saves = _saves_of_ranks(folder)
    by_step = {numbers[-1]: numbers for numbers in sorted(saves) if numbers} if len(saves) > 1 else {}
    if not saves or (step is not None and not by_step):
        return None
    if step is not None and step not in by_step:
        raise _no_step(folder, step, [*by_step])
    numbers = by_step[step] if step is not None else () if () in saves else max(saves)
    return _ranks_of_one_save(saves[numbers], next(iter(numbers[-1:]), None), tuple(by_step))


def _saves_of_ranks(folder: Place) -> dict[tuple[int, ...], dict[str, list[_OfRank]]]:
    """Returns the files of each save of ranks by their parts, by the numbers in the parts' names."""
    saves: dict[tuple[int, ...], dict[str, list[_OfRank]]] = {}
    for entry in listing(folder):
        part, file = _as_of_rank(entry.name)
        if file is not None and entry.is_file():
            numbers = tuple(int(digits) for digits in re.findall(r"\d{1,18}", part))
            saves.setdefault(numbers, {}).setdefault(part, []).append(file)
    whole = {numbers: _with_rank_0(parts) for numbers, parts in saves.items()}
    return {numbers: parts for numbers, parts in whole.items() if parts.keys() - _OTHERS}


def _ranks_of_one_save(
    files: Mapping[str, Sequence[_OfRank]], step: int | None, steps: tuple[int, ...]
) -> Ranks:
    parts = {part: of_ranks for part, of_ranks in files.items() if part not in _OTHERS}
    names = {_part_called(part): [file.name for file in of_ranks] for part, of_ranks in parts.items()}
    others = {part: of_ranks[0].name for part, of_ranks in files.items() if part in _OTHERS}
    several = f"files of one save: {', '.join(parts)}" if len(names) < len(parts) else ""
    return Ranks(names, others, several or next(_lacking(parts), ""), step if steps else None, steps)


def _no_step(folder: Place, step: int | None, steps: Sequence[int]) -> NotFoundError:
    steps_found = ", ".join(map(str, steps)) or "none"
    return NotFoundError("There is no such step.", place=folder, expected=step, found=steps_found)


class _OfRank(NamedTuple):
    """A rank's file: the rank, the number of ranks that its name says, and its name."""

    rank: int
    ranks: int
    name: str


def _as_of_rank(name: str) -> tuple[str, _OfRank | None]:
    """Returns what a rank's file holds by its name, and the rank; None of the file of no rank."""
    match = _RANK.fullmatch(name)
    if match is None or (match[4] and _OF_AN_AXIS.search(match[1])):
        return "", None
    return f"{match[1]}{match[4]}".strip("-_."), _OfRank(int(match[3]), int(match[2] or 0), name)


def _with_rank_0(parts: Mapping[str, list[_OfRank]]) -> dict[str, list[_OfRank]]:
    """Returns the files of each part that the first rank has, in the order of ranks."""
    return {part: sorted(of_ranks) for part, of_ranks in parts.items() if min(of_ranks).rank == 0}


def _lacking(parts: Mapping[str, Sequence[_OfRank]]) -> Iterator[str]:
    """Yields what is missing of the files of ranks."""
    yield from (
        f"files of one number of ranks: {part}" for part in parts if len({f.ranks for f in parts[part]}) > 1
    )
    count = max(max(file.ranks, file.rank + 1) for of_ranks in parts.values() for file in of_ranks)
    for part, of_ranks in parts.items():
        ranks = {file.rank for file in of_ranks}
        yield from (f"the file {part} of rank {rank}" for rank in range(count) if rank not in ranks)


def of_rank(name: str) -> str:
    """Returns the name of a rank's file as that of all ranks.

    Example:
        >>> of_rank("model_world_size_2_rank_0.pt")
        'model_world_size_2_rank_{rank}.pt'
    """
    match = _RANK.fullmatch(name)
    return f"{name[: match.start(3)]}{RANK}{name[match.end(3) :]}" if match else name


def _part_called(name: str) -> str:
    """Returns the part of a run that a rank's file holds by its name; "" of one that may hold all."""
    match = _HALF.fullmatch(f"{name}.pt")
    return "" if match is None else "model" if match[1] in _MODELS else "optimizer"


@dataclass(frozen=True)
class Halves:
    """The files of one step.

    Attributes:
        parts: Name of the file of `model`, of `optimizer`, and of averages.
        step: The number in their names; None where they have none.
        steps: All steps that lie in the folder.
        is_of_objects: Whether `parts` are all objects of a run by their names; some are no torch files.
    """

    parts: Mapping[str, str]
    step: int | None = None
    steps: tuple[int, ...] = ()
    is_of_objects: bool = False


def find_halves(folder: Place, step: int | None = None) -> Halves | None:
    """Returns the halves of a folder's newest step, or of the given one; None where a half is missing or not alone.

    Raises:
        NotFoundError: The folder has other steps.
    """
    whole = {**_whole(folder), **_of_basicsr(folder)}
    steps = tuple(sorted(key[0] for key in whole if len(key) == 1))
    if step is not None and (step,) not in whole:
        raise _no_step(folder, step, steps)
    if step is None and (folder / _OF_SPEECHBRAIN).is_file() and (objects := _objects_of(folder)):
        return Halves(objects, is_of_objects=True)
    # Files without a number are those of the run as it ended.
    newest = () if () in whole else max(whole, default=None)
    key = newest if step is None else (step,)
    if key is None:
        return None
    number = key[0] if len(key) == 1 else None
    return Halves({**whole[key], **_averages(folder, number)}, number, steps)


def _objects_of(folder: Place) -> dict[str, str]:
    """Returns the files of a run's objects by their names; none where no optimizer is among them."""
    names = sorted(
        entry.name for entry in listing(folder) if entry.name.endswith(_OBJECT) and entry.is_file()
    )
    objects = {name.removesuffix(_OBJECT): name for name in names}
    return objects if any(_AN_OPTIMIZER.search(name) for name in objects) else {}


def _whole(folder: Place) -> dict[tuple[int, ...], dict[str, str]]:
    """Returns the files of each step that has a model's and an optimizer's, by the numbers in their names."""
    files: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for entry in listing(folder):
        half = _half(entry.name)
        if half is not None and entry.is_file():
            files.setdefault(half[1], []).append((half[0], entry.name))
    alone = {key: parts for key, halves in files.items() if len(parts := dict(halves)) == len(halves)}
    return {key: parts for key, parts in alone.items() if len(parts) > 1 and "model" in parts}


def _of_basicsr(folder: Place) -> dict[tuple[int, ...], dict[str, str]]:
    """Returns the files of each step of BasicSR's folders by their parts; a single network is the model."""
    if not ((folder / _STATES).is_dir() and (folder / _NETWORKS).is_dir()):
        return {}
    networks: dict[int, dict[str, str]] = {}
    for entry in listing(folder / _NETWORKS):
        if match := _OF_BASICSR.fullmatch(entry.name):
            networks.setdefault(int(match[2]), {})[match[1]] = f"{_NETWORKS}/{entry.name}"
    whole: dict[tuple[int, ...], dict[str, str]] = {}
    for entry in listing(folder / _STATES):
        match = _STATE_OF_BASICSR.fullmatch(entry.name)
        if match is not None and (names := networks.get(int(match[1]))):
            # As its optimizers are.
            ordered = dict(sorted(names.items(), key=lambda item: item[0] != "net_g"))
            models = ordered if len(names) > 1 else {"model": next(iter(names.values()))}
            whole[(int(match[1]),)] = {**models, _TRAINING: f"{_STATES}/{entry.name}"}
    return whole


def _half(name: str) -> tuple[str, tuple[int, ...]] | None:
    """Returns which part a file is, and the numbers in its name; None of one that is no half."""
    if name in _BARE:
        return name, ()
    match = _HALF.fullmatch(name) or _OF_ALLENNLP.fullmatch(name)
    if match is None:
        return None
    is_training = match[1].startswith("train")
    part = _TRAINING if is_training else "model" if match[1] in _MODELS else "optimizer"
    return part, tuple(int(number) for number in match.groups()[1:] if number)


def _averages(folder: Place, step: int | None) -> dict[str, str]:
    """Returns the files of a step's averages by their names without the step."""
    matches = [match for entry in listing(folder) if (match := _AVERAGE.fullmatch(entry.name))]
    return {match[1]: match[0] for match in matches if int(match[2]) == step}


def is_sb3(source: Source) -> bool:
    """Tells whether a file is the archive of an algorithm, by its first bytes and its directory."""
    is_zip = bytes_at(source, 0, min(4, source.size)) == b"PK\3\4"
    return is_zip and b"policy.pth" in directory_bytes(source)


def sb3_parts(source: Source) -> dict[str, Opened]:
    """Returns the objects of an archive by the names of their members, without the suffix.

    Raises:
        FormatError: A member isn't a torch file.
        CorruptError: Sizes or checksums disagree with the data.
    """
    archive = Archive(source)
    return {
        name.removesuffix(_SUFFIX): read_object(Part(source, member.start, member.size))
        for name, member in archive.members.items()
        if name.endswith(_SUFFIX) and member.size
    }


_LOGARITHM = "log_ent_coef"


def sb3_tree(parts: Mapping[str, Tree], place: str) -> dict[str, Tree]:
    """Returns networks beside their optimizers, each pair under the names of one network.

    Raises:
        FormatError: It has no policy.
    """
    policy = parts.get(_POLICY)
    if not isinstance(policy, Mapping):
        raise FormatError(
            "An archive of Stable-Baselines3 has no policy.",
            place=place,
            expected="a state_dict in policy.pth",
            found=f"{type(policy).__name__}",
        )
    networks = [name.removesuffix(_OF_NETWORK) for name in parts if name.endswith(_OF_NETWORK)]
    others = {
        name: part for name, part in parts.items() if name != _POLICY and not name.endswith(_OF_NETWORK)
    }
    optimizers = {f"{name}_optimizer": parts[f"{name}{_OF_NETWORK}"] for name in networks}
    return {**_networks(policy, networks), **optimizers, **_with_entropy(others)}


def _with_entropy(others: Mapping[str, Tree]) -> dict[str, Tree]:
    """Returns what lies beside a policy, with the logarithm that SAC moves by an optimizer of its own as a network.

    Source: DLR-RM/stable-baselines3 stable_baselines3/sac/sac.py, `_get_torch_save_params`.
    """
    variables = others.get("pytorch_variables")
    if not isinstance(variables, Mapping) or _LOGARITHM not in variables:
        return {**others}
    rest = {key: value for key, value in variables.items() if key != _LOGARITHM}
    return {**others, "pytorch_variables": rest, "ent_coef": {_LOGARITHM: variables[_LOGARITHM]}}


def _networks(policy: Mapping[Any, Tree], names: Sequence[str]) -> dict[str, Tree]:
    """Returns a policy's parameters by network; those of none go with an optimizer that no module is named after."""
    modules = {key: f"{key}".partition(".")[0] for key in policy}
    targets = {key for key, module in modules.items() if module.endswith(_TARGET)}
    inside = {name: {key for key, module in modules.items() if module == name} for name in names}
    rest = policy.keys() - targets - {key for keys in inside.values() for key in keys}
    whole = next((name for name in names if not inside[name]), _REST)
    networks = {**inside, whole: rest, _TARGETS: targets}
    return {
        name: {key: policy[key] for key in policy if key in keys} for name, keys in networks.items() if keys
    }
