"""Runs every cell of resuming.py, and writes tests/resuming.json and docs/resuming.md (`make tables`).

    python resuming_table.py [PATTERN ...]

With patterns only cells run anew whose names have one of them; what the others came to stays, and so do rows that say
that they were run by hand.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import drivers
from resuming import CELLS

HERE = Path(__file__).parent
RESULTS = HERE / "resuming.json"
TARGET = HERE.parent / "docs" / "resuming.md"
STEPS = ("loads", "goes_on", "saves", "loads_again")
TEXT = """# Going on in the target's own system

`statekit convert` prints the lines that resume from what it wrote, and writes them into the manifest (`resume`).
`statekit resume CHECKPOINT` prints them for any checkpoint.

The table shows what happened when they ran. The source's own library saves a run of three updates (Keras: as
`tf.train.Checkpoint`, or as `.weights.h5` where that is the target; PyTorch: `torch.save`, or a `.ckpt` of Lightning;
Optax: Orbax), and statekit converts it. Then, in the target's library:

- **loads**: the printed lines run in a program that has the model, and every weight equals the source's bit for bit;
- **goes on**: after three more updates every weight lies within 1e-5 of the uninterrupted source, relative to the
  longest way that an element of its tensor has moved since;
- **saves**: the library saves the run by its own means;
- **loads again**: it loads that into a fresh model, and after three more updates the same holds.

`attest` compares each loaded run with the source and with the target, and most runs with that save. It finds no fault.

`difference` is the largest one at the end, in that measure. The table lists every pair that ran in this way. It proves
nothing about the lines of other containers and layouts.

Weights alone (`torch-weights`, `tf2-weights` and so on) have no row, because no optimizer resumes from them. Their
lines load a model; tests/test_weights.py runs those of PyTorch's files, safetensors and TensorFlow's objects.

The column `model` names the parts of a run. For PyTorch, `module` is one group of AdamW; `groups` are matrices with
weight decay and vectors without. `LinearLR` and `LambdaLR` are torch's schedules: the printed lines make the first, and
the program supplies the function of the second, `lr_lambda`. `tied and frozen` has an output layer with the embedding's
weight and a frozen layer. `adafactor` is torch's; `hf adafactor` is Transformers', where `its own rate` means
`relative_step`. `two optimizers` are Adafactor for matrices and AdamW for vectors; `two of AdamW` are two of one class,
saved as a list, with a LinearLR for each or for one. `--schedule` names Keras' `PolynomialDecay` and `its own
schedule`; the second has no class in Keras, so the lines print one.
"""
KERAS = """
## Models of Keras

A Functional or Sequential model looks for its weights under the classes of its layers (`layers/dense_1/vars/0`). Only
Keras' own files have these names, and a conversion from a `.keras` or `.weights.h5` file keeps them. For any other
source, save the model once, trained or not, and name the file:

    model.save_weights("like.weights.h5")         # or model.save("like.keras")
    statekit convert SOURCE out.weights.h5 --like like.weights.h5

The state's paths must be those of the model's variables (`variable.path`), apart from a common prefix. statekit refuses
other tensors one by one. A `.keras` target needs a `.keras` file, because it holds the model's config. Without `--like`
the parameters lie by their paths. A subclassed model whose attributes have these names finds them. The printed lines
load them by name, through `statekit.tensorflow`, into any model ("by path" in the table).
"""

BY_HAND = """
## Run by hand

Some libraries do not install beside the others. Each ran once in an environment of its own: the same four steps, on a
matrix, a vector and a matrix in one group. statekit opened what they saved and found all slots and the count of six
updates. T5X is the repository at that commit without its data pipelines (seqio, airio). Its Checkpointer restored the
path that the gin lines name, into an Adafactor with their arguments. icefall is its zipformer's optim.py. The program
supplied what the printed lines do not make: icefall's `Eden` and its groups, and the optimizers of TensorFlow 1 with
the arguments that the lines name (Mesh-TensorFlow's `min_dim_size_to_factor=0` among them). Mesh-TensorFlow's global
step rose after each update. In one `tf.group` with the update, as programs often have it, the decay may be that of
either step.

Megatron-LM ran without a GPU. The CPU answered its calls of CUDA, and a class with Apex' groups and state and torch's
arithmetic stood in for `FusedAdam`. Its arguments, its schedule, `get_megatron_optimizer`, `load_checkpoint` and
`save_checkpoint` ran with the printed flags, for two groups: matrices with weight decay and a bias without. In bfloat16
the float32 masters and the slots were compared. Without FusedAdam, Megatron-Core's DistributedOptimizer cannot load its
own save. The lines for a run with its own schedule, Megatron-Core's calls, resumed just as exactly.

statekit only reads FSDP1's ranks: they are flat pieces that the run's engine cuts by its own configuration and number
of ranks. Their gathered form (`dcp`, `torch-fqn`) is written instead.
"""
OPTAX = """
## The difference between PyTorch and Optax

A run of Trainer (GPT-2, AdamW, two groups) that statekit moves to Optax ends, after 20 updates on the same gradients,
bit for bit where Optax ends from the same arrays without statekit (tests/test_trainer_to_optax.py). Both differ from
PyTorch by rounding. Most of it is the bias correction: Optax computes 1 - beta2^t in float32, PyTorch in float64. In a
run's first updates that difference is small and has few digits; at update 6 the update may be off by 1.6e-5 of itself.

| | off by, of the way | with `jax_enable_x64` |
|---|--:|--:|
| a weight near 1, 20 updates at a rate of 0.01 | up to 1.5e-5 | 7.7e-6 |
| the same at 0.05 | 8.0e-6 | 1.0e-6 |
| 25 updates at 0.05 | 1.03e-5 | 4.1e-6 |
| 100 updates at 0.05 | 2.1e-5 | 1.03e-5 |

tests/test_torch_to_optax.py proves the cause. PyTorch's rule in float64 with Optax' corrections lies, at each update,
within Optax' rounding; with its own corrections it does not. They predict 7.2e-6 of the 7.5e-6 after 20 updates. Later
the rounding of slots and weights remains, relative to a way that gets shorter as the run settles; after 100 updates
PyTorch itself is 2.1e-5 from its rule in float64. No constructor of Optax stays below 1e-5 everywhere, so none is
printed. T5's Adafactor stays at 2e-6. Every difference is below half of the bound that the test derives. The bias of
attention's keys has no effect: its gradients are rounding, and AdamW makes full steps of them, so no two runs agree
there.
"""

CHANGES = """
## Changing a run as it goes on

`statekit convert` takes these options beside `--step-offset`, and `statekit.convert` takes them with underscores. Each
acts only where it is named. The plan lists it under `changed` with the parameters and slots that it touches; the
manifest keeps it in its options. statekit refuses by name what an option cannot do.

- `--schedule-step keep|reset|N`: the step of the learning-rate schedule, in files of statekit's own systems, and of
  Optax where a link counts for it. Systems that count updates and schedule in one number (T5X, TensorFlow 1, Keras,
  MXNet, Trainer) refuse it. So do files that do not store it (`torch.optim`, icefall, Megatron-LM), and sources with
  the schedule's own record.
- `--slot-policy reset:v`: the slot starts with the rule's initial value. `'reset:v*'` takes `v_row` and `v_col` too;
  `reset:count` takes the updates done, from which bias corrections count.
- `--slot-policy drop:m`: removes the slot and switches its option off (`beta1=None`); refused where the rule needs it.
- `--params-only`: writes the weights alone. `--state-only`: writes the optimizer alone, as
  `torch.save(optimizer.state_dict())` does, for files of PyTorch's own optimizers (`torch-optim`, `torch-fqn`). Other
  targets refuse it with the reason.
- `--init-missing FILE`: takes parameters that the source lacks, or has in another shape, from a file of the target's
  model. Their slots start fresh, in the run's only group.
- `--drop-slots-of GLOB`: freezes parameters. They keep their values, in no group and without slots. PyTorch's files
  then do not distinguish them from buffers.
- `--param-dtype`, `--slot-dtype [SLOT=]DTYPE`: casts. A narrower dtype is `lossy` in the plan; it passes because the
  user asked for it, and the report measures the error. Slots have only dtypes that the rule keeps; counts have none.
  Where the rule keeps slots as its parameters, as PyTorch's AdamW does, a `--param-dtype` needs its `--slot-dtype`.
- `--loss-scale C`: multiplies the loss by C, and a slot that grows with the p-th power of gradients by C^p. A C^p that
  the slot's dtype cannot hold is refused. Gradients that wait for their update (Keras' accumulators, the `acc_grads` of
  Optax' MultiSteps) are multiplied by C too. Unknown tensors beside the optimizer are named.

`load_optimizer` takes `slot_policy`, `drop_slots_of` and `loss_scale` among its overrides, and
`init_missing=["head.*"]`: slots of these parameters start fresh where the checkpoint lacks them or has them in another
shape, with a count of their own where the system keeps one, and a warning names them. `load_params` still needs every
parameter.

T5X sums its loss over tokens, Mesh-TensorFlow and Hugging Face average it. `--loss-scale` takes a run from one to the
other where both differ by a constant: 1 / tokens, if every batch has equally many. A mean over each batch's own tokens
differs from a sum by no constant: keep the source's loss there. The printed lines name the loss in force, where a map
leads to another codebase's model or `--loss-scale` was given.

The powers are data (`gradient_power` in `schemas/`), and a test checks every variant's own step against them, to the
last bit for a power of two. Adafactor's `v` has 2, and its `m` 0, because it holds updates. Adam's `m` has 1, `v` and
`v_max` 2. LANS' slots have 0, because it divides gradients by their norm. ScaledAdam's `exp_avg_sq` and
`scale_exp_avg_sq` have 2, `scale_grads`, `model_norms` and `model_norm_threshold` 1, `delta` and `param_rms` 0. Values
that the rule compares with gradients, or adds to their moments, stay as they are and are named: `epsilon1`, `epsilon`,
thresholds of clipping.

With one of these options, or with `--step-offset`, the report shows what the next update will use, for each group: its
learning rate, the decay of its second moment, its effective count and offset, and the share of the loaded second moment
(none after `--step-offset reset`, where the decay is 0). statekit measures the decay, and the effect of fresh slots, on
its own step. T5X's `v`, reset at a million updates, makes a first update 251 times a settled run's, which only
`clipping_threshold` hides; Adam's `v` makes one of 31, its `m` one of 0.1. `--step-offset reset` and `--slot-policy
reset:count` count from zero. Optax' `step_offset` is `decay_offset`. Hugging Face's Adafactor has none; its count
starts there instead, exactly, unless `relative_step` makes the rate of it. In torch and Keras the count also limits
the rate, so a conversion to them is refused.
"""


def run(folder: Path, cells: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Runs cells, all unless told which, in a process of their own; returns what came of them."""
    folder.mkdir(parents=True, exist_ok=True)
    large = ["torch", "jax", "tensorflow"]
    done = drivers.run(HERE / "resuming.py", folder, *cells, imports=large, JAX_PLATFORMS="cpu")
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
