"""Prints the bytes that an optimizer's step accesses on a TPU, as the compiler counts them, over two bounds.

The first is of tensors that are read and written once, the second as often as the rule's passes need it (traffic.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from traffic import TRAFFIC

SCRIPT = Path(__file__).parents[1] / "tpu_steps.py"
RULES = "adafactor,scaled_adam,lans,lamb,adamw"

if __name__ == "__main__":
    command = [sys.executable, str(SCRIPT), RULES, "v5e", "float32,bfloat16", "8192", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(f"{'optimizer':12} {'dtype':9} {'MB':>9} {'at once':>9} {'ratio':>6} {'in passes':>9} {'ratio':>6}")
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            traffic, (params, slots, grads) = TRAFFIC[row["rule"]], row["weights"]
            passes = traffic.params * params + traffic.grads * grads
            passes += slots * traffic.slots / traffic.once if traffic.once else 2 * slots
            accessed, least, passes = (1e-6 * count for count in (row["bytes"], row["least"], passes))
            bounds = f"{least:9.1f} {row['ratio']:6.2f} {passes:9.1f} {accessed / passes:6.2f}"
            print(f"{row['rule']:12} {row['dtype']:9} {accessed:9.1f} {bounds}")
