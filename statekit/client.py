"""The service from Python: what `statekit serve` shows and does, typed, without a browser.

Input: the service's address and token. Output: the records that it has (checkpoints, runs, jobs, events, lineages),
page after page where there are many, and its problems as the errors that the library itself would raise.

    from statekit.client import Client

    client = Client("http://127.0.0.1:8642", Path("~/.local/share/statekit/token"))
    for checkpoint in client.checkpoints(optimizer="adafactor/t5x", seal="unsealed"):
        client.submit("seal", checkpoint.id)
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, cast, overload

from statekit import errors
from statekit.errors import MissingExtraError, NotFoundError, StatekitError, UsageError, extra
from statekit.service.records import (
    ENDED,
    Checkpoint,
    Event,
    Job,
    Kind,
    Lineage,
    Page,
    Root,
    Run,
    Scan,
    Scanning,
    State,
)

if TYPE_CHECKING:
    import httpx2

    from statekit.service.options import (
        CheckOptions,
        ConvertOptions,
        DiffOptions,
        DoctorOptions,
        InspectOptions,
        ParameterOptions,
        SealOptions,
        ThinOptions,
        VerifyOptions,
    )

TRIES = 5
"""How often a request is sent whose answer doesn't arrive; asked for again, nothing is done twice."""
PAUSE_SECONDS = 0.2
POLL_SECONDS = 0.1
T = TypeVar("T")


class Filters(TypedDict, total=False):
    """Which checkpoints are asked for: the fields of `records.Query`."""

    text: str
    root: int
    run: int
    container: str
    layout: str
    optimizer: str
    tag: str
    seal: str
    verdict: str
    status: str
    readable: bool
    sort: str


class Client:
    """A service.

    Args:
        url: Its address.
        token: Its token, or the file that has it: `token` in the service's data folder.
        timeout: Seconds to wait for an answer.

    Raises:
        MissingExtraError: The extra `service` isn't installed.
        NotFoundError: The token's file can't be read.
    """

    def __init__(self, url: str, token: str | Path, *, timeout: float = 60.0) -> None:
        try:
            import httpx2
        except ImportError as error:
            raise MissingExtraError("The client needs httpx2.", remedy=extra("service")) from error
        stored = _stored(token.expanduser()) if isinstance(token, Path) else token
        self._lost: type[Exception] = httpx2.TransportError
        self._http = httpx2.Client(
            base_url=f"{url.rstrip('/')}/api/v1",
            headers={"Authorization": f"Bearer {stored}"},
            timeout=timeout,
            trust_env=False,  # a proxy would learn the token
        )

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def roots(self) -> tuple[Root, ...]:
        """Returns the folders that are scanned."""
        return _read(tuple[Root, ...], self._get("/roots"))

    def scan(self) -> Scan:
        """Has the service look for checkpoints, and returns what that came to, once it is over.

        Raises:
            StatekitError: It has failed.
        """
        asked = now = _read(Scanning, self._ask("POST", "/scan").json())
        while now.done < asked.number:
            time.sleep(POLL_SECONDS)
            now = self.scanning()
        if now.problem is not None or now.last is None:
            raise StatekitError("The scan has failed.", found=now.problem)
        return now.last

    def scanning(self) -> Scanning:
        """Returns how far the scan is that runs, or what the last one came to."""
        return _read(Scanning, self._get("/scan"))

    def checkpoints(self, **filters: Unpack[Filters]) -> Iterator[Checkpoint]:
        """Yields the checkpoints that are asked for, all pages of them."""
        return self._pages(Checkpoint, "/checkpoints", dict(filters))

    def checkpoint(self, number: int) -> Checkpoint:
        """Returns a checkpoint.

        Raises:
            NotFoundError: There is none of that number.
        """
        return _read(Checkpoint, self._get(f"/checkpoints/{int(number)}"))

    def tag(self, number: int, tag: str) -> Checkpoint:
        """Gives a checkpoint a tag."""
        return _read(Checkpoint, self._ask("POST", f"/checkpoints/{int(number)}/tags", {"tag": tag}).json())

    def untag(self, number: int, tag: str) -> Checkpoint:
        """Takes a tag from a checkpoint."""
        answer = self._ask("DELETE", f"/checkpoints/{int(number)}/tags", params={"tag": tag})
        return _read(Checkpoint, answer.json())

    def note(self, number: int, note: str) -> Checkpoint:
        """Writes down what somebody says of a checkpoint."""
        return _read(Checkpoint, self._ask("PUT", f"/checkpoints/{int(number)}/note", {"note": note}).json())

    def runs(self) -> Iterator[Run]:
        """Yields the runs, the youngest first."""
        return self._pages(Run, "/runs", {})

    def run(self, number: int) -> Run:
        """Returns a run; its steps are `checkpoints(run=number)`."""
        return _read(Run, self._get(f"/runs/{int(number)}"))

    def parameters(self, number: int, under: str = "") -> Iterator[Mapping[str, Any]]:
        """Yields the parameters of a checkpoint that a job `inspect` has looked into, or those below a module.

        Raises:
            NotFoundError: None has.
        """
        after: int | None = 0
        while after is not None:
            params = {"under": under, "after": after, "limit": 500}
            page = self._get(f"/checkpoints/{int(number)}/parameters", params)
            yield from page["items"]
            after = page["next_after"]

    def resumes_in(self, number: int) -> Sequence[Mapping[str, Any]]:
        """Returns each layout that holds a checkpoint's optimizer, and how exactly its run goes on there.

        Raises:
            NotFoundError: No job `inspect` has looked into it yet.
        """
        resumes: list[Mapping[str, Any]] = self._get(f"/checkpoints/{int(number)}/resumes-in")["resumes"]
        return resumes

    def lineage(self, number: int) -> Lineage:
        """Returns what a checkpoint was made of, and what was made of it."""
        return _read(Lineage, self._get(f"/lineage/{int(number)}"))

    @overload
    def submit(
        self,
        kind: Literal["inspect"],
        *subjects: int,
        key: str | None = None,
        **options: Unpack[InspectOptions],
    ) -> Job: ...
    @overload
    def submit(
        self,
        kind: Literal["parameter"],
        *subjects: int,
        key: str | None = None,
        **options: Unpack[ParameterOptions],
    ) -> Job: ...
    @overload
    def submit(
        self, kind: Literal["check"], *subjects: int, key: str | None = None, **options: Unpack[CheckOptions]
    ) -> Job: ...
    @overload
    def submit(
        self, kind: Literal["seal"], *subjects: int, key: str | None = None, **options: Unpack[SealOptions]
    ) -> Job: ...
    @overload
    def submit(
        self,
        kind: Literal["doctor"],
        *subjects: int,
        key: str | None = None,
        **options: Unpack[DoctorOptions],
    ) -> Job: ...
    @overload
    def submit(
        self, kind: Literal["diff"], *subjects: int, key: str | None = None, **options: Unpack[DiffOptions]
    ) -> Job: ...
    @overload
    def submit(
        self,
        kind: Literal["verify"],
        *subjects: int,
        key: str | None = None,
        **options: Unpack[VerifyOptions],
    ) -> Job: ...
    @overload
    def submit(
        self,
        kind: Literal["convert"],
        *subjects: int,
        key: str | None = None,
        **options: Unpack[ConvertOptions],
    ) -> Job: ...
    @overload
    def submit(
        self, kind: Literal["thin"], *subjects: int, key: str | None = None, **options: Unpack[ThinOptions]
    ) -> Job: ...
    def submit(self, kind: Kind, *subjects: int, key: str | None = None, **options: Any) -> Job:
        """Asks for work.

        Args:
            kind: What shall be done.
            *subjects: The numbers of the checkpoints that it is about.
            key: Names this request, so that it can be sent again; a new one if None.
            **options: What is said beside, as the verb takes it; a target is `{"root": number, "path": path}`.

        Raises:
            UsageError: The job doesn't take that; says all.
            NotFoundError: There is no such checkpoint.
        """
        body = {"kind": kind, "subjects": list(subjects), "options": options}
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        return _read(Job, self._ask("POST", "/jobs", body, headers=headers).json())

    def jobs(
        self,
        *,
        state: State | Literal["open"] | None = None,
        kind: Kind | None = None,
        subject: int | None = None,
    ) -> Iterator[Job]:
        """Yields the jobs that are asked for, the latest first."""
        return self._pages(Job, "/jobs", {"state": state, "kind": kind, "subject": subject})

    def job(self, job: int | Job) -> Job:
        """Returns a job as it is now."""
        return _read(Job, self._get(f"/jobs/{_number(job)}"))

    def cancel(self, job: int | Job) -> Job:
        """Asks for the end of a job."""
        return _read(Job, self._ask("POST", f"/jobs/{_number(job)}/cancel").json())

    def result(self, job: int | Job) -> Any:
        """Returns what came of a job: the verb's own JSON.

        Raises:
            NotFoundError: There is none.
        """
        return self._get(f"/jobs/{_number(job)}/result")

    def events(self, job: int | Job, after: int = 0) -> Iterator[Event]:
        """Yields what befalls a job, as it happens, until it has ended; goes on where a connection was lost.

        Args:
            job: The job.
            after: The number of the last event that is known.
        """
        failures = 0
        while True:
            before = after
            try:
                with self._http.stream(
                    "GET", f"/jobs/{_number(job)}/events", headers={"Last-Event-ID": f"{after}"}
                ) as answer:
                    if answer.status_code == 204:
                        return
                    _check(answer)
                    for event in _events(answer.iter_lines()):
                        failures, after = 0, event.number
                        yield event
                failures = 0  # it was ended in order: by a service that ends, or something between
                if after == before:
                    time.sleep(PAUSE_SECONDS)
            except self._lost as error:
                failures += 1
                if failures >= TRIES:
                    raise self._unreachable(error) from error
                time.sleep(PAUSE_SECONDS * 2**failures)

    def wait(self, job: int | Job) -> Job:
        """Waits until a job has ended, and returns it.

        Raises:
            StatekitError: It didn't come to its end: the error that it failed with.
        """
        for event in self.events(job):
            if event.kind == "state" and event.data.get("state") in ENDED:
                break
        ended = self.job(job)
        if ended.state != "done":
            problem = ended.problem or {"subject": f"The job was {ended.state}.", "place": f"job {ended.id}"}
            raise _error(str(problem.get("kind", "")), problem)
        return ended

    def _pages(self, record: type[T], path: str, params: Mapping[str, Any]) -> Iterator[T]:
        query = {name: value for name, value in params.items() if value is not None}
        cursor: str | None = None
        while True:
            more = {"cursor": cursor} if cursor else {}
            answer = self._get(path, {**query, **more, "limit": 500})
            page = _read(Page[record], answer)  # type: ignore[valid-type]  # the class is an argument
            yield from page.items
            cursor = page.next_cursor
            if cursor is None:
                return

    def _get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        return self._ask("GET", path, params=params).json()

    def _ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx2.Response:
        """Sends a request, again if no answer comes: each does the same when it is done twice."""
        for left in reversed(range(TRIES)):
            try:
                answer = self._http.request(method, path, json=body, params=params, headers=headers)
            except self._lost as error:
                if not left:
                    raise self._unreachable(error) from error
                time.sleep(PAUSE_SECONDS * 2 ** (TRIES - left))
            else:
                _check(answer)
                return answer
        raise AssertionError("unreachable")

    def _unreachable(self, error: Exception) -> StatekitError:
        return StatekitError(
            "The service doesn't answer.",
            place=self._http.base_url,
            found=error,
            remedy="look whether it runs: `statekit serve` prints its address",
        )


def _stored(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise NotFoundError(
            "The token can't be read.",
            place=path,
            found=error,
            remedy="name the file `token` of the service's data folder",
        ) from error


def _number(job: int | Job) -> int:
    return job.id if isinstance(job, Job) else int(job)


@cache
def _reader(form: Hashable) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(cast(Any, form))


def _read(form: type[T], data: Any) -> T:
    """Returns the record of plain data."""
    record: T = _reader(cast(Hashable, form)).validate_python(data)
    return record


def _events(lines: Iterator[str]) -> Iterator[Event]:
    """Yields the events of a stream; what isn't data or ends before its empty line is no event."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            yield _read(Event, json.loads("\n".join(data)))
            data = []


def _check(answer: httpx2.Response) -> None:
    """Raises the error that an answer is."""
    if answer.is_success:
        return
    answer.read()
    try:
        problem = answer.json()
        kind = problem["type"].rpartition(":")[2]
        parts = {**problem, "subject": problem["detail"]}
    except (ValueError, KeyError, TypeError):
        raise StatekitError(
            "The answer does not come from a statekit service.",
            place=str(answer.request.url),
            found=f"status {answer.status_code}",
            remedy="check the address",
        ) from None
    raise _error("".join(word.title() for word in kind.split("-")), parts)


def _error(kind: str, problem: Mapping[str, Any]) -> StatekitError:
    """Returns a problem as the library's error of that kind; one that it doesn't have is a plain StatekitError."""
    named = getattr(errors, f"{kind.removesuffix('Error')}Error", None)
    if kind == "Unknown" or kind.startswith("Wrong"):
        named = UsageError
    error = named if isinstance(named, type) and issubclass(named, StatekitError) else StatekitError
    parts = {name: problem.get(name) for name in ("place", "expected", "found")}
    return error(str(problem.get("subject", "")), **parts, remedy=problem.get("remedy") or "")
