"""The screens: drawn by the server from the service's records, each with its state in its address."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.responses import HTMLResponse, RedirectResponse, Response

from statekit.conversion import registry
from statekit.errors import NotFoundError, StatekitError
from statekit.maps.model_map import map_names
from statekit.pages import charts
from statekit.pages.environment import environment, script, stylesheet
from statekit.pages.listing import listing
from statekit.pages.verdicts import VERDICTS
from statekit.service.records import ENDED, KINDS, Checkpoint, Job, Node, Query, Run
from statekit.service.service import Service
from statekit.service.web import wording
from statekit.service.web.addresses import WHOLE, address, asked, filters
from statekit.service.web.branches import branch, tree_of
from statekit.service.web.forms import options
from statekit.service.web.problems import problem_of, problem_of_input

ROWS = 50
"""Rows of a table on one page."""
MOST_RECENT = 50
"""Jobs about a checkpoint that its page looks at."""
MOST_STEPS = 50
"""Steps of a run that a parameter is followed over."""
MOST_LINES = 500
"""Lines of a log that are shown: its last."""
MOST_CHOICES = 500
"""Checkpoints that can be chosen from a list."""
_HERE = Path(__file__).parent
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}
_HEADERS = {"referrer-policy": "same-origin"}
"""Under no-referrer a browser says no origin of a form that it posts, and the guard refuses that."""
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
    for one in checkpoints:
        key = ("run", one.run) if one.run is not None else ("one", one.id)
        groups.setdefault(key, []).append(one)
    return [Group(_run_of(runs, some[0]), tuple(some)) for some in groups.values()]


class Screens:
    """What all screens need: the service, the templates, and what is looked up for several of them.

    Args:
        service: What they show.
    """

    def __init__(self, service: Service) -> None:
        self.service, self.catalogue, self.jobs = service, service.catalogue, service.jobs
        self.static = {
            path.name: (path.read_bytes(), _TYPES[path.suffix])
            for path in sorted((_HERE / "static").iterdir())
        }
        self.static["statekit.css"] = (stylesheet().encode(), _TYPES[".css"])
        self.static["statekit.js"] = (script().encode(), _TYPES[".js"])
        self._pages = environment(_HERE / "templates", shared={"is_ended": lambda job: job.state in ENDED})
        self._pages.filters.update(age=wording.age, duration=wording.duration, count=wording.count)
        # A job that has ended stays as it is, and the tree of a large checkpoint takes a while.
        self._read = lru_cache(maxsize=4)(lambda job: Contents(self.jobs.result(job)))

    def drawn(
        self, request: Request, name: str, said: Mapping[str, Any], status: int = HTTPStatus.OK
    ) -> Response:
        """Returns a page."""
        theme = request.cookies.get("theme")
        known = {"theme": theme if theme in {"light", "dark"} else None, "here": request.url.path}
        return HTMLResponse(self._pages.get_template(name).render({**known, **said}), status, _HEADERS)

    def readable(self) -> type[APIRoute]:
        """Returns the kind of routes whose errors are pages: people read them."""
        screens = self

        class Readable(APIRoute):
            def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
                handler = super().get_route_handler()

                async def answered(request: Request) -> Response:
                    try:
                        return await handler(request)
                    except StatekitError as error:
                        problem = problem_of(error)
                    except RequestValidationError as error:
                        problem = problem_of_input(error.errors())
                    return screens.drawn(request, "problem.html", {"problem": problem}, problem.status)

                return answered

        return Readable

    def latest(self, number: int) -> dict[str, Job]:
        """Returns the youngest job of each kind about a checkpoint."""
        recent = self.jobs.jobs(subject=number, limit=MOST_RECENT).items
        return {job.kind: job for job in reversed(recent)}

    def result_of(self, job: Job | None) -> Mapping[str, Any] | None:
        """Returns what came of a job, if anything did."""
        return self.jobs.result(job.id) if job is not None and job.has_result else None

    def contents_of(self, number: int) -> Contents | None:
        """Returns what the last look into a checkpoint came to, one with statistics before one without."""
        looks = self.jobs.jobs(subject=number, kind="inspect", state="done", limit=MOST_RECENT).items
        whole = [job for job in looks if not job.options.get("filter")]
        chosen = next((job for job in whole if job.options.get("stats")), next(iter(whole), None))
        return None if chosen is None else self._read(chosen.id)

    def submit(self, form: FormData, subjects: tuple[int, ...]) -> Job:
        """Asks for the job that a form describes."""
        kind = form.get("kind")
        named = kind if isinstance(kind, str) else ""
        return self.jobs.submit(named, subjects, options(form), requested_by="browser")

    def about(self, number: int) -> dict[str, Any]:
        """Returns what every part of a checkpoint's page knows."""
        checkpoint = self.catalogue.checkpoint(number)
        address = f"/checkpoints/{number}"
        return {"checkpoint": checkpoint, "is_present": checkpoint.status == "present", "here_url": address}

    def steps(self, checkpoint: Checkpoint) -> tuple[int, ...]:
        """Returns the numbers of the resumable steps of a checkpoint's run, the youngest `MOST_STEPS`, in order."""
        if checkpoint.run is None:
            return ()
        page = self.catalogue.checkpoints(
            Query(run=checkpoint.run, readable=True, sort="-step"), None, MOST_STEPS
        )
        return tuple(one.id for one in reversed(page.items) if one.resumable)

    def about_parameter(self, subjects: tuple[int, ...], path: str) -> Job | None:
        """Returns the job that has looked at a parameter, or the last that was asked to."""
        known = self.jobs.known("parameter", subjects, {"path": path})
        if known is not None:
            return known
        recent = self.jobs.jobs(subject=subjects[0], kind="parameter", limit=MOST_RECENT).items
        return next(
            (job for job in recent if job.subjects == subjects and job.options.get("path") == path), None
        )

    def compared(self, subjects: tuple[int, int], tensor: tuple[str, str]) -> Job | None:
        """Returns the youngest job that compares two checkpoints, as a whole or in one tensor."""
        recent = self.jobs.jobs(subject=subjects[0], kind="diff", limit=MOST_RECENT).items
        alike = (one for one in recent if one.subjects == subjects)
        return next((one for one in alike if _tensor_of(one) == tensor), None)

    def parameters(self, number: int, index: int) -> list[dict[str, Any]]:
        """Returns the parameters of a checkpoint, one of which has this index."""
        contents = self.contents_of(number)
        parameters: list[dict[str, Any]] = contents.result["parameters"] if contents else []
        if not 0 <= index < len(parameters):
            raise NotFoundError(
                "There is no such parameter.", place=f"checkpoint {number}", found=str(index)[:30]
            )
        return parameters

    def followed(self, checkpoint: Checkpoint, over: str) -> tuple[int, ...]:
        """Returns the checkpoints in which a parameter is shown: this, or with `over=run` the steps of its run."""
        steps = self.steps(checkpoint) if over == "run" else ()
        return steps if len(steps) > 1 else (checkpoint.id,)

    def named(self, some: Iterable[Job]) -> dict[int, Checkpoint]:
        """Returns the checkpoints that jobs are about, by their numbers."""
        numbers = {number for job in some for number in job.subjects}
        return {number: self.catalogue.checkpoint(number) for number in numbers}


def screens(service: Service) -> APIRouter:
    """Returns the routes of the screens, and of their scripts and styles.

    Args:
        service: What they show.
    """
    of = Screens(service)
    routes = APIRouter(include_in_schema=False, route_class=of.readable())
    for add in (_data, _catalogue, _checkpoint, _parameter, _jobs):
        add(routes, of)
    return routes


def _data(routes: APIRouter, of: Screens) -> None:
    """Adds the way from every page to the same as data, which the interface for programs has."""

    @routes.get("/diff.json")
    def show_difference(a: int, b: int, path: str = "", slot: str = "") -> Response:
        first, second = of.catalogue.checkpoint(a), of.catalogue.checkpoint(b)
        job = of.compared((first.id, second.id), (path, slot))
        return _result_as_data(job, f"checkpoints {a} and {b}", "diff")

    @routes.get("/checkpoints/{number}/parameters/{index}.json")
    def show_slots(number: int, index: int, over: str = "") -> Response:
        path = of.parameters(number, index)[index]["path"]
        subjects = of.followed(of.catalogue.checkpoint(number), over)
        return _result_as_data(
            of.about_parameter(subjects, path), f"checkpoint {number}: {path}", "parameter"
        )

    @routes.get("/checkpoints.json")
    def show_catalogue(request: Request) -> Response:
        said = {name: value for name, value in request.query_params.items() if value}
        if "q" in said:
            said["text"] = said.pop("q")
        return _as_data("checkpoints", request.url.path, urlencode(said))

    @routes.get("/{kind}.json")
    def show_data(request: Request, kind: str) -> Response:
        return _as_data(kind, request.url.path, request.url.query)

    @routes.get("/{kind}/{number}.json")
    def show_one_as_data(request: Request, kind: str, number: int) -> Response:
        return _as_data(f"{kind}/{number}", request.url.path, request.url.query)


def _catalogue(routes: APIRouter, of: Screens) -> None:
    @routes.get("/static/{name}")
    def file(name: str) -> Response:
        if name not in of.static:
            raise NotFoundError("There is no such file.", place=name[:200])
        content, kind = of.static[name]
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    @routes.get("/")
    def list_checkpoints(request: Request, cursor: str | None = None) -> Response:
        query = asked(request.query_params)
        page = of.catalogue.checkpoints(query, cursor, ROWS)
        said = {
            "page": page,
            "query": query,
            "is_whole": query == replace(WHOLE, sort=query.sort),
            "groups": grouped(page.items, of.catalogue.run),
            "filters": filters(query, of.catalogue.facets(query)),
            "roots": of.catalogue.roots(),
            "address": partial(address, query),
            "data_url": address(query, cursor).replace("/", "/checkpoints.json", 1),
            "scanning": of.catalogue.scanning(),
        }
        page_itself = of.drawn(request, "catalogue.html", said)
        page_itself.headers["hx-replace-url"] = address(
            query, cursor
        )  # without the filters that choose nothing
        return page_itself

    @routes.post("/scan")
    async def scan() -> Response:
        of.catalogue.rescan()
        return _next("/")


def _checkpoint(routes: APIRouter, of: Screens) -> None:
    @routes.get("/checkpoints/{number}")
    def show_checkpoint(request: Request, number: int, layout: str | None = None) -> Response:
        known, recent, contents = of.about(number), of.latest(number), of.contents_of(number)
        checkpoint = known["checkpoint"]
        examined = of.result_of(recent.get("doctor"))
        said = {
            **known,
            "run": _run_of(of.catalogue.run, checkpoint),
            "root": next((root for root in of.catalogue.roots() if root.id == checkpoint.root), None),
            "seal_said": _SEAL_SAID[checkpoint.seal],
            "jobs": recent,
            "examined": examined and examined["checkpoints"][0],
            "contents": contents,
            "branch": contents and branch(contents.tree),
            "roots": of.catalogue.roots(),
            **_targets(checkpoint, layout),
        }
        return of.drawn(request, "checkpoint.html", said)

    @routes.get("/checkpoints/{number}/tree")
    def show_branch(request: Request, number: int, at: str = "", after: int = 0) -> Response:
        contents = of.contents_of(number)
        if contents is None:
            raise NotFoundError("Nobody has looked into it yet.", place=f"checkpoint {number}")
        said = {
            **of.about(number),
            "contents": contents,
            "branch": branch(contents.tree, at, max(after, 0)),
        }
        return of.drawn(request, "branch.html", said)

    @routes.post("/checkpoints/{number}/jobs")
    async def begin(request: Request, number: int) -> Response:
        form = await request.form()
        job = await run_in_threadpool(of.submit, form, (number,))
        stays = job.kind in {"inspect", "check", "seal", "doctor"}
        return _next(f"/checkpoints/{number}" if stays else f"/jobs/{job.id}")

    @routes.post("/checkpoints/{number}/tags")
    async def change_tags(request: Request, number: int) -> Response:
        form = await request.form()
        added, removed = form.get("add"), form.get("remove")
        if isinstance(removed, str):
            await run_in_threadpool(of.catalogue.untag, number, removed)
        elif isinstance(added, str) and added.strip():
            await run_in_threadpool(of.catalogue.tag, number, added)
        return _next(f"/checkpoints/{number}")

    @routes.post("/checkpoints/{number}/note")
    async def change_note(request: Request, number: int) -> Response:
        note = (await request.form()).get("note")
        await run_in_threadpool(of.catalogue.note, number, note if isinstance(note, str) else "")
        return _next(f"/checkpoints/{number}")

    @routes.get("/lineage/{number}")
    def show_lineage(request: Request, number: int) -> Response:
        lineage = of.service.lineage(number)
        nodes = {node.id: node for node in lineage.nodes}
        said = {
            **of.about(number),
            "lineage": lineage,
            "edges": [(nodes[edge.source], nodes[edge.target], edge) for edge in lineage.edges],
            "graph": charts.lineage(
                {node.id: _of_node(node) for node in lineage.nodes},
                [(edge.source, edge.target, edge.kind) for edge in lineage.edges],
                f"checkpoint-{number}",
            ),
        }
        return of.drawn(request, "lineage.html", said)


def _parameter(routes: APIRouter, of: Screens) -> None:
    @routes.get("/checkpoints/{number}/parameters/{index}")
    def show_parameter(request: Request, number: int, index: int, over: str = "") -> Response:
        """Shows a parameter with its slots or, `over=run`, what they were over the steps of its run."""
        known, parameters = of.about(number), of.parameters(number, index)
        one, checkpoint = parameters[index], known["checkpoint"]
        subjects = of.followed(checkpoint, over)
        job = of.about_parameter(subjects, one["path"])
        said = {
            **known,
            "here_url": f"/checkpoints/{number}/parameters/{index}{'?over=run' if len(subjects) > 1 else ''}",
            "index": index,
            "one": one,
            "neighbours": [i for i in (index - 1, index + 1) if 0 <= i < len(parameters)],
            "parameters": parameters,
            "subjects": subjects,
            "steps": of.steps(checkpoint),
            "job": job,
            "record": of.result_of(job),
        }
        return of.drawn(request, "slots.html", said)


def _jobs(routes: APIRouter, of: Screens) -> None:
    @routes.get("/jobs")
    def list_jobs(request: Request, kind: str = "", state: str = "", cursor: str | None = None) -> Response:
        page = of.jobs.jobs(kind=kind or None, state=state or None, cursor=cursor, limit=ROWS)
        said_here = {"kind": kind, "state": state, "cursor": cursor}
        further = {**said_here, "cursor": page.next_cursor}
        said = {
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
        return of.drawn(request, "jobs.html", said)

    @routes.post("/jobs")
    async def begin_about_several(request: Request) -> Response:
        form = await request.form()
        numbers = tuple(
            int(one) for one in form.getlist("subject") if isinstance(one, str) and one.isdecimal()
        )
        job = await run_in_threadpool(of.submit, form, numbers)
        if job.kind == "parameter" and str(form.get("then", "")).startswith("/checkpoints/"):
            return _next(str(form["then"]))
        if job.kind == "diff" and len(numbers) == 2:
            tensor = {name: job.options[name] for name in ("path", "slot") if name in job.options}
            return _next(f"/diff?{urlencode({'a': numbers[0], 'b': numbers[1], **tensor})}")
        return _next(f"/jobs/{job.id}")

    @routes.get("/jobs/{number}")
    def show_job(request: Request, number: int) -> Response:
        job = of.jobs.job(number)
        result = of.result_of(job)
        lines = [str(event.data.get("line", "")) for event in of.jobs.events(number) if event.kind == "log"]
        said = {
            "job": job,
            "kind": job.kind,
            "checkpoints": of.named([job]),
            "result": result,
            "verdict": result
            and job.kind in VERDICTS
            and not _tensor_of(job)[0]
            and VERDICTS[job.kind](result),
            "log": lines[-MOST_LINES:],
        }
        return of.drawn(request, "job.html", said)

    @routes.post("/jobs/{number}/cancel")
    def cancel(number: int) -> Response:
        return _next(f"/jobs/{of.jobs.cancel(number).id}")

    @routes.get("/diff")
    def compare(request: Request, a: str = "", b: str = "", path: str = "", slot: str = "") -> Response:
        """Shows in what two checkpoints differ or, `path` and `slot`, how far they are apart in one tensor."""
        chosen = [of.catalogue.checkpoint(int(one)) if one.isdecimal() else None for one in (a, b)]
        first, second = chosen
        job = None
        if first is not None and second is not None:
            job = of.compared((first.id, second.id), (path, slot))
        result = of.result_of(job)
        whole = urlencode({"a": a, "b": b})
        tensor = {name: value for name, value in (("path", path), ("slot", slot)) if value}
        said = {
            "first": first,
            "second": second,
            "job": job,
            "result": result,
            "verdict": result and not path and VERDICTS["diff"](result),
            "path": path,
            "slot": slot,
            "whole_url": f"/diff?{whole}",
            "choices": of.catalogue.checkpoints(Query(sort="path", readable=True), None, MOST_CHOICES).items,
            "here_url": f"/diff?{urlencode({'a': a, 'b': b, **tensor})}",
        }
        return of.drawn(request, "compare.html", said)


def _tensor_of(job: Job) -> tuple[str, str]:
    """Returns the parameter and the slot that a comparison is of; empty of one of whole checkpoints."""
    return str(job.options.get("path", "")), str(job.options.get("slot", ""))


def _as_data(address: str, place: str, query: str) -> Response:
    """Returns the way to the same as data."""
    if address.partition("/")[0] not in {"checkpoints", "jobs", "lineage", "runs"}:
        raise NotFoundError("There is nothing at this address.", place=place[:500])
    return RedirectResponse(f"/api/v1/{address}{f'?{query}' if query else ''}", HTTPStatus.TEMPORARY_REDIRECT)


def _result_as_data(job: Job | None, place: str, kind: str) -> Response:
    if job is None or not job.has_result:
        raise NotFoundError(
            "Nobody has looked at it yet.", place=place, remedy=f"ask for a job of the kind {kind}"
        )
    return _as_data(f"jobs/{job.id}/result", place, "")


class Contents:
    """What looking into a checkpoint came to: its parameters as a tree, and where it resumes.

    Args:
        result: What the job `inspect` came to.
    """

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.result = result
        self.tree = tree_of(result["parameters"])
        self.axes = listing(result["parameters"]).axes
        self.measured = any("stats" in one for one in result["parameters"])


def _of_node(node: Node) -> tuple[str, str, str]:
    """Returns what a node of the lineage is called, what stands below that, and where a click leads."""
    one = node.checkpoint
    if one is None:
        said = ", ".join(str(node.said[name]) for name in ("container", "layout") if node.said.get(name))
        return "not in the catalogue", said, ""
    return one.name, ", ".join(filter(None, [one.layout, one.seal])), f"/checkpoints/{one.id}"


def _targets(checkpoint: Checkpoint, layout: str | None) -> dict[str, Any]:
    """Returns what a conversion of a checkpoint can be written as, and what is chosen of it to begin with."""
    containers = [registry.container_card(name) for name in registry.container_names()]
    layouts = [registry.layout_card(name) for name in registry.layout_names()]
    schema = (checkpoint.optimizer or "").partition("/")[0]
    chosen = next((one for one in layouts if one.name == layout), None)
    writable = [one for one in containers if one.target_kind]
    usual = (
        next((name for name in chosen.containers if name in {one.name for one in writable}), "")
        if chosen
        else ""
    )
    return {
        "containers": writable,
        "layouts": [one for one in layouts if not schema or one.holds(schema.split("+"))],
        "maps": map_names(),
        "target_path": f"{checkpoint.path}-{chosen.name if chosen else 'converted'}",
        "chosen_layout": chosen.name if chosen else "",
        "chosen_container": usual,
    }


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
