"""Settings that must stand before a framework is imported."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

settings.register_profile("statekit", deadline=None)  # a busy machine isn't a failure
settings.load_profile("statekit")
