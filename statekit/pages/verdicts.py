"""Verdicts: what a page says first of what a verb found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from statekit.errors import plural, size, some


@dataclass(frozen=True)
class Verdict:
    """What is to be known first.

    Attributes:
        kind: `good`, `bad`, `unsure`, or "" where nothing was judged.
        title: The verdict.
        text: What it rests on.
    """

    kind: str
    title: str
    text: str = ""


def of_inspect(result: Mapping[str, Any]) -> Verdict:
    """Judges what `inspect` says: whether it is known what the tensors mean, and what is odd."""
    findings, optimizer = result["findings"], result["optimizer"]
    count = plural(len(findings), "finding")
    if optimizer is not None:
        whose = f"{optimizer['schema']}, variant {optimizer['variant'] or 'unknown'}"
        done = optimizer["updates"]
        at = f"{whose}, updates not counted" if done is None else f"{plural(done, 'update')} of {whose} done"
        return Verdict(
            "unsure" if findings else "good", f"A run's state: {at}", f"{count} below" if findings else ""
        )
    if result["layout"] is not None or result["contents"]:
        return Verdict(
            "unsure" if findings else "", str(result["contents"] or "tensors"), count if findings else ""
        )
    return Verdict(
        "unsure", "No layout fits: tensors are listed by their own names", count if findings else ""
    )


def of_doctor(result: Mapping[str, Any]) -> Verdict:
    """Judges what `doctor` found."""
    checkpoints = result["checkpoints"]
    bad = [checkpoint for checkpoint in checkpoints if checkpoint["findings"]]
    looked = plural(len(checkpoints), "checkpoint")
    if not bad:
        return Verdict("good", "Nothing found", f"{looked}, every value read once")
    named = some([f"{checkpoint['path']}" for checkpoint in bad])
    count = plural(sum(len(checkpoint["findings"]) for checkpoint in bad), "finding")
    return Verdict("bad", f"{count} in {len(bad)} of {looked}", named)


def of_diff(result: Mapping[str, Any]) -> Verdict:
    """Judges what `diff` found."""
    compared = plural(result["tensors"], "tensor")
    if result["equal"]:
        return Verdict("good", "Equal", f"{compared}, {size(result['bytes_read'])} of each")
    count = plural(len(result["differences"]), "difference")
    first = (
        f"first: {result['first']}" if result["first"] else "no tensor differs, what stands beside them does"
    )
    return Verdict("bad", f"{count} in {compared} and what stands beside them", first)


SAYS = {
    "bit-exact": "The same run: every bit is kept, and every update has the same bits.",
    "within the rounding bound": "The same run: updates differ by no more than rounding.",
    "semantic difference": "Another rule goes on: its updates aren't the run's, by what is named below.",
    "not comparable": "The state is the same; whether its updates are, couldn't be shown.",
    "refuted": "NOT the same run.",
}
"""What each verdict of `verify` means."""
BITS_KEPT = (
    "The same run: every stored bit is kept, and each side is stepped by its own step, whose updates differ by no more "
    "than rounding."
)
"""What it means where the files hold the same bits, and only the steps that moved them round otherwise."""


WEIGHTS_KEPT = "The same weights, bit for bit. No update was compared: neither side has an optimizer."
"""What it means where both sides have weights alone."""


def meaning(verdict: Mapping[str, Any]) -> str:
    """Returns what a verdict of `verify` means, in a sentence.

    Args:
        verdict: As a certificate has it.
    """
    if verdict["whole"] == "bit-exact" and verdict.get("not_stepped"):
        return WEIGHTS_KEPT
    is_by_steps = verdict["whole"] == "within the rounding bound" and verdict.get("exactness") == "bitwise"
    return BITS_KEPT if is_by_steps else SAYS[verdict["whole"]]


def of_verify(result: Mapping[str, Any]) -> Verdict:
    """Judges what `verify` proved."""
    verdict = result["verdict"]
    whole = verdict["whole"]
    kind = "good" if verdict["passed"] else "bad" if whole == "refuted" else "unsure"
    passed = "" if verdict["passed"] else f" {_why_not(result)}"
    says = meaning(verdict)
    title = verdict.get("headline", whole.upper())  # certificates of 0.2.0 have none
    if "repeats" in result:
        again = "It comes out as the certificate says." if result["repeats"] else "It comes out otherwise."
        kind = kind if result["repeats"] else "bad"
        return Verdict(kind, f"{again} {title}", says + passed)
    return Verdict(kind, title, says + passed)


def _why_not(result: Mapping[str, Any]) -> str:
    """Says why a verification doesn't pass, where its verdict doesn't say it."""
    verdict = result["verdict"]
    if given := verdict.get("nobody_gave"):
        return f"The target holds facts that are not given: {some(given)}."
    if verdict["whole"] == "not comparable":
        return f"No update was made: {verdict['not_stepped']}."
    return f"Less exact than asked for (--require {result['asked']['require']})."


VERDICTS: Mapping[str, Callable[[Mapping[str, Any]], Verdict]] = {
    "inspect": of_inspect,
    "doctor": of_doctor,
    "diff": of_diff,
    "verify": of_verify,
}
"""How each verb's result is judged."""
