"""One small module for each system whose recordings statekit reads.

T5X, ScaledAdam and Optax record what their files hold, and are decoded through their layouts. The others' recorders
wrote each slot as a tensor of its own, under the name that the optimizer itself has for it. That name stands in the
schema, where the layouts of PyTorch and Mesh-TensorFlow have it from too; MXNet, Keras and Tensor2Tensor store slots
by place, so that their layouts have no such names to tell. `schema_named` reads those, and with them any variant that
is stepped and that no layout holds. Every recording's own checkpoint goes through its layout all the same, and must
hold the state that was recorded (`statekit.verify.start_state`).
"""

from statekit.verify.contract import System
from statekit.verify.systems import hf, keras, mesh_tf, mxnet, t2t
from statekit.verify.systems.muon import Muon
from statekit.verify.systems.optax import Optax
from statekit.verify.systems.scaled_adam import ScaledAdam
from statekit.verify.systems.schema_named import Aliased
from statekit.verify.systems.t5x import T5X
from statekit.verify.systems.torch_optim import TorchOptim

SYSTEMS: dict[str, System] = {
    "hf_adafactor": Aliased(hf.describe),
    "keras": Aliased(keras.describe),
    "mesh_tf": Aliased(mesh_tf.describe),
    "muon": Muon(),
    "mxnet_lans": Aliased(mxnet.describe),
    "optax_adafactor": Optax(),
    "scaled_adam": ScaledAdam(),
    "t2t": Aliased(t2t.describe),
    "t5x": T5X(),
    "torch_adafactor": TorchOptim(),
    "torch_formats": TorchOptim(),
}
