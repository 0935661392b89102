"""The screens: drawn by the server from the service's records, each with its state in its address."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi import Query as Param
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.responses import RedirectResponse, Response

from statekit.conversion import registry
from statekit.errors import NotFoundError, StatekitError
from statekit.maps.model_map import map_names
from statekit.pages import charts
from statekit.pages.verdicts import VERDICTS
from statekit.service.records import ENDED, KINDS, Checkpoint, Node, Query, Run
from statekit.service.service import Service
from statekit.service.standing import fault_of
from statekit.service.web.addresses import WHOLE, address, filters, query_of, record_number
from statekit.service.web.api import After, Id, Number, Place
from statekit.service.web.branches import Branch, branch
from statekit.service.web.closer_views import closer_screens, over_run
from statekit.service.web.drawing import drawn
from statekit.service.web.forms import form_of, subjects_of
from statekit.service.web.problems import problem_of, problem_of_input
from statekit.service.web.proxies import user_of
from statekit.service.web.screens import ScreenContents, Screens, as_data, result_as_data, tensor_of

ROWS = 50
"""Rows of a table on one page."""
MOST_OPEN = 100
"""Modules of a tree that stand open from the beginning."""
MOST_LINES = 500
"""Lines of a log that are shown: its last."""
MOST_CHOICES = 500
"""Checkpoints that can be chosen from a list."""
NONE: list[str] = []
"""What a list in an address is if it isn't there."""
_SEAL_SAID = {
    "sealed": "Its manifest fits as far as names, sizes and times show. A check reads every byte.",
    "unsealed": "It has no manifest: nothing shows whether its bytes are still those that were written.",
    "changed": "It was written anew since it was sealed: its manifest is of what was there before.",
    "damaged": "It isn't what its manifest says.",
    "unknown": "Nobody could tell.",
}


@dataclass(frozen=True)
class Group:
    """Neighbours in the catalogue: steps of one run, or one that belongs to none.

    Attributes:
        run: The run, if they are steps of one.
        checkpoints: They.
    """

    run: Run | None
    checkpoints: tuple[Checkpoint, ...]


def grouped(checkpoints: tuple[Checkpoint, ...], runs: Callable[[int], Run]) -> list[Group]:
    """Returns checkpoints with those of one run together, where the first of them stands."""
    groups: dict[tuple[str, int], list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        key = ("run", checkpoint.run) if checkpoint.run is not None else ("one", checkpoint.id)
        groups.setdefault(key, []).append(checkpoint)
    return [Group(_run_of(runs, some[0]), tuple(some)) for some in groups.values()]


class Readable(APIRoute):
    """A route whose errors are pages: people read them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns what answers."""
        handler = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handler(request)
            except StatekitError as error:
                problem = problem_of(error)
            except RequestValidationError as error:
                problem = problem_of_input(error.errors())
            return drawn(request, "problem.html", {"problem": problem}, problem.status)

        return answered


def screens(service: Service) -> APIRouter:
    """Returns the routes of the screens, and of their scripts and styles."""
    of = Screens(service)
    routes = APIRouter(include_in_schema=False, route_class=Readable)
    for add in (_data, _catalogue, _checkpoint, closer_screens, _jobs):
        add(routes, of)
    return routes


def _data(routes: APIRouter, of: Screens) -> None:
    """Adds the way from every page to the same as data, which the interface for programs has."""

    @routes.get("/diff.json")
    def show_difference(
        a: Number | None = None,
        b: Number | None = None,
        path: str = "",
        slot: str = "",
        run: Number | None = None,
    ) -> Response:
        if run is not None:
            job = of.about_parameter(of.steps(run), path)
            return result_as_data(job, f"run {run}: {path}", "parameter")
        if a is None or b is None:
            raise NotFoundError("Two checkpoints are compared.", place="a and b", expected="their numbers")
        first, second = of.catalogue.checkpoint(a), of.catalogue.checkpoint(b)
        job = of.compared((first.id, second.id), (path, slot))
        return result_as_data(job, f"checkpoints {a} and {b}", "diff")

    @routes.get("/checkpoints/{number}/parameters/{index}.json")
    def show_slots(number: Id, index: Place, over: str = "") -> Response:
        path = of.parameters(number, index)[index]["path"]
        subjects = of.followed(of.catalogue.checkpoint(number), over)
        return result_as_data(of.about_parameter(subjects, path), f"checkpoint {number}: {path}", "parameter")

    @routes.get("/checkpoints.json")
    def show_catalogue(request: Request) -> Response:
        query = {name: value for name, value in request.query_params.items() if value}
        if "q" in query:
            query["text"] = query.pop("q")
        return as_data("checkpoints", request.url.path, urlencode(query))

    @routes.get("/{kind}.json")
    def show_data(request: Request, kind: str) -> Response:
        return as_data(kind, request.url.path, request.url.query)

    @routes.get("/{kind}/{number}.json")
    def show_record_as_data(request: Request, kind: str, number: Id) -> Response:
        return as_data(f"{kind}/{number}", request.url.path, request.url.query)


def _catalogue(routes: APIRouter, of: Screens) -> None:
    @routes.get("/static/{name}")
    def file(name: str) -> Response:
        if name not in of.static:
            raise NotFoundError("There is no such file.", place=name[:200])
        content, kind = of.static[name]
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    @routes.get("/")
    def list_checkpoints(request: Request, cursor: str | None = None) -> Response:
        query = query_of(request.query_params)
        page = of.catalogue.checkpoints(query, cursor, ROWS)
        context = {
            "page": page,
            "query": query,
            "is_whole": (is_whole := query == replace(WHOLE, sort=query.sort)),
            "runs": of.catalogue.runs(None, ROWS) if is_whole and cursor is None else None,
            "groups": grouped(page.items, of.catalogue.run),
            "filters": filters(query, of.catalogue.facets(query)),
            "roots": of.catalogue.roots(),
            "address": partial(address, query),
            "data_url": address(query, cursor).replace("/", "/checkpoints.json", 1),
            "scanning": of.catalogue.scanning(),
        }
        page_itself = drawn(request, "catalogue.html", context)
        # Without the filters that choose nothing.
        page_itself.headers["hx-replace-url"] = address(query, cursor)
        return page_itself

    @routes.post("/scan")
    async def scan() -> Response:
        of.catalogue.rescan()
        return _next("/")


def _checkpoint(routes: APIRouter, of: Screens) -> None:
    @routes.get("/checkpoints/{number}")
    def show_checkpoint(
        request: Request,
        number: Id,
        layout: str | None = None,
        unfolded: Annotated[list[str], Param(alias="open")] = NONE,
    ) -> Response:
        """Shows a checkpoint; `open` are the modules of its tree that stand open."""
        about, recent, contents = of.about(number), of.latest(number), of.contents_of(number)
        checkpoint = about["checkpoint"]
        context = {
            **about,
            "run": _run_of(of.catalogue.run, checkpoint),
            "root": next((root for root in of.catalogue.roots() if root.id == checkpoint.root), None),
            "seal_said": _SEAL_SAID[checkpoint.seal],
            "fault": fault_of(checkpoint),
            "jobs": recent,
            "examined": of.examined(recent.get("doctor"), number),
            "contents": contents,
            "branch": contents and branch(contents.tree),
            "below": partial(_below, contents, frozenset(unfolded[:MOST_OPEN])),
            "roots": of.catalogue.roots(),
            **_targets(checkpoint, layout),
        }
        return drawn(request, "checkpoint.html", context)

    @routes.get("/checkpoints/{number}/tree")
    def show_branch(request: Request, number: Id, at: str = "", after: After = 0) -> Response:
        contents = of.contents_of(number)
        if contents is None:
            raise NotFoundError("Nobody has looked into it yet.", place=f"checkpoint {number}")
        context = {
            **of.about(number),
            "contents": contents,
            "branch": branch(contents.tree, at, after),
            "below": lambda at: None,
        }
        return drawn(request, "branch.html", context)

    @routes.post("/checkpoints/{number}/jobs")
    async def begin(request: Request, number: Id) -> Response:
        form = await form_of(request)
        job = await run_in_threadpool(of.submit, form, (number,), user_of(request, "browser"))
        stays = job.kind in {"inspect", "check", "seal", "doctor"}
        return _next(_then(form) or (f"/checkpoints/{number}" if stays else f"/jobs/{job.id}"))

    @routes.post("/checkpoints/{number}/tags")
    async def change_tags(request: Request, number: Id) -> Response:
        form = await form_of(request)
        added, removed = form.get("add"), form.get("remove")
        if isinstance(removed, str):
            await run_in_threadpool(of.catalogue.untag, number, removed)
        elif isinstance(added, str) and added.strip():
            await run_in_threadpool(of.catalogue.tag, number, added)
        return _next(f"/checkpoints/{number}")

    @routes.post("/checkpoints/{number}/note")
    async def change_note(request: Request, number: Id) -> Response:
        note = (await form_of(request)).get("note")
        text = note if isinstance(note, str) else ""
        await run_in_threadpool(of.catalogue.note, number, text, user_of(request, ""))
        return _next(f"/checkpoints/{number}")

    @routes.get("/lineage/{number}")
    def show_lineage(request: Request, number: Id) -> Response:
        lineage = of.service.lineage(number)
        nodes = {node.id: node for node in lineage.nodes}
        context = {
            **of.about(number),
            "lineage": lineage,
            "edges": [(nodes[edge.source], nodes[edge.target], edge) for edge in lineage.edges],
            "graph": charts.of_lineage(
                {node.id: _of_node(node) for node in lineage.nodes},
                [(edge.source, edge.target, edge.kind) for edge in lineage.edges],
                f"checkpoint-{number}",
            ),
        }
        return drawn(request, "lineage.html", context)


def _jobs(routes: APIRouter, of: Screens) -> None:
    @routes.get("/jobs")
    def list_jobs(request: Request, kind: str = "", state: str = "", cursor: str | None = None) -> Response:
        page = of.jobs.jobs(kind=kind or None, state=state or None, cursor=cursor, limit=ROWS)
        said_here = {"kind": kind, "state": state, "cursor": cursor}
        further = {**said_here, "cursor": page.next_cursor}
        context = {
            "page": page,
            "checkpoints": of.named(page.items),
            "kind": kind,
            "state": state,
            "kinds": tuple(KINDS),
            "states": ("queued", "running", *ENDED),
            "data_url": f"/jobs.json?{urlencode({k: v for k, v in said_here.items() if v})}",
            "next_page": page.next_cursor
            and f"/jobs?{urlencode({key: value for key, value in further.items() if value})}",
        }
        return drawn(request, "jobs.html", context)

    @routes.post("/jobs")
    async def begin_about_several(request: Request) -> Response:
        form = await form_of(request)
        job = await run_in_threadpool(of.submit, form, subjects_of(form), user_of(request, "browser"))
        return _next(_then(form) or f"/jobs/{job.id}")

    @routes.get("/jobs/{number}")
    def show_job(request: Request, number: Id) -> Response:
        job = of.jobs.job(number)
        result = of.result_of(job)
        if result and job.kind == "verify":
            result = result["certificate"]
        context = {
            "job": job,
            "kind": job.kind,
            "checkpoints": of.named([job]),
            "result": result,
            "verdict": result
            and job.kind in VERDICTS
            and not tensor_of(job)[0]
            and VERDICTS[job.kind](result),
            "log": of.jobs.log(number, MOST_LINES),
        }
        return drawn(request, "job.html", context)

    @routes.post("/jobs/{number}/cancel")
    def cancel(number: Id) -> Response:
        return _next(f"/jobs/{of.jobs.cancel(number).id}")

    @routes.get("/diff")
    def compare(
        request: Request, a: str = "", b: str = "", path: str = "", slot: str = "", run: str = ""
    ) -> Response:
        """Shows in what two checkpoints differ; `path` and `slot`: in one tensor; `run`: over its steps instead."""
        if path and (run_number := record_number(run)) is not None:
            return over_run(request, of, run_number, path, slot)
        first, second = of.chosen(a), of.chosen(b)
        job = None
        if first is not None and second is not None:
            job = of.compared((first.id, second.id), (path, slot))
        result = of.result_of(job)
        both = {"a": first.id if first else "", "b": second.id if second else ""}
        tensor = {name: value for name, value in (("path", path), ("slot", slot)) if value}
        context = {
            "first": first,
            "second": second,
            "job": job,
            "result": result,
            "verdict": result and not path and VERDICTS["diff"](result),
            "path": path,
            "slot": slot,
            "whole_url": f"/diff?{urlencode(both)}",
            "run_url": _over_run(first, second, path, slot),
            "choices": of.catalogue.checkpoints(Query(sort="path", readable=True), None, MOST_CHOICES).items,
            "here_url": f"/diff?{urlencode({**both, **tensor})}",
        }
        return drawn(request, "compare.html", context)


def _below(contents: ScreenContents | None, unfolded: frozenset[str], at: str) -> Branch | None:
    """Returns what stands in a module that is open; None of any other."""
    return branch(contents.tree, at) if contents is not None and at in unfolded else None


def _over_run(first: Checkpoint | None, second: Checkpoint | None, path: str, slot: str) -> str | None:
    """Returns where a tensor is shown over the steps of a run; None unless two steps of one are compared in it."""
    if first is None or second is None or not path or first.run is None or first.run != second.run:
        return None
    return f"/diff?{urlencode({'run': first.run, 'path': path, 'slot': slot})}"


def _of_node(node: Node) -> tuple[str, str, str]:
    """Returns what a node of the lineage is called, what stands below that, and where a click leads."""
    checkpoint = node.checkpoint
    if checkpoint is None:
        kind = ", ".join(str(node.said[name]) for name in ("container", "layout") if node.said.get(name))
        return "not in the catalogue", kind, ""
    written = f"{checkpoint.modified:%Y-%m-%d %H:%M}"
    return (
        checkpoint.name,
        ", ".join(filter(None, [written, checkpoint.layout, checkpoint.seal])),
        f"/checkpoints/{checkpoint.id}",
    )


def _usual_container(layout: registry.LayoutCard | None, names: Sequence[str]) -> str:
    """Returns the first of a layout's containers that is among these; "" if none is."""
    containers = () if layout is None else layout.containers
    return next((name for name in containers if name in names), "")


def _targets(checkpoint: Checkpoint, layout: str | None) -> dict[str, Any]:
    """Returns what a conversion of a checkpoint can be written as, and what is chosen of it to begin with."""
    containers = [registry.container_card(name) for name in registry.container_names()]
    layouts = [registry.layout_card(name) for name in registry.layout_names()]
    schema = (checkpoint.optimizer or "").partition("/")[0]
    chosen = next((card for card in layouts if card.name == layout), None)
    writable = [container for container in containers if container.target_kind]
    usual = _usual_container(chosen, [container.name for container in writable])
    return {
        "containers": writable,
        "layouts": [layout for layout in layouts if not schema or layout.holds(schema.split("+"))],
        "maps": map_names(),
        "target_path": f"{checkpoint.path}-{chosen.name if chosen else 'converted'}",
        "chosen_layout": chosen.name if chosen else "",
        "chosen_container": usual,
    }


def _then(form: FormData) -> str | None:
    """Returns the screen that a form says to go on with, which is one of ours; None if it says none."""
    place = str(form.get("then", ""))
    return place if place.startswith(("/checkpoints/", "/runs/", "/diff?")) else None


def _next(address: str) -> Response:
    return RedirectResponse(address, HTTPStatus.SEE_OTHER)


def _run_of(runs: Callable[[int], Run], checkpoint: Checkpoint) -> Run | None:
    """Returns the run that a checkpoint is a step of; None of one that stands by itself, or whose run is gone."""
    if checkpoint.run is None:
        return None
    try:
        return runs(checkpoint.run)
    except NotFoundError:
        return None
