"""Layout `mxnet-lans`: MXNet's LANS as a Trainer and an Updater save it.

Source: apache/mxnet, python/mxnet/optimizer/lans.py, `LANS.__init__`, `create_state`.
"""

from __future__ import annotations

from statekit.converters.layouts.mxnet.layout import MXNetOptim, MXNetOptimizer

LAYOUT = MXNetOptim(
    "mxnet-lans",
    "MXNet's LANS",
    MXNetOptimizer(
        schema="lans",
        cls="mxnet.optimizer.lans.LANS",
        attributes={"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-06, "lower_bound": None, "upper_bound": None},
        fused=("mxnet_fused", "mxnet_gpu"),
        unfused="mxnet_unfused",
        decay="wd",
    ),
)
