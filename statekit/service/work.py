"""What each kind of job does: a public verb of the library, with the options that the job has."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statekit.attestation.doctor import Examination, doctor
from statekit.conversion.changing.changes import Changes
from statekit.conversion.check import check
from statekit.conversion.checkpoint_ref import OPTIONS, CheckpointRef
from statekit.conversion.closer import difference, over_steps, parameter, region
from statekit.conversion.contracts import Exactness
from statekit.conversion.convert import Report, convert, outcome, plan
from statekit.conversion.diff import diff
from statekit.conversion.inspection import Request, inspect
from statekit.conversion.open_state import open_state
from statekit.conversion.plan import Plan
from statekit.conversion.resumes_in import resume_code, resumes_in
from statekit.conversion.seal import seal
from statekit.errors import StateError, StatekitError, UnknownFormatError
from statekit.files.stage import Progress
from statekit.maps.model_map import maps_of
from statekit.scale.engine import Processes, convert_on
from statekit.scale.progress import Status
from statekit.service.tasks.listener import Listener
from statekit.service.thinning import is_of_plan, thin

if TYPE_CHECKING:
    from statekit.verify.certificate import Certificate

PHASES = {"check": "checking the source", "write": "writing", "verify": "reading again"}
_CHANGES = tuple(field.name for field in fields(Changes))


def _path(request: Mapping[str, Any], index: int = 0) -> Path:
    return Path(request["paths"][index])


def _ref(request: Mapping[str, Any], index: int = 0) -> CheckpointRef:
    """Returns one of a job's checkpoints with what the job says of it; the scan has told its container.

    `layout` is the target's where the job writes one.
    """
    names = {option.name for option in OPTIONS} - ({"layout"} if "target" in request else set())
    given = {name: value for name, value in request["options"].items() if name in names}
    container = request.get("container") if index == 0 else None
    return CheckpointRef(_path(request, index), **{"container": container, **given})


@contextmanager
def _map(options: Mapping[str, Any]) -> Iterator[str | None]:
    """Gives the name of the map that a job names, or of the file of the map that it brings."""
    given = options.get("map")
    if not isinstance(given, Mapping):
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="statekit-map-") as folder:
        file = Path(folder) / "map.json"
        file.write_text(json.dumps(given), encoding="utf-8")
        yield str(file)


def _inspect(request: Mapping[str, Any], listener: Listener) -> Any:
    options = request["options"]
    seen = inspect(
        _ref(request),
        Request(options.get("filter"), options.get("stats", False)),
        lambda done, total: listener.progress(done / total if total else None, "reading"),
    )
    return {**seen.to_json(), **_going_on(request)}


def _going_on(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns where a checkpoint resumes, and the code that does it; nothing of what makes no state."""
    try:
        with open_state(_ref(request)) as opened:
            return {
                "resumes": [resumption.to_json() for resumption in resumes_in(opened)],
                "resume_code": {name: list(lines) for name, lines in resume_code(opened).items()},
            }
    except (UnknownFormatError, StateError):
        return {"resumes": [], "resume_code": {}}


def _parameter(request: Mapping[str, Any], listener: Listener) -> Any:
    """Looks at one parameter, or a region of it or a slot; in several steps of a run, at its numbers at each."""
    options, name = request["options"], request["options"]["path"]
    if len(request["paths"]) > 1:
        return over_steps(
            *(_ref(request, i) for i in range(len(request["paths"]))),
            name=name,
            on_step=lambda done, total: listener.progress(done / total, f"reading {name}"),
        )

    def tell(size: int) -> None:
        listener.progress(None, f"reading {name}")

    if "region" in options:
        return region(_ref(request), name, options.get("slot"), options["region"], on_read=tell)
    return parameter(_ref(request), name, on_read=tell)


def _check(request: Mapping[str, Any], listener: Listener) -> Any:
    return check(
        _path(request),
        container=request.get("container"),
        budget=request["options"].get("budget"),
        on_progress=told_by(listener),
    ).to_json()


def _seal(request: Mapping[str, Any], listener: Listener) -> Any:
    options = request["options"]
    report = seal(
        _path(request),
        container=request.get("container"),
        renew=options.get("renew", ()),
        budget=options.get("budget"),
        on_progress=told_by(listener),
    )
    return report.to_json()


def told_by(listener: Listener) -> Callable[[Progress], object]:
    """Returns what passes the progress of a verb on."""
    return lambda fraction: listener.progress(
        fraction.done / fraction.total if fraction.total else None,
        f"{PHASES[fraction.phase]}: {fraction.name}",
    )


def _doctor(request: Mapping[str, Any], listener: Listener) -> Any:
    options, paths = request["options"], request["paths"]
    done = 0

    def tell(name: str, size: int) -> None:
        nonlocal done
        listener.progress(
            min(done / request["bytes"], 1.0) if request.get("bytes") else None, f"reading {name}"
        )
        done += size

    refs = [_ref(request, i) for i in range(len(paths))]
    examinations = doctor(*refs, ignore=options.get("ignore", ()), on_tensor=tell)
    return {
        "passed": all(examination.passed for examination in examinations),
        "checkpoints": [examination.to_json() for examination in examinations],
        "by_subject": [_of(path, examinations) for path in paths],
    }


def _of(path: str, examinations: Sequence[Examination]) -> dict[str, Any]:
    """Returns which checkpoints are at a path, which may be one of their files, and how many findings they have."""
    at = [
        i
        for i, examination in enumerate(examinations)
        if f"{examination.path}" == path or path.startswith((f"{examination.path}.", f"{examination.path}/"))
    ]
    findings = [finding for i in at for finding in examinations[i].findings]
    return {
        "findings": len(findings),
        "names": sorted({finding.name for finding in findings}),
        "checkpoints": at,
    }


def _diff(request: Mapping[str, Any], listener: Listener) -> Any:
    options = request["options"]
    if "path" in options:
        return difference(_ref(request), _ref(request, 1), options["path"], options.get("slot"))
    with _map(options) as name:
        return diff(
            _ref(request),
            _ref(request, 1),
            map=name,
            config=options.get("config"),
            on_tensor=lambda tensor, size: listener.progress(None, f"comparing {tensor}"),
        ).to_json()


def _verify(request: Mapping[str, Any], listener: Listener) -> Any:
    from statekit.verify.verification import verify

    options = request["options"]
    names = ("steps", "gradients", "backend", "everything", "seed", "config", "step_offset")
    asked = {name: options[name] for name in names if name in options}
    if "require" in options:
        asked["require"] = Exactness.named(options["require"])
    with _map(options) as name:
        certificate = verify(
            _ref(request),
            _path(request, 1),
            on_progress=lambda phase, subject, size: listener.progress(None, f"{phase} {subject}"),
            map=name,
            **asked,
        )
    return _verdict(certificate)


def _verdict(certificate: Certificate) -> dict[str, Any]:
    return {
        "verdict": certificate.verdict,
        "passed": certificate.passed,
        "digest": certificate.digest,
        "certificate": certificate.to_json(),
    }


def _plan(request: Mapping[str, Any], name: str | None) -> Plan:
    options = request["options"]
    files = {key: Path(path) for key, path in request.get("files", {}).items()}
    changes = {key: options[key] for key in _CHANGES if key in options} | {
        key: path for key, path in files.items() if key == "init_missing"
    }
    return plan(
        _ref(request),
        Path(request["target"]),
        to=options.get("to"),
        layout=options.get("layout"),
        step_offset=options.get("step_offset", "keep"),
        require=Exactness.named(options.get("require", "rounding")),
        like=files.get("like"),
        maps=maps_of(name, options.get("config"), options.get("rename"), budget=_ref(request).job_budget()),
        changes=Changes.of(changes),
    )


def _convert(request: Mapping[str, Any], listener: Listener) -> Any:
    options, target = request["options"], Path(request["target"])
    with _map(options) as name:
        planned = _plan(request, name)
        if options.get("dry_run"):
            return outcome(planned, None)
        report = None
        if request.get("attempt", 1) > 1 and _is_written(target, planned):
            listener.log("an earlier attempt has written the target; it was ended before it could say so")
        else:
            report = _written(planned, options, listener)
        done: dict[str, Any] = {**outcome(planned, report)}
        if options.get("verify"):
            done |= _proven(planned, name, options, listener)
    return done


def _written(planned: Plan, options: Mapping[str, Any], listener: Listener) -> Report:
    """Carries a plan out, by workers where the job names them: their tasks' progress is the job's.

    Their folder lies hidden beside the target. The next attempt at the job goes on with what they have done.
    """
    if "on" not in options:
        return convert(
            planned,
            replace=options.get("replace", False),
            replace_foreign=options.get("replace_foreign", False),
            threads=options.get("threads"),
            on_progress=told_by(listener),
        )
    target = Path(f"{planned.request.target}")
    count = int(options["on"].partition(":")[2])

    def tell(status: Status) -> None:
        done = f"{len(status.done)} of {status.tasks} tasks done, {len(status.running)} running"
        listener.progress(status.moved / status.bytes if status.bytes else None, done)

    return convert_on(planned, Processes(count), target.with_name(f".{target.name}.work"), tell=tell)


def _proven(
    planned: Plan, name: str | None, options: Mapping[str, Any], listener: Listener
) -> dict[str, Any]:
    """Returns what holding a target against its source comes to, as `statekit convert --verify` does."""
    from statekit.verify.verification import verify

    asked = planned.request
    try:
        certificate = verify(
            asked.ref,
            asked.target,
            on_progress=lambda phase, subject, size: listener.progress(None, f"{phase} {subject}"),
            require=asked.require,
            map=name,
            config=options.get("config"),
            step_offset=asked.step_offset,
        )
    except StatekitError as error:  # the target is written, and stays
        reason = f"not proven: {error.line}"
        listener.log(reason)
        return {"verdict": reason, "passed": False, "digest": None, "certificate": None}
    return _verdict(certificate)


def _is_written(target: Path, planned: Plan) -> bool:
    """Tells whether a plan was carried out before, and what was written then is whole."""
    try:
        return is_of_plan(target, planned) and check(target).passed
    except StatekitError:
        return False


def _thin(request: Mapping[str, Any], listener: Listener) -> Any:
    options = request["options"]
    return thin(
        _ref(request),
        Path(request["target"]),
        to=options.get("to"),
        dry_run=options.get("dry_run", False),
        listener=listener,
    )


KINDS: Mapping[str, Callable[[Mapping[str, Any], Listener], Any]] = {
    "inspect": _inspect,
    "parameter": _parameter,
    "check": _check,
    "seal": _seal,
    "doctor": _doctor,
    "diff": _diff,
    "verify": _verify,
    "convert": _convert,
    "thin": _thin,
}
