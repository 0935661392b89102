"""A service over a few recorded checkpoints, as tests ask it."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from goldens import GOLDEN
from statekit.conversion import registry
from statekit.conversion.open_state import open_state
from statekit.files.stage import staged
from statekit.service.catalogue import Catalogue
from statekit.service.database import Database
from statekit.service.jobs import Jobs
from statekit.service.service import Service
from statekit.service.tasks.worker import Worker
from statekit.service.web.api import catalogue_routes
from statekit.service.web.app import create_app
from statekit.service.web.connections import uvicorn_settings
from statekit.service.web.contents_api import contents_routes
from statekit.service.web.job_api import job_routes
from statekit.service.web.keys import Keys
from statekit.service.web.proxies import DIRECT, NAMELESS, PublicAddress, UserHeader
from statekit.service.web.security import LOOPBACK, Hosts
from statekit.service.web.views import screens
from statekit.state.train_state import Counts
from statekit.tensors.tensor import Tensor, in_memory

TOKEN = "t" * 43
BEARER = {"Authorization": f"Bearer {TOKEN}"}
HOSTS = Hosts(LOOPBACK | {"testserver"})  # so that schemathesis calls what it asks in this process
T5X = GOLDEN / "t5x" / "momentum_f32" / "checkpoint" / "checkpoint_4"
TORCH = GOLDEN / "torch_formats" / "adamw_legacy" / "checkpoint" / "checkpoint.pt"


class Served:
    """A service whose data and root lie in a folder: a checkpoint of T5X, two of PyTorch, and one that is damaged.

    Args:
        folder: An empty folder.
        public: Under which address browsers see it.
        users: Where the name of whoever asks stands.
    """

    def __init__(self, folder: Path, public: PublicAddress = DIRECT, users: UserHeader = NAMELESS) -> None:
        self.root, self.data = folder / "root", folder / "data"
        self.data.mkdir(parents=True)
        shutil.copytree(T5X, self.root / "run" / "checkpoint_4")
        for name in ("a.pt", "b.pt"):
            shutil.copy(TORCH, self.root / name)
        (self.root / "broken.pt").write_bytes(TORCH.read_bytes()[:1000])
        (folder / "secret").write_text("swordfish")
        self.database = Database(self.data, migrate=True)
        self.service = Service(self.database, Catalogue(self.database, [self.root]), Jobs(self.database))
        self.service.catalogue.scan()
        self.keys = Keys(TOKEN)
        self.routers = [
            catalogue_routes(self.service.catalogue),
            contents_routes(self.service),
            job_routes(self.service),
            screens(self.service),
        ]
        self.app: FastAPI = create_app(
            self.keys,
            replace(HOSTS, names={*HOSTS.names, public.host}),
            self.service.ready,
            self.service.figures,
            self.routers,
            self.database.change,
            public,
            users,
        )
        self.client = TestClient(
            self.app, base_url="http://localhost:8642", headers=BEARER, raise_server_exceptions=False
        )

    @contextmanager
    def working(self) -> Iterator[None]:
        """Has one worker do the jobs meanwhile."""
        worker = Worker(self.database, self.service.catalogue, self.service.jobs)
        thread = threading.Thread(target=worker.work)
        thread.start()
        try:
            yield
        finally:
            worker.stop()
            thread.join(60)

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Answers under an address meanwhile, as `statekit serve` does."""
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            server = uvicorn.Server(uvicorn.Config(self.app, log_config=None, **uvicorn_settings(self.keys)))
            thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
            thread.start()
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                thread.join(60)

    def close(self) -> None:
        """Closes the database."""
        self.database.close()


def write_step(
    source: Path, step: int, target: Path, container: str, layout: str, times: int = 1, still: bool = False
) -> None:
    """Writes another step of a run: values and slots are `step / 7` times as large, and `times` times as many.

    With `still`, slots stay as they are.
    """

    def scaled(one: Tensor) -> Tensor:
        values = (one.read() * np.float32(step / 7)).astype(one.dtype)
        return in_memory(np.concatenate([values] * times) if values.ndim else values)

    target.parent.mkdir(parents=True, exist_ok=True)
    home = registry.container(container)
    assert home.target_kind is not None
    with open_state(source) as opened, staged(target, home.target_kind) as stage:
        state = opened.state
        later = replace(
            state,
            params={path: scaled(one) for path, one in state.params.items()},
            slots={
                path: {name: one if still else scaled(one) for name, one in slots.items()}
                for path, slots in state.slots.items()
            },
            counts=Counts(step, step),
        )
        home.write(registry.layout(layout).encode(later), stage)
        stage.commit(home.open)
