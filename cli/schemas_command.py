"""`statekit schemas`: what each optimizer keeps, and how its implementations differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from statekit.cli import output
from statekit.cli.arguments import complete_variants, completing
from statekit.cli.output import Table
from statekit.errors import check_name
from statekit.state.schema import OptimizerSchema, load_schema, schema_names

SIDE_BY_SIDE = 3
"""So many variants get a column each; more are listed by value, which fits any terminal."""


@click.command("schemas")
@click.argument("name", required=False, shell_complete=completing(schema_names))
@click.option(
    "--variant",
    "variants",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_variants,
    help="Show only this implementation. May be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with NAME, the schema's file.")
def command(name: str | None, variants: tuple[str, ...], as_json: bool) -> None:
    """Shows each optimizer's state and rule, by implementation.

    Without NAME: all schemas, one line each. With NAME: slots, hyperparameters, one update, the differences between
    the implementations (up to three side by side, e.g. --variant t5x --variant hf), and the sources.
    """
    if name is None and variants:
        raise click.UsageError("--variant needs the name of a schema.")
    if name is None:
        _list(as_json)
        return
    schema = load_schema(check_name("schema", name, schema_names(), "NAME"))
    chosen = list(dict.fromkeys(variants)) or list(schema.variants)
    for variant in chosen:
        check_name("variant", variant, schema.variants, "--variant")
    if as_json and variants:
        raise click.UsageError("--json prints a schema's whole file, with all variants: leave --variant out.")
    if as_json:
        _print_json(schema.data)
    else:
        _show(schema, chosen)


def _list(as_json: bool) -> None:
    schemas = [load_schema(name) for name in schema_names()]
    if as_json:
        _print_json(
            {"format": "statekit.schemas/1", "schemas": {schema.name: schema.data for schema in schemas}}
        )
        return
    rows = _table("schema", "optimizer", "slots", "variants")
    for schema in schemas:
        rows.add_row(schema.name, schema.data["title"], " ".join(schema.slots), " ".join(schema.variants))
    output.screen().show(rows)


def _print_json(data: Mapping[str, Any]) -> None:
    click.echo(json.dumps(data, indent=2, allow_nan=False))


def _show(schema: OptimizerSchema, variants: Sequence[str]) -> None:
    stdout = output.screen()
    stdout.say(f"{schema.data['title']} ({schema.name})", bold=True)
    stdout.say(schema.data["summary"])
    for paper in schema.data["papers"]:
        stdout.say(f"{paper['title']}. {paper['authors']} {paper['year']}, {paper['id']}.")
    sections = {
        "Slots": _slots(schema),
        "Slots by their native names": _aliases(schema, variants),
        "Hyperparameters": _hyperparameters(schema),
        "Hyperparameters by their native names, where they differ": _native(schema, variants),
        f"One update, as {schema.data['reference']} does it": _steps(schema),
        "Symbols": _pairs("symbol", "meaning", schema.data["notation"]),
        "How the variants differ": _differences(schema, variants),
        "Defaults, where a variant offers the hyperparameter": _defaults(schema, variants),
        "Variants": _variants(schema, variants),
        "Notes": _notes(schema, variants),
    }
    for title, rows in sections.items():
        if rows.rows:
            stdout.title(title)
            stdout.show(rows)


def _slots(schema: OptimizerSchema) -> Table:
    rows = _table(
        "slot", "symbol", "shape", "dtype", "initial value", "exists if", "update",
        drop=("symbol", "initial value", "dtype", "exists if"),
    )  # fmt: skip
    for name, slot in schema.slots.items():
        start = "(that of its update)" if slot.init is None else f"{slot.init}"
        exists = schema.data["slots"][name]["exists"]
        rows.add_row(name, slot.symbol, slot.shape, slot.dtype, start, exists, slot.recurrence)
    return rows


def _aliases(schema: OptimizerSchema, variants: Sequence[str]) -> Table:
    return _compared(
        "slot", {slot.name: _of(slot.aliases, variants) for slot in schema.slots.values()}, variants
    )


def _hyperparameters(schema: OptimizerSchema) -> Table:
    rows = _table("name", "values", "meaning")
    for name, spec in schema.hyperparameters.items():
        rows.add_row(name, _values(spec), spec["meaning"])
    return rows


def _native(schema: OptimizerSchema, variants: Sequence[str]) -> Table:
    spelled = {
        name: {
            v: ("-" if "sign" in as_ else "") + as_["name"]
            for v, as_ in _of(spec["native"], variants).items()
        }
        for name, spec in schema.hyperparameters.items()
    }
    return _compared("name", {name: row for name, row in spelled.items() if row}, variants)


def _steps(schema: OptimizerSchema) -> Table:
    rows = _table("", "step", "rule", "if", "differences", drop=("differences",))
    for number, step in enumerate(schema.data["steps"], start=1):
        rows.add_row(
            str(number), step["name"], step["rule"], step.get("when", ""), " ".join(step["differences"])
        )
    return rows


def _differences(schema: OptimizerSchema, variants: Sequence[str]) -> Table:
    constants = {
        key: {v: schema.variants[v]["constants"][key] for v in variants} for key in schema.data["differences"]
    }
    if len(variants) <= SIDE_BY_SIDE:
        return _compared("constant", constants if len(variants) == 1 else _unequal(constants), variants)
    rows = _table("constant", "value", "variants", "meaning")
    for key, row in _unequal(constants).items():
        difference = schema.data["differences"][key]
        rows.add_row(key, "", "", difference["meaning"])
        for value, who in _by_value(row).items():
            rows.add_row("", value, who, difference.get("values", {}).get(value, ""))
    return rows


def _defaults(schema: OptimizerSchema, variants: Sequence[str]) -> Table:
    defaults = {v: schema.variants[v]["defaults"] for v in variants}
    offered = {
        name: {v: defaults[v][name] for v in variants if name in defaults[v]}
        for name in schema.hyperparameters
    }
    return _compared("name", {name: row for name, row in offered.items() if row}, variants)


def _variants(schema: OptimizerSchema, variants: Sequence[str]) -> Table:
    rows = _table(
        "variant",
        "what",
        "versions",
        "known by",
        "stepped",
        "source",
        drop=("versions", "known by", "stepped"),
    )
    for name in variants:
        variant = schema.variants[name]
        source = "; ".join(" ".join(place.values()) for place in variant["sources"])
        stepped = "yes" if variant["stepped"] else "no"
        rows.add_row(name, variant["title"], variant["versions"], variant["evidence"], stepped, source)
    return rows


def _notes(schema: OptimizerSchema, variants: Sequence[str]) -> Table:
    rows = _table("variant", "note")
    for name in variants:
        variant = schema.variants[name]
        unknown = [f"{key} isn't known. {why}" for key, why in variant["unknown"].items()]
        for note in [*variant["notes"], *unknown]:
            rows.add_row(name, note)
    return rows


def _table(*columns: str, drop: Sequence[str] = ()) -> Table:
    return Table(columns, drop=drop)


def _compared(label: str, values: Mapping[str, Mapping[str, Any]], variants: Sequence[str]) -> Table:
    """Returns few variants side by side, many by value."""
    if len(variants) <= SIDE_BY_SIDE:
        columns = _table(label, *variants)
        for name, row in values.items():
            columns.add_row(name, *(_text(row[v]) if v in row else "" for v in variants))
        return columns
    rows = _table(label, "value", "variants")
    for name, row in values.items():
        for number, (value, who) in enumerate(_by_value(row).items()):
            rows.add_row("" if number else name, value, who)
    return rows


def _by_value(row: Mapping[str, Any]) -> dict[str, str]:
    groups: dict[str, list[str]] = {}
    for variant, value in row.items():
        groups.setdefault(_text(value), []).append(variant)
    return {value: " ".join(who) for value, who in groups.items()}


def _unequal(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {name: row for name, row in values.items() if len(_by_value(row)) > 1}


def _of(values: Mapping[str, Any], variants: Iterable[str]) -> dict[str, Any]:
    return {v: values[v] for v in variants if v in values}


def _pairs(left: str, right: str, values: Mapping[str, str]) -> Table:
    rows = _table(left, right)
    for item in values.items():
        rows.add_row(*item)
    return rows


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _values(spec: Mapping[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusive_minimum": ">", "maximum": "<=", "exclusive_maximum": "<"}
    limits = [f"{sign} {spec['range'][key]}" for key, sign in signs.items() if key in spec["range"]]
    parts = [" or ".join(spec["type"]), " and ".join(limits), ", ".join(spec["range"].get("values", ()))]
    return ": ".join(part for part in parts if part) + (f" [{spec['unit']}]" if spec["unit"] else "")
