"""One small module for each system whose recordings statekit reads.

T5X, ScaledAdam and Optax record what their files hold, and are decoded through their layouts. The others' recorders
wrote each slot as a tensor of its own, under the name that the optimizer itself has for it. That name stands in the
schema, where the layouts of PyTorch and Mesh-TensorFlow have it from too; MXNet, Keras and Tensor2Tensor store slots
by place, so that their layouts have no such names to tell. `schema_named` reads those, and with them any variant that
is stepped and that no layout holds. Every recording's own checkpoint goes through its layout all the same, and must
hold the state that was recorded (`statekit.verify.start_state`).
"""

from statekit.verify.contract import System
from statekit.verify.systems import muon, optax, scaled_adam, schema_named, t5x, torch_optim

SYSTEMS: dict[str, System] = {
    "hf_adafactor": schema_named,
    "keras": schema_named,
    "mesh_tf": schema_named,
    "muon": muon,
    "mxnet_lans": schema_named,
    "optax_adafactor": optax,
    "scaled_adam": scaled_adam,
    "t2t": schema_named,
    "t5x": t5x,
    "torch_adafactor": torch_optim,
    "torch_formats": torch_optim,
}
"""The module that reads the recordings of a system, by the name that `recording.json` gives it."""
