"""Layout `mxnet-adam`: MXNet's Adam as a Trainer and an Updater save it.

Source: apache/mxnet, python/mxnet/optimizer/adam.py, `Adam.__init__`, `create_state`.
"""

from __future__ import annotations

from statekit.converters.layouts.mxnet.layout import MXNetOptim, MXNetOptimizer

LAYOUT = MXNetOptim(
    "mxnet-adam",
    "MXNet's Adam",
    MXNetOptimizer(
        schema="adamw",
        cls="mxnet.optimizer.adam.Adam",
        attributes={"lazy_update": False, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-08},
        fused=("mxnet_fused", "mxnet_fused"),
        unfused="mxnet_unfused",
        dtypes=("float32", "float16", "float64"),
    ),
)
