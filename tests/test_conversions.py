"""The matrix of conversions, cell by cell: every sample of a checkpoint into every layout of its optimizer.

A conversion that is planned is carried out, and the target holds every parameter and slot bit for bit, a factored slot
by the axes it has averaged away. One that isn't is refused by a typed error that says why, and only where the rules
differ or the target has no place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import conversion_table
import numpy as np
import pytest
from samples import ROWS, Row
from telling import once_asked

from goldens import GOLDEN
from statekit.cli.main import DONE, main
from statekit.conversion import registry
from statekit.conversion.contracts import Encoded, Exactness, Hints, KeepsEncoding, KeepsMasters, Layout
from statekit.conversion.convert import convert, plan
from statekit.conversion.matrix import cells
from statekit.conversion.open_state import open_state
from statekit.conversion.plan import _entry
from statekit.conversion.prepared import rule_change_to
from statekit.conversion.rule_change import RuleChange
from statekit.errors import InexactError, StateError, StatekitError
from statekit.state.schema import load_schema
from statekit.state.stored_params import MASTER, as_params, check_known, decoded, encoded, in_full, is_low
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array, Tensor, in_memory


def targets(row: Row) -> list[str]:
    """Returns the layouts that hold an optimizer that the row's own layout holds, and that can be written."""
    variants = registry.layout(row.layout).variants.keys()
    layouts = [registry.layout(name) for name in registry.layout_names()]
    return [one.name for one in layouts if variants & one.variants.keys() and home(one) is not None]


def home(layout: Layout) -> str | None:
    """Returns the container that a layout is written in; not the one that needs the config of a Keras model."""
    writable = (
        name for name in layout.containers if registry.container(name).target_kind and name != "keras"
    )
    return next(writable, None)


SAMPLED = 60
"""`make test` sees one cell of so many, and one of each row and of each target; `make test-all` sees all."""


def pairs() -> Iterator[Any]:
    seen: set[str] = set()
    for i, row in enumerate(ROWS):
        for j, target in enumerate(targets(row)):
            is_seen = {row.name, target} <= seen and (i + j) % SAMPLED
            seen |= {row.name, target}
            marks = pytest.mark.slow if is_seen else ()
            yield pytest.param(row, target, id=f"{row.name}-to-{target}", marks=marks)


def arrays_by_axes(state: TrainState) -> dict[tuple[str, Any], Array]:
    """Returns parameters and slots, factored ones by the axes that they have averaged away."""
    values: dict[tuple[str, Any], Array] = {(path, "param"): p.read() for path, p in state.params.items()}
    for path, tensors in state.slots.items():
        for name, slot in tensors.items():
            values[path, averaged(state, path, name)] = slot.read()
    return values


def averaged(state: TrainState, path: str, slot: str) -> Any:
    kept = {"v_row": "COLUMN", "v_col": "ROW"}.get(slot)
    if kept is None:
        return slot
    return tuple(i for i, axis in enumerate(state.rules[path].axes) if axis.value == kept)


def unlike(ours: Mapping[tuple[str, Any], Array], theirs: Mapping[tuple[str, Any], Array]) -> list[Any]:
    """Returns what differs in a bit, but for exact widening."""
    both = ours.keys() & theirs.keys()
    return [*(ours.keys() ^ theirs.keys()), *(key for key in both if not _equal(ours[key], theirs[key]))]


def _equal(left: Array, right: Array) -> bool:
    wide = np.promote_types(left.dtype, right.dtype) if left.dtype != right.dtype else left.dtype
    return left.shape == right.shape and left.astype(wide).tobytes() == right.astype(wide).tobytes()


@pytest.mark.parametrize(("row", "target"), list(pairs()))
def test_a_cell(row: Row, target: str, tmp_path: Path) -> None:
    sample, layout = row.sample_in(tmp_path), registry.layout(target)
    with open_state(sample.path, hints=row.hints) as opened:
        state = opened.state if keeps_encoding(layout) else decoded(opened.state)
        if state.optimizer.schema not in layout.variants:
            pytest.skip(f"{target} holds no {state.optimizer.schema}")
        way = rule_change_to(registry.layout_card(layout.name), state, opened.layout)
        place = tmp_path / "target"
        try:
            planned = once_asked(
                row.hints, lambda hints: plan(sample.path, place, to=home(layout), layout=target, hints=hints)
            )
        except (InexactError, StateError) as error:
            refused(error, way, layout, state, registry.layout_card(opened.layout).variants)
            return
        convert(planned)
        meant = kept(layout, way.state if way else state)
        # A state without a schema has the name of its optimizer there, which no hint may say.
        variant = meant.optimizer.variant if layout.variants[meant.optimizer.schema] else None
        with open_state(place, layout=target, hints=Hints(variant=variant)) as written:
            assert unlike(arrays_by_axes(meant), arrays_by_axes(written.state)) == []
            assert written.state.counts.updates == meant.counts.updates


def kept(layout: Layout, state: TrainState) -> TrainState:
    """Returns a state as the layout holds it: masters are the parameters where they have no other place."""
    state = state if isinstance(layout, KeepsMasters) else as_params(state)[0]
    if layout.name in ("deepspeed", "megatron-distributed", "megatron-float16"):
        # Their optimizers have a float32 master for each parameter of less.
        state = replace(state, slots={path: _with_master(state, path) for path in state.slots})
    return encoded(state) if keeps_encoding(layout) else state


def _with_master(state: TrainState, path: str) -> Mapping[str, Tensor]:
    param, slots = state.params[path], state.slots[path]
    return {**slots, MASTER: in_full(param)} if is_low(param, slots) else slots


def keeps_encoding(layout: Layout) -> bool:
    return isinstance(layout, KeepsEncoding) and layout.keeps_encoding


def refused(
    error: StatekitError,
    way: RuleChange | None,
    layout: Layout,
    state: TrainState,
    makers: Mapping[str, tuple[str, ...]],
) -> None:
    """Asserts that a refusal names a difference of the rules, or what the layout has no place for."""
    assert error.found, error
    if "stored plainly or encoded" in error.subject:
        with pytest.raises(InexactError, match="--variant"):
            check_known(state, makers[state.optimizer.schema])
    elif "less exact than required" in error.subject:
        assert "quantized" in str(error)
    elif way is not None and way.exactness > Exactness.ROUNDING:
        assert all(one.what in str(error) for one in way.differences if one.exactness > Exactness.ROUNDING)
    else:
        meant = kept(layout, way.state if way else state)
        with pytest.raises((InexactError, StateError)):
            assert not _lost(layout, meant)


def _lost(layout: Layout, state: TrainState) -> bool:
    encoded = layout.encode(state)
    lost = [name for name in encoded.dropped if name.startswith(("params/", "slots/", "groups/"))]
    worst = max([Exactness.BITWISE, *(exactness for exactness, _ in encoded.exactness.values())])
    if lost or worst > Exactness.ROUNDING:
        raise InexactError(f"{layout.name} loses {lost}")
    return False


def test_a_swapped_slot_is_noticed() -> None:
    left = {("w", (0,)): np.ones(3, np.float32), ("w", (1,)): np.zeros(3, np.float32)}
    right = {("w", (1,)): np.ones(3, np.float32), ("w", (0,)): np.zeros(3, np.float32)}
    assert len(unlike(left, right)) == 2


def test_averaged_slots_are_not_called_bitwise(tmp_path: Path) -> None:
    source, worst = GOLDEN / "t5x" / "momentum_f32" / "checkpoint", Exactness.STATISTICS
    planned = plan(source, tmp_path / "target", to="tf-bundle", layout="t2t", require=worst)
    moved = [entry.name for entry in planned.entries if entry.exactness == Exactness.STATISTICS]
    table = "encoder/relpos_bias/rel_embedding/Adafactor"
    assert moved == [f"{table}_1", f"{table}_2"]


# The table


def test_the_table_has_every_variant_and_every_layout() -> None:
    present = {(cell.schema, cell.variant, cell.layout) for cell in cells()}
    layouts = [registry.layout(name) for name in registry.layout_names()]
    assert present == {
        (schema, variant, one.name)
        for one in layouts
        for schema in one.variants
        for variant in load_schema(schema).variants
    }


def test_a_cell_has_reasons_exactly_where_it_is_refused() -> None:
    for cell in cells():
        assert bool(cell.reasons) == (cell.exactness > Exactness.ROUNDING)


def test_known_cells() -> None:
    exactness = {(cell.schema, cell.variant, cell.layout): cell.exactness.name for cell in cells()}
    assert exactness["adafactor", "t5x", "t5x"] == "BITWISE"
    assert exactness["adafactor", "hf", "torch-optim"] == "BITWISE"
    assert exactness["adafactor", "t2t_late", "t5x"] == "ROUNDING"
    assert exactness["adamw", "torch", "optax"] == "ROUNDING"
    assert exactness["adamw", "torch", "keras"] == "STATISTICS"  # epsilon beside the uncorrected root
    assert exactness["adamw", "mesh_tf", "optax"] == "STATISTICS"  # no bias correction
    assert exactness["adafactor", "torch", "t5x"] == "ESTIMATE"  # epsilon beside the roots


def test_the_table_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["formats", "--matrix"]) == DONE
    shown = capsys.readouterr().out
    assert all(f"\n{variant} " in shown for variant in load_schema("adafactor").variants)
    assert "= the same rule" in shown


def test_the_page_is_the_table() -> None:
    assert conversion_table.TARGET.read_text(encoding="utf-8") == conversion_table.page()


def test_what_was_narrowed_as_asked_is_held_to_what_else_was_done_to_it() -> None:
    """To narrow a tensor is what somebody asked for; that a map pads it, too, isn't."""
    source = in_memory(np.ones(3, np.float32))

    class Narrowed:
        shape, dtype = (3,), np.dtype(np.float16)

        def to_json(self) -> dict[str, Any]:
            return {"op": "narrowed", "of": {"op": "padded", "of": source.to_json()}}

    entry = _entry("a", cast(Any, Narrowed()), Encoded({}, 0), set())
    assert (entry.exactness, entry.unasked[0]) == (Exactness.LOSSY, Exactness.ESTIMATE)
    alone = {"op": "narrowed", "of": source.to_json()}
    Narrowed.to_json = lambda self: alone  # type: ignore[method-assign]
    assert _entry("a", cast(Any, Narrowed()), Encoded({}, 0), set()).unasked[0] is Exactness.BITWISE
