"""Runs every cell of resuming.py, and writes tests/resuming.json and docs/resuming.md (`make tables`).

    python resuming_table.py [PATTERN ...]

With patterns only cells run anew whose names have one of them; what the others came to stays, and so do rows that say
that they were run by hand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from resuming import CELLS

HERE = Path(__file__).parent
RESULTS = HERE / "resuming.json"
TARGET = HERE.parent / "docs" / "resuming.md"
STEPS = ("loads", "goes_on", "saves", "loads_again")
TEXT = """# Going on in the target's own system

`statekit convert` prints the lines that go on from what it wrote, and writes them into the manifest (`resume`);
`statekit resume CHECKPOINT` prints them for any checkpoint.

The table says what came of running them. A run of three updates is saved by its own library (Keras: as
`tf.train.Checkpoint`, or as `.weights.h5` where that is the target; PyTorch: `torch.save`, or a `.ckpt` of Lightning;
Optax: Orbax) and converted. Then, in the target's library:

- **loads**: the printed lines run in a program that has the model, and every weight is, bit for bit, the source's;
- **goes on**: after three more updates no weight is farther from the source that went on without a break than 1e-5 of
  the farthest that its tensor has moved since;
- **saves**: the library saves the run by its own means;
- **loads again**: it loads that into a fresh model, and after three more updates the same holds.

`difference` is the largest one in the end, in that measure. Only what stands here was run this way; a container or
layout that is missing prints lines that this table says nothing about.

Weights alone (`torch-weights`, `tf2-weights` and so on) have no row, as no optimizer goes on from them. Their lines
load a model; tests/test_weights.py runs those of PyTorch's files, safetensors and TensorFlow's objects.

What a run has stands under `model`. PyTorch's are `module`: one group of AdamW; `groups`: matrices with weight decay
and vectors without; `LinearLR` and `LambdaLR`: a schedule of torch's, of which the first is made again by the printed
lines and the second's function, `lr_lambda`, is the program's; `tied and frozen`: an output layer with the embedding's
weight, a layer that nothing moves; `adafactor`: torch's; `hf adafactor`: Transformers', where `its own rate` means
`relative_step`; `two optimizers`: Adafactor for matrices and AdamW for vectors, `two of AdamW`: the same of one class,
saved as a list, with a LinearLR for each or for one. Keras' `PolynomialDecay` and `its own schedule` are told by
`--schedule`: the second has no class in Keras, so that the lines print one.
"""
KERAS = """
## Models of Keras

A Functional or Sequential model looks for its weights under the classes of its layers (`layers/dense_1/vars/0`), which
only Keras' own files tell. From a `.keras` or `.weights.h5` file they are kept. From elsewhere, save the model once,
trained or not, and name the file:

    model.save_weights("like.weights.h5")         # or model.save("like.keras")
    statekit convert SOURCE out.weights.h5 --like like.weights.h5

The state's paths have to be those of the model's variables (`variable.path`), but for names before all of them. What
doesn't fit is refused, tensor by tensor. A `.keras` target needs a `.keras` file, as it holds the model's config.
Without `--like` parameters lie by their paths, where a subclassed model whose attributes have these names finds them;
the printed lines then load them by name, through `statekit.tensorflow`, into any model ("by path" in the table).
"""

BY_HAND = """
## Run by hand

Libraries that don't install beside the others were run once, each in an environment of its own: the same four steps,
on three parameters, a matrix, a vector and a matrix, in one group. What they saved was opened with statekit again:
all slots, and the count of six updates. T5X is the repository at that commit without its data pipelines (seqio,
airio); its Checkpointer restored the path that the gin lines name, into an Adafactor with the arguments that they
name. icefall is its zipformer's optim.py. What the printed lines don't make was the program's: icefall's `Eden` and
its groups, the optimizers of TensorFlow 1, with the arguments that the lines name (Mesh-TensorFlow's
`min_dim_size_to_factor=0` among them). Mesh-TensorFlow's global step went up after each update: in one `tf.group`
with it, as programs often have it, the decay is that of either step, by chance.

Megatron-LM ran without a GPU: its calls of CUDA were answered by the CPU, and where `FusedAdam` stands, a class with
Apex' groups and state and torch's arithmetic stood in for Apex' own. What ran of it is its arguments, its schedule,
`get_megatron_optimizer`, and `load_checkpoint` and `save_checkpoint` with the printed flags, for two groups: matrices
with weight decay and a bias without. In bfloat16 the weights compared are the float32 masters, and slots were compared
too. Without FusedAdam Megatron-Core's DistributedOptimizer can't load what it saved itself. The lines that are printed
for a run with a schedule of its own, Megatron-Core's calls, went on as exactly.

DeepSpeed's folders and FSDP1's ranks are only read: they are flat pieces that the run's engine cuts by its own
configuration, for its own number of ranks. For FSDP there is its gathered form instead (`dcp`, `torch-fqn`).
"""
OPTAX = """
## What PyTorch and Optax are apart

A run of Trainer (GPT-2, AdamW, two groups) that goes on in Optax ends, after 20 updates on the same gradients, where
Optax ends that was given the same arrays without statekit: bit for bit (tests/test_trainer_to_optax.py). From PyTorch
both are apart by rounding. Most of it is the bias correction: Optax makes 1 - beta2^t in float32, PyTorch in float64.
In a run's first updates that difference is small and has few digits left; at update 6 the update may be off by 1.6e-5
of itself. So a weight near 1, which a small rate moves little, ends up to 1.5e-5 of its way elsewhere at a rate of
0.01, and less than 1e-5 (8.0e-6) at 0.05; with `jax_enable_x64`, which makes the correction in float64, 7.7e-6 and
1.0e-6. tests/test_torch_to_optax.py shows it: PyTorch's rule in float64, given Optax' corrections, is at each update
within what Optax' rounding allows, and given its own it isn't; after 20 updates they foresee 7.2e-6 of the 7.5e-6 that
both are apart there. Later in a run what remains is the rounding of slots and weights, against a way that gets shorter
as the run settles: after 25 updates at 0.05 1.03e-5 (4.1e-6 with `jax_enable_x64`), after 100 2.1e-5 (1.03e-5), where
PyTorch itself is 2.1e-5 from its rule in float64. So no constructor of Optax stays below 1e-5 everywhere, and none
is printed beside. T5's Adafactor stays at 2e-6. All of it is below half of the bound that the test derives. A bias of
attention's keys has no effect: its gradients are rounding, of which AdamW makes steps of full size, so there two runs
never agree.
"""

CHANGES = """
## Changing a run as it goes on

`statekit convert` takes these beside `--step-offset`, and `statekit.convert` by the same names with underscores. Each
is done only where it is named, stands in the plan under `changed` with the parameters and slots that it touches, and in
the manifest's options; what it can't do is refused by name.

- `--schedule-step keep|reset|N`: where the learning-rate schedule stands, in files of statekit's own systems, and of
  Optax where a link counts for it. Systems that count updates and schedule in one number (T5X, TensorFlow 1, Keras,
  MXNet, Trainer) refuse it, and files that don't say it (`torch.optim`, icefall, Megatron-LM), and so does a source
  with the schedule's own record.
- `--slot-policy reset:v`: the slot begins with the rule's initial value; `'reset:v*'` takes `v_row` and `v_col` too,
  `reset:count` the updates done, from which bias corrections count.
- `--slot-policy drop:m`: the slot is left behind, and what switches it on is off (`beta1=None`); refused where the rule
  needs it.
- `--params-only`: the optimizer is left behind, and the target is of weights alone. `--state-only`: the parameters are,
  as in `torch.save(optimizer.state_dict())`; for files of PyTorch's own optimizers (`torch-optim`, `torch-fqn`). Other
  targets refuse it and say why.
- `--init-missing FILE`: parameters that a file of the target's model has, and the source lacks or has in another shape,
  are taken from it, and their slots begin anew, in the run's only group.
- `--drop-slots-of GLOB`: freezes parameters: they keep their values, in no group and without slots. PyTorch's files
  don't tell them from buffers then.
- `--param-dtype`, `--slot-dtype [SLOT=]DTYPE`: casts. A narrower dtype is `lossy` in the plan, passes because it was
  asked for, and the report measures how far values are off. Slots only have dtypes that the rule keeps, counts none;
  where it keeps them as its parameters, as PyTorch's AdamW does, a `--param-dtype` wants its `--slot-dtype`.
- `--loss-scale C`: the loss is C times what it was: a slot that grows with the p-th power of gradients is times C^p.
  A C^p that the slot's dtype can't hold is refused. Gradients that wait for their update (Keras' accumulators, the
  `acc_grads` of Optax' MultiSteps) are times C too, and tensors beside the optimizer that nobody knows are named.

`load_optimizer` takes `slot_policy`, `drop_slots_of` and `loss_scale` among its overrides, and
`init_missing=["head.*"]`: slots of these parameters begin anew where the checkpoint lacks them or has them in another
shape, with a count of their own where the system keeps one, and a warning names them. `load_params` still wants every
parameter.

T5X sums its loss over tokens, Mesh-TensorFlow and Hugging Face average it: `--loss-scale` takes a run from one to the
other where the two differ by a constant, as 1 / tokens where every batch has as many. A mean over each batch's own
tokens has no such constant beside a sum: there keep the source's loss. The printed lines say which is in force, where
a map leads to another codebase's model or `--loss-scale` was said.

The powers are data (`gradient_power` in `schemas/`), and a test holds every variant's own step to them, to the last bit
for a power of two: Adafactor's `v` 2 and `m` 0, as it holds updates; Adam's `m` 1, `v` and `v_max` 2;
those of LANS 0, as it divides gradients by their norm; ScaledAdam's `exp_avg_sq` and `scale_exp_avg_sq` 2,
`scale_grads`, `model_norms` and `model_norm_threshold` 1, `delta` and `param_rms` 0. What is compared with gradients,
or added to their moments, stays as it is and is named with its value: `epsilon1`, `epsilon`, thresholds of clipping.

With one of these, or with `--step-offset`, the report says of each group what the next update will use: its learning
rate, the decay of its second moment, its effective count and offset, and whether the loaded second moment has a part in
it (after `--step-offset reset` it hasn't: the decay is 0). The decay is measured on the step that statekit itself
makes, and so is what follows where slots begin anew: T5X's `v` reset at a million updates makes a first update 251
times a settled run's, which only `clipping_threshold` hides; Adam's `v` one of 31, its `m` one of 0.1. `--step-offset
reset` and `--slot-policy reset:count` count anew. Optax' `step_offset` is `decay_offset`. Hugging Face's
Adafactor has none, and its count begins there instead, exactly, unless `relative_step` makes the rate of it. In
torch's and Keras' the count also caps the rate: a conversion to them is refused.
"""


def run(folder: Path, cells: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Runs cells, all unless told which, in a process of their own; returns what came of them."""
    folder.mkdir(parents=True, exist_ok=True)
    driver = [sys.executable, str(HERE / "resuming.py"), str(folder), *cells]
    settings = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(driver, env=settings, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    results: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return results


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns the whole page."""
    here = [result for result in results if "by_hand" not in result]
    rows = [f"| {' | '.join(_row(result))} |" for result in here]
    heads = (
        "container",
        "layout",
        "model",
        *(step.replace("_", " ") for step in STEPS),
        "difference",
        "with",
    )
    table = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *rows]
    open_ = [f"- `{_name(result)}`: {result['error']}" for result in results if "error" in result]
    said = ["", "What doesn't hold:", "", *open_] if open_ else []
    return "\n".join([TEXT, *table, *said, *_by_hand(results), KERAS, OPTAX, CHANGES])


def _by_hand(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the section of what no continuous integration can hold."""
    chosen = [result for result in results if "by_hand" in result]
    said = ("container", "layout", "run", *(step.replace("_", " ") for step in STEPS), "difference", "with")
    heads = (*said, "run by hand on", "source")
    rows = [
        f"| {' | '.join([*_row(one), one['by_hand']['date'], one['by_hand']['source']])} |" for one in chosen
    ]
    return [BY_HAND, f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *rows]


def _name(result: Mapping[str, Any]) -> str:
    return "/".join(str(result[key]) for key in ("container", "layout", "model"))


def _row(result: Mapping[str, Any]) -> list[str]:
    libraries = ", ".join(f"{name} {number}" for name, number in result["libraries"].items())
    difference = result.get("difference_in_the_end")
    shown = "" if difference is None else f"{difference:.0e}" if difference else "none"
    steps = ["yes" if result[step] else "no" for step in STEPS]
    return [f"`{result['container']}`", f"`{result['layout']}`", result["model"], *steps, shown, libraries]


def main(patterns: Sequence[str]) -> None:
    """Runs cells and writes both files."""
    before: list[dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    chosen = [cell for cell in CELLS if not patterns or any(pattern in cell for pattern in patterns)]
    with tempfile.TemporaryDirectory() as temporary:
        anew = run(Path(temporary) / "runs", chosen)
    by_name = {_name(result): result for result in (*before, *anew)}
    results = [by_name[cell] for cell in CELLS] + [result for result in before if "by_hand" in result]
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    TARGET.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
