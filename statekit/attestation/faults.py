"""Every fault of a live run or of files, by name: what is wrong, what becomes of the run, and what to do.

`attest` and `doctor` make their findings from this one table, so that one fault has one name in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from statekit.attestation.attestation import Finding
from statekit.conversion.belonging import UNREAD
from statekit.errors import StatekitError


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        subject: What is wrong, one sentence.
        why: What becomes of a run that goes on with it.
        remedy: What to do.
    """

    subject: str
    why: str
    remedy: str


_LOAD = "load the optimizer's state after the optimizer is made, and before anything else changes it"
_OTHER = "go on from another step"
_LOST_COUNT = "bias correction, decay and schedule go on from another step"
_NEW_STATE = "their state begins anew with the next update"
FILE_FAULTS: Mapping[str, Fault] = {
    "files": Fault(
        "The files may be of several steps.",
        "weights, moments and counts of different steps fit in shape, and the run goes on with none of them",
        "find the whole files of one step",
    ),
    "damaged": Fault(
        "Files aren't what their manifest or their own checksums say.",
        "values that nobody trained go into the run",
        f"copy the checkpoint again from where it is whole, or {_OTHER}",
    ),
    "values-absent": Fault(
        "Parts of arrays aren't there, and read as the fill value.",
        "the format allows it, so every reader makes zeros of them without a word",
        "copy the checkpoint again, whole; it is right only where everything there was zero",
    ),
    "parts-missing": Fault(
        "Files or parts that belong to the checkpoint aren't there.",
        "a loader that takes what it finds leaves the rest as it was made",
        f"copy the checkpoint again, whole; {_OTHER} if they were never written",
    ),
    UNREAD: Fault(
        "Something that looks like a part of the run isn't read.",
        "the run goes on without it: an optimizer begins anew, an average or a schedule is lost",
        "open it itself if it is whole, give it the name under which its program saves it, or open the folder that "
        f"holds both; if it is of another run, --ignore {UNREAD}",
    ),
    "undecodable": Fault(
        "What is stored makes no state.",
        "a loader that goes by position, or that broadcasts, takes it all the same",
        f"look at the tensors that are named; {_OTHER} if they were saved so",
    ),
    "placeholders": Fault(
        "Slots of a single zero stand where values belong: placeholders of slots that aren't in use.",
        "they broadcast over the parameter: its second moment is zero, and the next update is huge",
        "convert the original checkpoint with statekit, which leaves placeholders behind",
    ),
    "not-finite": Fault(
        "Values aren't finite.", "they don't heal", "go on from a step before they were; lower what made them"
    ),
    "moments-zero": Fault(
        "Moments are zero everywhere, though updates were done.",
        "the optimizer begins anew, with bias correction as if it didn't: the first updates are too large or too small",
        f"they were never saved, or made anew before saving: {_OTHER}",
    ),
    "moments-of-no-update": Fault(
        "Moments have values, though no update was done.",
        "the count was lost: bias correction and warm-up begin anew over moments that are grown",
        "restore the count of the run; look for it in the folder's name or the trainer's record",
    ),
    "second-moment-negative": Fault(
        "Second moments are negative, as no mean of squares is.",
        "their root is NaN, which spreads to the weights with the next update",
        "the slot is another one, or damaged: look at the names that it was saved under",
    ),
    "second-moment-zero": Fault(
        "Second moments are zero, though the rule brings each of them a value.",
        "their root divides the gradient",
        f"they were not saved, or stand for slots that aren't in use: {_OTHER}",
    ),
    "quantized-damaged": Fault(
        "Codes, scales or levels of moments in few bits can't be those of a run.",
        "a scale moves all values of its block, and levels all values of the tensor",
        f"copy the checkpoint again from where it is whole, or {_OTHER}",
    ),
    "slots-narrow": Fault(
        "Slots are stored in fewer bits than their parameters, and no option of the optimizer says so.",
        "small gradients no longer change a second moment of 8 bits: it stands still",
        "save them in the dtype in which they are moved: what was rounded off is lost",
    ),
    "count-narrow": Fault(
        "A count is stored as a floating-point number of few bits.",
        "bfloat16 can't count beyond 256, nor float16 beyond 2048: the step stands still there",
        "save counts as integers or in float32",
    ),
    "count-rounded": Fault(
        "A count is the run's step, rounded to fewer bits.",
        _LOST_COUNT,
        "keep counts out of what is cast to bfloat16 or float16; set this one to the step that is named",
    ),
    "slot-missing": Fault(
        "Parameters lack slots that they should have.",
        f"{_NEW_STATE}, beside the state of the others",
        "save and load the state of every parameter; of a checkpoint it is right only if they never had a gradient, as "
        "what is frozen or unused: then --ignore slot-missing",
    ),
    "slots-duplicated": Fault(
        "Parameters of different values have one another's slots to the bit.",
        "each but one goes on with another parameter's moments",
        f"one tensor was saved in the place of several: {_OTHER}",
    ),
    "factors-disagree": Fault(
        "v_row and v_col aren't means of one second moment: their means over all that both average differ.",
        "one of them is another parameter's, or of another step; every update of the parameter is scaled wrong",
        f"look at the names that they were saved under; {_OTHER}",
    ),
    "factors-exchanged": Fault(
        "v_row and v_col stand in each other's place.",
        "the update is scaled along the wrong axis; in a square matrix nothing else notices",
        "exchange them: v_row is what has averaged the columns away",
    ),
    "scale-statistics": Fault(
        "What ScaledAdam keeps of a parameter's scale doesn't fit the parameter.",
        "the step is as long as the scale says: of another parameter's, or of zero, it is wrong until the next refresh",
        "they are another parameter's or another step's: check the order of names against that of the state",
    ),
    "master-stale": Fault(
        "Parameters aren't the rounding of their masters.",
        "the next update writes the masters over them: other weights than were evaluated",
        "refresh the masters after weights are loaded, or the weights from the masters, on every rank",
    ),
    "groups-exchanged": Fault(
        "Parameters have the hyperparameters of another group.",
        "options are restored by position: the run decays what it shouldn't, and doesn't what it should",
        "make the groups in the order of the saved run; of a checkpoint it is right only if it was meant so: then "
        "--ignore groups-exchanged",
    ),
    "step-offset": Fault(
        "The second moment's decay begins after the step.",
        "the next update makes it NaN",
        "set step_offset to at most the step",
    ),
    "powers-disagree": Fault(
        "Stored powers of beta aren't those of the betas and the count.",
        "bias correction goes by the powers: the learning rate is off until they have vanished",
        "restore powers, betas and count of one step",
    ),
    "step-shared": Fault(
        "The optimizer counts more updates than its run has made.",
        "bias correction goes by the count: the run goes on with another learning rate until it has vanished",
        "give each parameter's state a step of its own, with the run's count, before the next save",
    ),
    "step-missing": Fault(
        "The optimizer's groups have no count of updates.",
        "Megatron-Core stops at it, or goes on with the count of a new optimizer",
        "give each parameter's state a step of its own, with the run's count, before the next save",
    ),
    "moments-stale": Fault(
        "Slots haven't changed since the step before, but their weights or counts have.",
        "the moments of later steps are lost, and a resumed run goes on with old ones",
        "the saver kept handles of the first state: save the live one",
    ),
    "weights-stale": Fault(
        "Not one parameter has changed since the step before, but slots have.",
        "weights of one step go on with moments of another",
        "the saver kept handles of the first weights: save the live ones; or the learning rate is zero: then --ignore "
        "weights-stale",
    ),
    "momentum-differs": Fault(
        "Weights haven't moved since the step before as their momentum says.",
        "a momentum that is zero, transposed, another parameter's or another step's turns the next updates elsewhere",
        f"look how the slots of these were saved, by name or by number; {_OTHER}",
    ),
    "tensors-stale": Fault(
        "Parameters and all of their slots are those of the step before, while others have moved.",
        "parts of two steps are mixed: these parameters go back",
        "find the whole files of this step",
    ),
    "count-stale": Fault(
        "Slots have changed since the step before, but the count hasn't risen.",
        _LOST_COUNT,
        "save the count with the slots",
    ),
    "hyperparameter-changed": Fault(
        "Hyperparameters aren't those of the step before.",
        "a run that was restarted with others isn't the run that was begun",
        "check that this was meant, as after a restart: then --ignore hyperparameter-changed",
    ),
}
"""The faults that files alone can show; `attest` finds some of them too."""

RUN_FAULTS: Mapping[str, Fault] = {
    "optimizer-empty": Fault(
        "The live optimizer is new: it has made no update and has none of the checkpoint's slots.",
        "all moments begin at zero, and bias correction and warm-up begin again",
        "load the optimizer's state, not the weights alone; a loader that fills what is there already needs the "
        "optimizer to have its slots first, or skips them in silence",
    ),
    "optimizer-unknown": Fault(
        "The live optimizer has made updates, and the checkpoint has weights alone: nothing there tells its state.",
        "nobody can say whether its moments belong to these weights",
        "attest with the checkpoint that has the optimizer too; a run that begins anew, before its first update",
    ),
    "slot-extra": Fault(
        "Parameters have slots that the checkpoint hasn't.",
        "moments of a step that nobody meant go into the next update",
        "don't make a step before the state is loaded, not even one that only creates it",
    ),
    "slot-zero": Fault(
        "Slots are all zero, in the checkpoint they aren't.",
        _NEW_STATE,
        f"don't initialize after loading; {_LOAD}",
    ),
    "slot-rounded": Fault(
        "Slots are the checkpoint's, rounded to fewer bits.",
        "every later update differs, and small gradients no longer change the second moment",
        "load them in the checkpoint's dtype: torch's load_state_dict casts to the parameter's, Orbax to the "
        "template's; load before the model is cast, or cast slots back and copy them again",
    ),
    "slot-of-another-parameter": Fault(
        "Parameters have each other's slots.",
        "each parameter moves along the gradients of another",
        "load by name, or make the optimizer with its parameters in the order of the saved run",
    ),
    "slot-differs": Fault(
        "Slots have other values than in the checkpoint.", "the next update is another run's", _LOAD
    ),
    "parameter-missing": Fault(
        "The live run lacks parameters that the checkpoint has.",
        "their training ends here, and their state is lost with the next save",
        "pass all parameters; of a wrapped model those of the inner module, or say names={live: checkpoint's}",
    ),
    "parameter-extra": Fault(
        "The live run has parameters that the checkpoint hasn't.",
        "they begin as the model made them, without training and without a state",
        "say names={live: checkpoint's} where they are called otherwise",
    ),
    "parameter-rounded": Fault(
        "Parameters are the checkpoint's, rounded to fewer bits.",
        "what was trained in the lost bits is gone",
        "load the weights in the checkpoint's dtype",
    ),
    "parameter-differs": Fault(
        "Parameters have other values than in the checkpoint.",
        "moments of one set of weights move another",
        "load the weights of the same step, after the model is built and wrapped, before the first update",
    ),
    "beside-differs": Fault(
        "Averages, summed gradients or other tensors beside the slots have other values than in the checkpoint.",
        "evaluation by averages, or the update of a summed gradient, is another run's",
        "load them with the optimizer's state",
    ),
    "optimizer-elsewhere": Fault(
        "The optimizer moves tensors that aren't the model's.",
        "the model doesn't train, whatever the loss of the first steps shows",
        "make the optimizer after the model is wrapped, moved and cast, of the parameters that it has then",
    ),
    "moved-twice": Fault(
        "The optimizer has a parameter twice.",
        "each step updates it twice, with one count",
        "name each parameter once in the groups that the optimizer is made of",
    ),
    "shape": Fault(
        "Tensors have another shape than in the checkpoint.",
        "values belong to other elements, or broadcast",
        "build the model that was saved",
    ),
    "dtype": Fault(
        "Tensors have another dtype than in the checkpoint, with equal values: later updates round otherwise.",
        "the run drifts from the one that was saved",
        "load them in the checkpoint's dtype",
    ),
    "step": Fault(
        "Parameters have done another number of updates than in the checkpoint.",
        _LOST_COUNT,
        "restore the count with the slots; don't make a step to create the state, nor restart the count",
    ),
    "learning-rate": Fault(
        "The learning rate of the next update isn't the checkpoint's.",
        "every update is too long or too short by that factor, until the schedule writes a rate of its own",
        "load the groups with the state; build the scheduler before that, not after: building one writes its first "
        "rate into the groups, and loading the scheduler doesn't undo it",
    ),
    "hyperparameter": Fault(
        "Hyperparameters aren't the checkpoint's.",
        "every later update is another rule's",
        "load the groups with the state, or build the optimizer with what the run had",
    ),
    "frozen": Fault(
        "Other parameters are trained than in the checkpoint.",
        "what was frozen moves, or what was trained stands still",
        "give the optimizer those that the run moved",
    ),
    "rule": Fault(
        "The live optimizer makes updates by another rule.",
        "the checkpoint's moments mean something else to it",
        "go on with the optimizer that the run had",
    ),
    "schedule-elsewhere": Fault(
        "The scheduler drives another optimizer.",
        "the learning rate of this one stays as it is",
        "build the scheduler over the optimizer that makes the updates, after it is wrapped",
    ),
    "schedule": Fault(
        "The schedule isn't where the checkpoint's is, or isn't the same.",
        "later updates have other learning rates",
        "load the scheduler's state after it is built with the run's arguments",
    ),
    "scaler": Fault(
        "The loss scaler isn't the checkpoint's.",
        "updates are skipped until it has found its scale again",
        "save and load scaler.state_dict(), after everything that steps or skips",
    ),
    "random": Fault(
        "Random generators aren't where the checkpoint's are.",
        "dropout and the order of data go on otherwise",
        "load the generators' states last, after everything that draws numbers",
    ),
    "update-differs": Fault(
        "The update isn't the one that the rule makes of the checkpoint's state and these gradients.",
        "state that nobody compared takes part in it, and so in every later update",
        "see first that what is assumed of the checkpoint is so, and say hparams={...} where it isn't; then look for "
        "what the optimizer keeps beside its state: powers of betas that were taken when it was made, hyperparameters "
        "that are used before they are restored, a copy of the state elsewhere",
    ),
    "broken": Fault(
        "The live state breaks its own rules.",
        "the next update reads values of another kind, shape or number than it needs",
        "check that the state was loaded into the right parameters",
    ),
}
"""The faults that only a live run can show."""

_FAULTS: Mapping[str, Fault] = {**FILE_FAULTS, **RUN_FAULTS}

FORMER_NAMES: Mapping[str, str] = {"slots-missing": "slot-missing"}
"""Names that `doctor --ignore` still takes in 0.2 for faults that have others now."""


def fault(name: str, where: Iterable[str], expected: object, found: object) -> Finding:
    """Returns a finding of a known kind."""
    kind = _FAULTS[name]
    return Finding(name, kind.subject, tuple(where), str(expected), str(found), kind.remedy, kind.why)


def broken(error: StatekitError) -> list[Finding]:
    """Returns the findings of a live state that can't be read."""
    findings = [fault("broken", [where], "a valid state", text) for text, where in error.faults]
    return findings or [fault("broken", ["the live run"], "a valid state", error.line)]
