"""The application: every route behind the guard, every error as a problem, and what machines ask of a service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from statekit import __version__
from statekit.errors import StatekitError
from statekit.service.web import sign_in
from statekit.service.web.drawing import answered
from statekit.service.web.keys import Keys
from statekit.service.web.metrics import Figures, Metrics
from statekit.service.web.problems import Problem, problem_of, problem_of_input
from statekit.service.web.proxies import DIRECT, NAMELESS, Behind, Named, PublicAddress, UserHeader
from statekit.service.web.remembered import Remembered
from statekit.service.web.requests import Requests
from statekit.service.web.security import Guard, Hosts, Refused


def create_app(
    keys: Keys,
    hosts: Hosts,
    ready: Callable[[], str | None] = lambda: None,
    figures: Callable[[], Figures] = dict,
    routers: Sequence[APIRouter] = (),
    change: Callable[[], int | None] | None = None,
    public: PublicAddress = DIRECT,
    users: UserHeader = NAMELESS,
) -> FastAPI:
    """Returns the application.

    Args:
        keys: Who may ask.
        hosts: Under which names.
        ready: Returns why the service can't work now; None if it can.
        figures: Returns what there is, for `/metrics`.
        routers: What is answered behind the guard: the API, the screens.
        change: Returns the number of the catalogue's last change, None while somebody writes; without it nothing is
            remembered.
        public: Under which address browsers see it.
        users: Where the name of whoever asks stands.
    """
    app = FastAPI(
        title="statekit",
        version=__version__,
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        servers=[{"url": public.prefix}] if public.prefix else None,
    )
    metrics = Metrics(figures)
    if change is not None:
        app.add_middleware(Remembered, change=change)
    if users.name:
        app.add_middleware(Named, users=users)
    app.add_middleware(Guard, keys=keys, hosts=hosts, origin=public.origin)
    app.add_middleware(Requests, metrics=metrics)
    if public.prefix:
        app.add_middleware(Behind, prefix=public.prefix)
    app.add_exception_handler(StatekitError, _failed)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _not_understood)
    app.include_router(sign_in.router(keys, public))

    @app.get("/healthz", include_in_schema=False)
    async def healthy() -> Response:
        return PlainTextResponse("ok\n")

    @app.get("/readyz", include_in_schema=False)
    def is_ready() -> Response:
        reason = ready()
        if reason is None:
            return PlainTextResponse("ok\n")
        return Problem(HTTPStatus.SERVICE_UNAVAILABLE, "The service can't work now.", found=reason).response()

    @app.get("/metrics", include_in_schema=False)
    def show_figures() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    for router in routers:
        app.include_router(router)
    return app


def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, StatekitError)
    return answered(problem_of(error), request)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, Refused):
        return answered(error.problem, request)
    problem = Problem(
        error.status_code,
        error.detail if error.status_code != HTTPStatus.NOT_FOUND else "There is nothing at this address.",
        place=request.url.path[:500],
        headers=dict(error.headers or {}),
    )
    return answered(problem, request)


def _not_understood(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return answered(problem_of_input(error.errors()), request)
