"""The state of each optimizer, as JSON with sources: slots, hyperparameters, variants and their differences.

Each fact was read in the originals or measured on them. Layouts, steps and drop-ins ask a schema and repeat none of it.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def shipped_json(package: str, *names: str) -> Any:
    """Returns what a JSON file says that ships with a package, by the names that lead to it."""
    return json.loads(resources.files(package).joinpath(*names).read_text(encoding="utf-8"))
