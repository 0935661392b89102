"""One small module for each system whose recordings statekit reads."""

from statekit.verify.recording import System
from statekit.verify.systems.t5x import T5X

SYSTEMS: dict[str, System] = {"t5x": T5X()}
