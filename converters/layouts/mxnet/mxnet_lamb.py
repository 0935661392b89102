"""Layout `mxnet-lamb`: MXNet's LAMB as a Trainer and an Updater save it.

Source: apache/mxnet, python/mxnet/optimizer/lamb.py, `LAMB.__init__`, `create_state`.
"""

from __future__ import annotations

from statekit.converters.layouts.mxnet.layout import MXNetOptim, MXNetOptimizer

LAYOUT = MXNetOptim(
    "mxnet-lamb",
    "MXNet's LAMB",
    MXNetOptimizer(
        schema="lamb",
        cls="mxnet.optimizer.lamb.LAMB",
        attributes={
            "beta1": 0.9,
            "beta2": 0.999,
            "epsilon": 1e-06,
            "lower_bound": None,
            "upper_bound": None,
            "bias_correction": True,
        },
        fused=("mxnet_fused", "mxnet_fused"),
        unfused="mxnet_unfused",
    ),
)
