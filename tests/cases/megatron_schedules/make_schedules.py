"""Records what OptimizerParamScheduler of megatron-core 0.16.1 does over whole runs: schedules.json, beside this file.

    PYTHONPATH=<folder with megatron-core> python make_schedules.py

Each run has its state after 4 updates, the options that the state has no place for, and the rates of 26 updates.
"""

from __future__ import annotations

import json
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD linear", "WSD cosine")
scheduler_of = import_module("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
runs = []
for text, warmup, batch in product(STYLES, (0, 5), (1, 16)):
    style, _, decay = text.partition(" ")
    options: dict[str, Any] = {"lr_warmup_init": 0.001 if warmup and batch == 1 else 0.0}
    if decay:
        options |= {"lr_wsd_decay_iters": 6, "lr_wsd_decay_style": decay}
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "weight_decay": 0.0}])
    scheduler = scheduler_of(
        optimizer, options["lr_warmup_init"], 0.01, 0.0005, warmup * batch, 20 * batch, style, 0.1, 0.1, 1, "constant",
        wsd_decay_steps=6 * batch, lr_wsd_decay_style=decay or None,
    )  # fmt: skip
    rates, state = [], dict[str, Any]()
    for updates in range(26):
        rates.append(optimizer.param_groups[0]["lr"])
        state = scheduler.state_dict() if updates == 4 else state
        scheduler.step(batch)
    runs.append({"options": options, "batch": batch, "state": state, "rates": rates})
text = "[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n"
Path(__file__).with_name("schedules.json").write_text(text, encoding="utf-8")
