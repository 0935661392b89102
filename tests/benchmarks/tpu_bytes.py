"""Prints the bytes that an optimizer's step accesses on a TPU over the least possible, as the compiler counts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "tpu_steps.py"
RULES = "adafactor,scaled_adam,lans,lamb,adamw"

if __name__ == "__main__":
    command = [sys.executable, str(SCRIPT), RULES, "v5e", "float32,bfloat16", "8192", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(f"{'optimizer':12} {'dtype':9} {'MB':>9} {'least':>9} {'ratio':>6}")
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            megabytes = row["bytes"] / 1e6, row["least"] / 1e6
            print(
                f"{row['rule']:12} {row['dtype']:9} {megabytes[0]:9.1f} {megabytes[1]:9.1f} {row['ratio']:6.2f}"
            )
