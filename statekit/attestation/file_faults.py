"""What files alone show to be wrong, by name: what it is, why it matters, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from statekit.attestation.attestation import Finding


@dataclass(frozen=True)
class FileFault:
    """A kind of fault.

    Attributes:
        subject: What is wrong, one sentence.
        why: What becomes of a run that goes on from it.
        remedy: What to do.
    """

    subject: str
    why: str
    remedy: str


_OTHER = "go on from another step"
FAULTS: Mapping[str, FileFault] = {
    "files": FileFault(
        "The files may be of several steps.",
        "weights, moments and counts of different steps fit in shape, and the run goes on with none of them",
        "find the whole files of one step",
    ),
    "damaged": FileFault(
        "Files aren't what their manifest or their own checksums say.",
        "values that nobody trained go into the run",
        f"copy the checkpoint again from where it is whole, or {_OTHER}",
    ),
    "values-absent": FileFault(
        "Parts of arrays aren't there, and read as the fill value.",
        "the format allows it, so every reader makes zeros of them without a word",
        "copy the checkpoint again, whole; it is right only where everything there was zero",
    ),
    "parts-missing": FileFault(
        "Files or parts that belong to the checkpoint aren't there.",
        "a loader that takes what it finds leaves the rest as it was made",
        f"copy the checkpoint again, whole; {_OTHER} if they were never written",
    ),
    "undecodable": FileFault(
        "What is stored makes no state.",
        "a loader that goes by position, or that broadcasts, takes it all the same",
        f"look at the tensors that are named; {_OTHER} if they were saved so",
    ),
    "placeholders": FileFault(
        "Slots of a single zero stand where values belong: placeholders of slots that aren't in use.",
        "they broadcast over the parameter: its second moment is zero, and the next update is huge",
        "convert the original checkpoint with statekit, which leaves placeholders behind",
    ),
    "not-finite": FileFault(
        "Values aren't finite.", "they don't heal", "go on from a step before they were; lower what made them"
    ),
    "moments-zero": FileFault(
        "Moments are zero everywhere, though updates were done.",
        "the optimizer begins anew, with bias correction as if it didn't: the first updates are too large or too small",
        f"they were never saved, or made anew before saving: {_OTHER}",
    ),
    "moments-of-no-update": FileFault(
        "Moments have values, though no update was done.",
        "the count was lost: bias correction and warm-up begin anew over moments that are grown",
        "restore the count of the run; look for it in the folder's name or the trainer's record",
    ),
    "second-moment-negative": FileFault(
        "Second moments are negative, as no mean of squares is.",
        "their root is NaN, which spreads to the weights with the next update",
        "the slot is another one, or damaged: look at the names that it was saved under",
    ),
    "second-moment-zero": FileFault(
        "Second moments are zero, though the rule adds epsilon to every square.",
        "their root divides the gradient",
        f"they were not saved, or stand for slots that aren't in use: {_OTHER}",
    ),
    "slots-narrow": FileFault(
        "Slots are stored in fewer bits than their parameters, and no option of the optimizer says so.",
        "small gradients no longer change a second moment of 8 bits: it stands still",
        "save them in the dtype in which they are moved: what was rounded off is lost",
    ),
    "count-narrow": FileFault(
        "A count is stored as a floating-point number of few bits.",
        "bfloat16 can't count beyond 256, nor float16 beyond 2048: the step stands still there",
        "save counts as integers or in float32",
    ),
    "count-rounded": FileFault(
        "A count is the run's step, rounded to fewer bits.",
        "bias correction, decay and schedule go on from another step",
        "keep counts out of what is cast to bfloat16 or float16; set this one to the step that is named",
    ),
    "slots-missing": FileFault(
        "Parameters lack slots that others of their group have.",
        "their state begins anew beside that of the others",
        "save the state of every parameter; right only if they never had a gradient, as what is frozen or unused: "
        "then --ignore slots-missing",
    ),
    "slots-duplicated": FileFault(
        "Parameters of different values have one another's slots to the bit.",
        "each but one goes on with another parameter's moments",
        f"one tensor was saved in the place of several: {_OTHER}",
    ),
    "factors-disagree": FileFault(
        "v_row and v_col aren't means of one second moment: their means over all that both average differ.",
        "one of them is another parameter's, or of another step; every update of the parameter is scaled wrong",
        f"look at the names that they were saved under; {_OTHER}",
    ),
    "factors-exchanged": FileFault(
        "v_row and v_col stand in each other's place.",
        "the update is scaled along the wrong axis; in a square matrix nothing else notices",
        "exchange them: v_row is what has averaged the columns away",
    ),
    "scale-statistics": FileFault(
        "What ScaledAdam keeps of a parameter's scale doesn't fit the parameter.",
        "the step is as long as the scale says: of another parameter's, or of zero, it is wrong until the next refresh",
        "they are another parameter's or another step's: check the order of names against that of the state",
    ),
    "master-stale": FileFault(
        "Parameters aren't the rounding of their masters.",
        "the next update writes the masters over them: other weights than were evaluated",
        "refresh the masters after weights are loaded, or the weights from the masters, on every rank",
    ),
    "groups-exchanged": FileFault(
        "Vectors are decayed and matrices aren't: groups have each other's options.",
        "options are restored by position: the run decays what it shouldn't, and doesn't what it should",
        "make the groups in the order of the saved run; right only if it was meant so: then --ignore groups-exchanged",
    ),
    "step-offset": FileFault(
        "The second moment's decay begins after the step.",
        "the next update makes it NaN",
        "set step_offset to at most the step",
    ),
    "powers-disagree": FileFault(
        "Stored powers of beta aren't those of the betas and the count.",
        "bias correction goes by the powers: the learning rate is off until they have vanished",
        "restore powers, betas and count of one step",
    ),
    "moments-stale": FileFault(
        "Slots haven't changed since the step before, but their weights or counts have.",
        "the moments of later steps are lost, and a resumed run goes on with old ones",
        "the saver kept handles of the first state: save the live one",
    ),
    "weights-stale": FileFault(
        "Not one parameter has changed since the step before, but slots have.",
        "weights of one step go on with moments of another",
        "the saver kept handles of the first weights: save the live ones; or the learning rate is zero: then --ignore "
        "weights-stale",
    ),
    "tensors-stale": FileFault(
        "Parameters and all of their slots are those of the step before, while others have moved.",
        "parts of two steps are mixed: these parameters go back",
        "find the whole files of this step",
    ),
    "count-stale": FileFault(
        "Slots have changed since the step before, but the count hasn't risen.",
        "bias correction, decay and schedule go on from another step",
        "save the count with the slots",
    ),
    "hyperparameter-changed": FileFault(
        "Hyperparameters aren't those of the step before.",
        "a run that was restarted with others isn't the run that was begun",
        "check that this was meant, as after a restart: then --ignore hyperparameter-changed",
    ),
}
"""Every fault of files, by name."""


def fault(name: str, where: Iterable[str], expected: object, found: object) -> Finding:
    """Returns a finding of a known kind."""
    kind = FAULTS[name]
    return Finding(name, kind.subject, tuple(where), str(expected), str(found), kind.remedy, kind.why)
