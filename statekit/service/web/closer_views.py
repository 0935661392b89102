"""The screens that look closer: at the steps of a run, at layers, at one parameter, and at a region of a tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi import Query as Param
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

from statekit.errors import NotFoundError, UsageError
from statekit.pages import charts
from statekit.pages.layers import MEASURES, by_layer
from statekit.pages.listing import numbers
from statekit.service.records import Checkpoint, Job, Query
from statekit.service.standing import Rule
from statekit.service.web.api import After, Id, Place
from statekit.service.web.drawing import drawn
from statekit.service.web.forms import form_of, subjects_of
from statekit.service.web.proxies import user_of
from statekit.service.web.screens import Screens
from statekit.statistics.pictures import shape_of_matrix

MOST_OF_RUN = 500
"""Steps of a run that its page lists."""
STALE = frozenset({"moments-stale", "weights-stale", "tensors-stale"})
"""Doctor's findings of what has the bits of the step before."""
PARTS = 4
"""Parts along each side of a picture that are zoomed into."""
LEAST = 8
"""Rows or columns below which there is nothing to zoom into."""
Last = Annotated[int, Param(ge=1, le=1000)]
_RANGE = re.compile(r"(\d{1,15}):(\d{1,15})")


@dataclass(frozen=True)
class Step:
    """A step of a run, with what doctor found of it beside the others.

    Attributes:
        checkpoint: It.
        before: The number of the step before; None of the first.
        findings: Doctor's findings.
        stale: What has the bits of the step before, by the names of the findings.
    """

    checkpoint: Checkpoint
    before: int | None
    findings: tuple[dict[str, Any], ...]
    stale: tuple[tuple[str, tuple[str, ...]], ...]


def closer_screens(routes: APIRouter, of: Screens) -> None:
    """Adds the routes of these screens."""
    _run(routes, of)
    _layers(routes, of)
    _parameter(routes, of)
    _region(routes, of)


def _run(routes: APIRouter, of: Screens) -> None:
    @routes.get("/runs/{number}")
    def show_run(request: Request, number: Id) -> Response:
        """Shows a run: its steps, and what doctor found between them."""
        run = of.catalogue.run(number)
        page = of.catalogue.checkpoints(Query(run=number, sort="step"), None, MOST_OF_RUN)
        readable = tuple(item.id for item in page.items if item.resumable)
        job = _doctor_of(of, readable)
        context = {
            "run": run,
            "page": page,
            "readable": readable,
            "steps": _steps(page.items, readable, of.result_of(job)),
            "job": job,
            "examined": of.result_of(job) is not None,
            "here_url": f"/runs/{number}",
        }
        return drawn(request, "run.html", context)

    @routes.get("/runs/{number}/thin")
    def show_spare(request: Request, number: Id, last: Last = 3, every: After = 0) -> Response:
        """Shows which steps of a run a rule doesn't keep: what thinning them would be, before it is asked for."""
        rule = Rule(last, every)
        spare = of.service.spare(number, rule)
        return drawn(request, "thin.html", {"run": of.catalogue.run(number), "rule": rule, "spare": spare})

    @routes.post("/runs/{number}/thin")
    async def thin_spare(request: Request, number: Id) -> Response:
        """Asks for what the page of spare steps offers: to thin them, or to seal those that are unsealed."""
        form = await form_of(request)
        kind, subjects = "seal" if form.get("kind") == "seal" else "thin", subjects_of(form)
        await run_in_threadpool(of.jobs.submit_each, kind, subjects, requested_by=user_of(request, "browser"))
        return RedirectResponse(f"/jobs?kind={kind}", HTTPStatus.SEE_OTHER)


def _doctor_of(of: Screens, steps: tuple[int, ...]) -> Job | None:
    """Returns the youngest job that looked for faults in just these steps."""
    if not steps:
        return None
    recent = of.jobs.jobs(subject=steps[-1], kind="doctor").items
    return next((job for job in recent if sorted(job.subjects) == sorted(steps)), None)


def _steps(checkpoints: tuple[Checkpoint, ...], readable: tuple[int, ...], result: Any) -> list[Step]:
    examined: dict[int, tuple[dict[str, Any], ...]] = {}
    if result is not None:
        for number, checkpoint in zip(readable, result["by_subject"], strict=False):
            places = (result["checkpoints"][i] for i in checkpoint.get("checkpoints", ()))
            examined[number] = tuple(finding for place in places for finding in place["findings"])
    steps, before = [], None
    for checkpoint in checkpoints:
        findings = examined.get(checkpoint.id, ())
        stale = tuple(
            (finding["name"], tuple(finding["where"])) for finding in findings if finding["name"] in STALE
        )
        steps.append(Step(checkpoint, before, findings, stale))
        before = checkpoint.id if checkpoint.resumable else before
    return steps


def over_run(request: Request, of: Screens, number: int, path: str, slot: str) -> Response:
    """Returns the page of one tensor over the steps of a run.

    Args:
        request: Who asks.
        of: What screens need.
        number: The run.
        path: The parameter.
        slot: Its slot; the parameter itself, if it is empty.
    """
    run, subjects = of.catalogue.run(number), of.steps(number)
    job = of.about_parameter(subjects, path)
    record = of.result_of(job)
    chosen = {"run": number, "path": path, "slot": slot}
    context = {
        "run": run,
        "path": path,
        "slot": slot,
        "subjects": subjects,
        "job": job,
        "record": record,
        "rows": _step_by_step(subjects, record, path, slot) if record else [],
        "here_url": f"/diff?{urlencode(chosen)}",
        "data_url": f"/diff.json?{urlencode(chosen)}",
        "other": partial(_other, number, path),
    }
    return drawn(request, "over_run.html", context)


def _other(run: int, path: str, slot: str) -> str:
    return f"/diff?{urlencode({'run': run, 'path': path, 'slot': '' if slot == 'values' else slot})}"


def _step_by_step(
    subjects: tuple[int, ...], record: Any, path: str, slot: str
) -> list[tuple[str, int, int, dict[str, Any]]]:
    """Returns for each step but the first where it is held against the one before it, both updates, and the figures."""
    figures = record["changes"].get(slot or "values", {})
    updates = record["updates"]
    tensor = {"path": path, **({"slot": slot} if slot else {})}
    return [
        (
            f"/diff?{urlencode({'a': subjects[i - 1], 'b': subjects[i], **tensor})}",
            updates[i - 1],
            updates[i],
            {name: values[i] for name, values in figures.items()},
        )
        for i in range(1, min(len(updates), len(subjects)))
    ]


def _layers(routes: APIRouter, of: Screens) -> None:
    @routes.get("/checkpoints/{number}/parameters.csv")
    def all_numbers(number: Id) -> Response:
        contents = of.contents_of(number)
        if contents is None:
            raise NotFoundError("Nobody has looked into it yet.", place=f"checkpoint {number}")
        return PlainTextResponse(numbers(contents.result["parameters"]), media_type="text/csv")

    @routes.get("/checkpoints/{number}/layers.json")
    def layers_as_data(number: Id, part: str = "", measure: str = "norm") -> Response:
        contents = of.contents_of(number)
        if contents is None or not contents.measured:
            raise NotFoundError(
                "Nobody has measured it yet.",
                place=f"checkpoint {number}",
                remedy="ask for a job of the kind inspect, with stats",
            )
        layers = by_layer(contents.result["parameters"], part)
        return JSONResponse(
            {"part": part, "measure": _measure(measure), "curves": layers.to_json(_measure(measure))}
        )

    @routes.get("/checkpoints/{number}/layers")
    def show_layers(request: Request, number: Id, part: str = "", measure: str = "norm") -> Response:
        """Shows how large parameters and slots are by layer; `part` is what to look at in each alone."""
        contents = of.contents_of(number)
        measured = contents is not None and contents.measured
        everything = by_layer(contents.result["parameters"] if contents and measured else ())
        layers = (
            by_layer(contents.result["parameters"], part) if contents and measured and part else everything
        )
        chosen = {"part": part, "measure": _measure(measure)}
        context = {
            **of.about(number),
            "here_url": f"/checkpoints/{number}/layers?{urlencode(chosen)}",
            "data_url": f"/checkpoints/{number}/layers.json?{urlencode(chosen)}",
            "measured": measured,
            "job": of.latest(number).get("inspect"),
            "parts": everything.parts,
            "part": part,
            "measures": tuple(MEASURES),
            "measure": _measure(measure),
            "plots": layers.plots(_measure(measure)),
        }
        return drawn(request, "layers.html", context)


def _measure(name: str) -> str:
    return name if name in MEASURES else "norm"


def _parameter(routes: APIRouter, of: Screens) -> None:
    @routes.get("/checkpoints/{number}/parameters/{index}")
    def show_parameter(request: Request, number: Id, index: Place, over: str = "") -> Response:
        """Shows a parameter with its slots or, `over=run`, what they were over the steps of its run."""
        about, parameters = of.about(number), of.parameters(number, index)
        parameter, checkpoint = parameters[index], about["checkpoint"]
        subjects = of.followed(checkpoint, over)
        job = of.about_parameter(subjects, parameter["path"])
        address = f"/checkpoints/{number}/parameters/{index}"
        context = {
            **about,
            "here_url": f"{address}{'?over=run' if len(subjects) > 1 else ''}",
            "index": index,
            "one": parameter,
            "neighbours": [i for i in (index - 1, index + 1) if 0 <= i < len(parameters)],
            "parameters": parameters,
            "subjects": subjects,
            "steps": of.steps(checkpoint.run),
            "job": job,
            "record": of.result_of(job),
            "region_url": f"{address}/region",
            "over_run": partial(_other, checkpoint.run, parameter["path"]),
        }
        return drawn(request, "slots.html", context)


def _region(routes: APIRouter, of: Screens) -> None:
    @routes.get("/checkpoints/{number}/parameters/{index}/region")
    def show_region(
        request: Request, number: Id, index: Place, slot: str = "", rows: str = "", columns: str = ""
    ) -> Response:
        """Shows a region of a parameter or slot as closely as a picture can be, with the way further in and out."""
        about, parameters = of.about(number), of.parameters(number, index)
        parameter = parameters[index]
        if slot and slot not in parameter["slots"]:
            raise NotFoundError(
                "There is no such slot.",
                place=parameter["path"],
                expected=", ".join(parameter["slots"]),
                found=slot[:200],
            )
        shape = shape_of_matrix(tuple((parameter["slots"][slot] if slot else parameter)["shape"]))
        region = (*_range("rows", rows, shape[0]), *_range("columns", columns, shape[1]))
        more: dict[str, Any] = {"region": list(region), **({"slot": slot} if slot else {})}
        job = of.about_parameter((number,), parameter["path"], **more)
        address = partial(_address, number, index, slot)
        context = {
            **about,
            "here_url": address(region),
            "parameter_url": f"/checkpoints/{number}/parameters/{index}",
            "one": parameter,
            "slot": slot,
            "shape": shape,
            "region": region,
            "job": job,
            "record": of.result_of(job),
            "ways": [(name, address(to)) for name, to in _ways(region, shape)],
            "grid": charts.zoom_grid(parts, region, address) if (parts := _inner(region)) else "",
        }
        return drawn(request, "region.html", context)


Region = tuple[int, int, int, int]
"""First row, row behind the last, first column, column behind the last."""


def _address(number: int, index: int, slot: str, region: Region) -> str:
    top, bottom, left, right = region
    query = {"slot": slot, "rows": f"{top}:{bottom}", "columns": f"{left}:{right}"}
    return f"/checkpoints/{number}/parameters/{index}/region?{urlencode(query)}"


def _range(name: str, text: str, count: int) -> tuple[int, int]:
    """Returns what an address says of rows or columns: all, if it says nothing."""
    if not text:
        return 0, count
    matched = _RANGE.fullmatch(text)
    first, end = (int(matched[1]), int(matched[2])) if matched else (0, 0)
    if not 0 <= first < end <= count:
        raise UsageError(
            f"There are no such {name}.", place=name, expected=f"FIRST:END, from 0:{count}", found=text[:100]
        )
    return first, end


def _inner(region: Region) -> list[Region]:
    """Returns the parts of a region that are zoomed into: at most `PARTS` along each side."""
    rows, columns = (_cut(*region[:2]), _cut(*region[2:]))
    if len(rows) * len(columns) == 1:
        return []
    return [(*row, *column) for row in rows for column in columns]


def _cut(first: int, end: int) -> list[tuple[int, int]]:
    if end - first < LEAST:
        return [(first, end)]
    wide = -(-(end - first) // PARTS)
    return [(at, min(at + wide, end)) for at in range(first, end, wide)]


def _ways(region: Region, shape: tuple[int, int]) -> list[tuple[str, Region]]:
    """Returns where else one can look from a region: around it, and beside it."""
    (top, bottom, left, right), (rows, columns) = region, shape
    ways: list[tuple[str, Region]] = []
    if region != (0, rows, 0, columns):
        ways.append(("Out", (*_around(top, bottom, rows), *_around(left, right, columns))))
        ways.append(("All of it", (0, rows, 0, columns)))
    tall, wide = bottom - top, right - left
    if top > 0:
        ways.append(("Up", (max(top - tall, 0), max(top - tall, 0) + tall, left, right)))
    if bottom < rows:
        ways.append(("Down", (min(bottom, rows - tall), min(bottom + tall, rows), left, right)))
    if left > 0:
        ways.append(("Left", (top, bottom, max(left - wide, 0), max(left - wide, 0) + wide)))
    if right < columns:
        ways.append(("Right", (top, bottom, min(right, columns - wide), min(right + wide, columns))))
    return ways


def _around(first: int, end: int, count: int) -> tuple[int, int]:
    """Returns the aligned part, `PARTS` times as long, that a range lies in."""
    long = min((end - first) * PARTS, count)
    start = min(first // long * long, max(count - long, 0))
    return start, min(start + long, count)
