"""What an update must read and write of each parameter's tensors, in passes: where norms and means are known only when
a tensor has been read, and it doesn't stay in a cache until they are.

AdamW passes once. LAMB's trust ratio needs the norms of a parameter and of its update before it moves; LANS needs the
gradient's norm before that. ScaledAdam's scale moves by the sum of parameter times gradient. Adafactor reads a gradient
for its row and column means, for the size of the update, and for the update itself.
"""

from __future__ import annotations

from typing import NamedTuple


class Traffic(NamedTuple):
    """How often an update reads or writes a whole tensor.

    Attributes:
        grads: The gradient.
        params: The parameter.
        slots: Slots of its size, all together.
        once: Slots of its size that are there, which one pass reads and writes.
    """

    grads: int
    params: int
    slots: int
    once: int

    @property
    def passes(self) -> int:
        """Bytes for each element of float32, in passes."""
        return 4 * (self.grads + self.params + self.slots)

    @property
    def least(self) -> int:
        """Bytes for each element of float32 where each tensor is read and written once."""
        return 4 * (1 + 2 + 2 * self.once)


TRAFFIC = {
    "adamw": Traffic(1, 2, 4, 2),
    "lamb": Traffic(1, 3, 6, 2),
    "lans": Traffic(3, 3, 6, 2),
    "scaled_adam": Traffic(2, 3, 4, 2),
    "adafactor": Traffic(3, 3, 0, 0),
}
"""By schema. Rows and columns of a factored moment weigh nothing."""
