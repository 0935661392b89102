"""One small module for each system whose recordings statekit reads."""

from statekit.verify.recording import System
from statekit.verify.systems.scaled_adam import ScaledAdam
from statekit.verify.systems.t5x import T5X

SYSTEMS: dict[str, System] = {"scaled_adam": ScaledAdam(), "t5x": T5X()}
