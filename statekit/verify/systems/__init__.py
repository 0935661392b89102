"""One small module for each system whose recordings statekit reads."""

from statekit.verify.contract import System
from statekit.verify.systems import hf, keras, mesh_tf, mxnet, optax, t2t
from statekit.verify.systems.scaled_adam import ScaledAdam
from statekit.verify.systems.schema_named import Aliased
from statekit.verify.systems.t5x import T5X
from statekit.verify.systems.torch_optim import TorchOptim

SYSTEMS: dict[str, System] = {
    "hf_adafactor": Aliased(hf.describe),
    "keras": Aliased(keras.describe),
    "mesh_tf": Aliased(mesh_tf.describe),
    "mxnet_lans": Aliased(mxnet.describe),
    "optax_adafactor": Aliased(optax.describe),
    "scaled_adam": ScaledAdam(),
    "t2t": Aliased(t2t.describe),
    "t5x": T5X(),
    "torch_adafactor": TorchOptim(),
    "torch_formats": TorchOptim(),
}
