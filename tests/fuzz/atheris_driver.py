"""Gives a reader what Atheris makes of its samples, led by which lines of ours are run: `make fuzz-atheris`.

    python atheris_driver.py READER [options of libFuzzer, such as -max_total_time=60]

Needs `pip install atheris` (a wheel for CPython 3.11). What is no value and no error of ours ends the run, and what
was read is kept as libFuzzer does, to go into `findings.py`. What led to new lines stays in
`.reliability/corpus`, where the next run goes on. Without a reader, lists them.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]


def main(arguments: list[str]) -> None:
    """Fuzzes one reader until it is told to stop."""
    import atheris

    with atheris.instrument_imports(include=["statekit"]):
        from fuzz.findings import BYTES
        from fuzz.readers import FORMATS
        from statekit.errors import StatekitError

        # Of chunks of zarr, what is read is a document of the fuzzer's own.
        readers = {reader.name: reader for reader in FORMATS if reader.name != "zarr chunks"}
        if not arguments:
            print("\n".join(readers))
            return
        reader = readers[arguments[0]]
        samples = list(reader.samples())
        for sample in samples:
            reader.read(sample)  # imports what it needs, to be watched

    def read(data: bytes) -> None:
        with contextlib.suppress(StatekitError):
            reader.read(data)

    warnings.simplefilter("ignore")
    corpus = ROOT / ".reliability" / "corpus" / reader.name.replace(" ", "-")
    corpus.mkdir(parents=True, exist_ok=True)
    for number, sample in enumerate((*samples, *BYTES.get(reader.name, ()))):
        (corpus / f"{number}").write_bytes(sample)
    atheris.Setup([sys.argv[0], *arguments[1:], str(corpus)], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
