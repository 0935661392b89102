"""Settings that must stand before a framework is imported."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
