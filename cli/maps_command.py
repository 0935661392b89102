"""`statekit maps`: from which codebase's model to which a run can be carried, and what becomes of each parameter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from statekit.cli import output
from statekit.cli.arguments import complete_maps
from statekit.cli.main import DONE, WANTING
from statekit.cli.output import Screen, Table
from statekit.files.durable import writing
from statekit.maps.inference import Proposal
from statekit.maps.inference import infer as propose
from statekit.maps.model_map import ModelMap, chained, data_of, load, map_names, words
from statekit.maps.modules import FLATTEN, HEADS, KINDS, SAME, Modules


@click.command("maps")
@click.argument("name", required=False, shell_complete=complete_maps)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with NAME, the map's file.")
@click.option(
    "--infer",
    "versions",
    nargs=2,
    type=click.Path(path_type=Path),
    metavar="OLD NEW",
    help="Propose a map between two versions of one codebase, from names and shapes in a checkpoint of each.",
)
@click.option(
    "--pair",
    "pairs",
    multiple=True,
    metavar="OLD=NEW",
    help="With --infer: the new name of a parameter that it asks for. OLD+OLD=NEW joins two.",
)
@click.option(
    "--write", "file", type=click.Path(path_type=Path), metavar="FILE",
    help="With --infer: write the map into this file once nothing is open.",
)  # fmt: skip
def command(
    name: str | None,
    as_json: bool,
    versions: tuple[Path, Path] | None,
    pairs: tuple[str, ...],
    file: Path | None,
) -> int:
    """Shows the maps from one codebase's model to another's.

    Without NAME: all maps, one line each. With NAME: the new name of each parameter and the operation on it, the sizes
    of the model that the map needs, and the models that it refuses. NAME may be the path of your own map, a .json file;
    :back behind it shows the other direction. A chain of maps, as mesh-tf-t5:t5x-t5:hf-t5, is shown map by map.
    """
    stdout = output.screen()
    if versions is not None:
        return _infer(versions, pairs, file, as_json)
    if name is None and as_json:
        titles = {name: list(load(name).titles) for name in map_names()}
        output.print_json("maps", {"maps": titles})
    elif name is None:
        table = Table(("map", "from", "to"))
        for map_name in map_names():
            table.add_row(map_name, *load(map_name).titles)
        stdout.show(table)
        stdout.say()
        stdout.say("statekit convert SOURCE TARGET --map NAME; a map of your own is a file: --map FILE.json")
    elif as_json:
        maps = [_json(map_name) for map_name in chained(name)]
        output.print_json("map", maps[0] if len(maps) == 1 else {"name": name, "maps": maps})
    else:
        for i, map_name in enumerate(chained(name)):
            if i:
                stdout.say()
            _show(stdout, load(map_name))
    return DONE


def _infer(versions: tuple[Path, Path], pairs: tuple[str, ...], file: Path | None, as_json: bool) -> int:
    """Prints the map between two versions that names and shapes show, and what they leave open."""
    import statekit

    shapes = []
    for path in versions:
        with statekit.open(path) as opened:
            shapes.append({name: tensor.shape for name, tensor in opened.state.params.items()})
    proposal = propose(shapes[0], shapes[1], pairs)
    document = proposal.to_json(*(path.name for path in versions))
    if as_json:
        asks = {question.target: list(question.fitting) for question in proposal.questions}
        output.print_json("map", {"file": document, "asks": asks, "left": list(proposal.left)})
    else:
        _show_proposal(output.screen(), proposal)
    if not proposal.complete:
        return WANTING
    if file is not None:
        with writing(file), file.open("x", encoding="utf-8") as written:
            json.dump(document, written, indent=2)
    return DONE


def _show_proposal(stdout: Screen, proposal: Proposal) -> None:
    table = Table(("new parameter", "from", "how", "known by"))
    for parameter in proposal.inferred:
        table.add_row(
            parameter.target,
            " + ".join(parameter.sources),
            "; ".join(map(_words, parameter.operations)),
            parameter.because,
        )
    stdout.show(table)
    questions = (
        f"{question.target}: {' or '.join(question.fitting) or 'nothing fits'}"
        for question in proposal.questions
    )
    stdout.show_list("Asks for, with --pair OLD=NEW:", questions)
    stdout.show_list("Nothing is made of:", proposal.left)


def _json(name: str) -> dict[str, Any]:
    shown = load(name)
    # Where the schema lies is said from the file's own folder.
    data = {key: value for key, value in data_of(name)[0].items() if key != "$schema"}
    return {"name": shown.name, "lines": list(map(dict, _lines(shown))), "file": data}


def _lines(model_map: ModelMap) -> Iterator[Mapping[str, Any]]:
    for entry in model_map.entries:
        when = {"when": dict(entry.when)} if entry.when else {}
        steps = [dict(step) for step in entry.operations]
        yield {"source": entry.source.text, "target": entry.target.text, "operations": steps, **when}
    for kind in model_map.modules.kinds if model_map.modules else ():
        for leaf in kind.leaves:
            steps = [dict(step) for step in leaf.operations]
            yield {"kind": kind.name, "source": leaf.source, "target": leaf.target, "operations": steps}


def _show(stdout: Screen, model_map: ModelMap) -> None:
    head = Table(("what", "value"), titled=False)
    head.add_row("map", model_map.name)
    head.add_row("from", model_map.titles[0])
    head.add_row("to", model_map.titles[1])
    for choice, alternatives in model_map.choices.items():
        head.add_row("models", f"with {choice} {' or '.join(alternatives)}")
    stdout.show(head)
    stdout.say()
    if model_map.modules is not None:
        _show_modules(stdout, model_map.modules)
        return
    table = Table(("parameter", "becomes", "how", "of models with"))
    for entry in model_map.entries:
        when = ", ".join(" ".join(pair) for pair in entry.when.items())
        table.add_row(entry.source.text, entry.target.text, "; ".join(map(_words, entry.operations)), when)
    stdout.show(table)
    fields = {name: words for entry in model_map.entries for name, words in entry.source.words.items()}
    stdout.show_list("{...} stands for:", (f"{name}: {', '.join(words)}" for name, words in fields.items()))
    stdout.show_list("Further names:", (f"{name}: {path}" for name, path in model_map.ties.items()))
    stdout.show_list(
        "Needs --config for:", (f"{name}: {setting}" for name, setting in model_map.needed.items())
    )
    stdout.show_list(
        "Asks for, unless names show it:", (f"{name}: {ask['what']}" for name, ask in model_map.asked.items())
    )
    refused = [(template.text, why) for template, why in model_map.refused]
    refused += [(words(where), why) for where, why in model_map.refused_where]
    stdout.show_list("Refuses:", (f"{setting}: {why}" for setting, why in refused))
    if model_map.pretrained is not None:
        files = ", ".join(model_map.pretrained.files)
        stdout.show_list("Makes:", [f"{files}, from which {model_map.pretrained.class_name} is built"])


def _parts(step: Mapping[str, Any]) -> str:
    shares = f", {' : '.join(map(str, step['shares']))}" if "shares" in step else ""
    return shares + (f", in turns: {step['turns']}" if "turns" in step else "")


def _show_modules(stdout: Screen, modules: Modules) -> None:
    table = Table(("module", "axes", "tensor", "becomes", "how"))
    for kind in modules.kinds:
        for i, leaf in enumerate(kind.leaves):
            how = "; ".join(map(_words, leaf.operations))
            table.add_row("" if i else kind.name, str(leaf.rank), leaf.source, leaf.target, how)
    stdout.show(table)
    dense = ", ".join(kind.name for kind in modules.kinds if kind.reads_rows)
    images = ", ".join(kind.name for kind in modules.kinds if kind.image)
    asked = [
        f'{KINDS}: what names and axes leave open; {SAME} keeps it as it is: \'{KINDS}={{"tok": "embedding"}}\'',
        f"{HEADS}: where one side alone has heads along an axis of their own, and the other doesn't show them",
        f"{FLATTEN}: which {dense} layer reads a flattened image, of {images}: '{FLATTEN}={{\"fc\": [4, 4, 8]}}'",
    ]
    stdout.show_list("Needs --config for:", asked)
    stdout.show_list("Leaves behind:", (f"{name}: {why}" for name, why in modules.left.items()))
    stdout.show_list("Refuses:", (f"{pattern}: {why}" for pattern, why in modules.refused))


def _words(step: Mapping[str, Any]) -> str:
    """Says an operation of a map's file in a few words, and for which models it is."""
    return _done(step) + (f" ({words(step['when'])})" if "when" in step else "")


def _done(step: Mapping[str, Any]) -> str:
    match step["op"]:
        case "permute":
            return "transposed" if step["order"] == [1, 0] else f"axes {step['order']}"
        case "merge":
            return f"axes {step['axis']} and {step['axis'] + 1} merged"
        case "part":
            return f"axis {step['axis']} parted, by {step.get('outer', HEADS)}"
        case "flattened":
            return f"a flattened image's channels {step['channels']} along axis {step['axis']}"
        case "unstack":
            return f"one of axis {step['axis']} for each {step['over']}"
        case "split":
            return f"parts of axis {step['axis']}, one for each {step['over']}{_parts(step)}"
        case "concatenate":
            return f"fused along axis {step['axis']}, one part for each {step['over']}{_parts(step)}"
        case "reorder":
            sizes = ", ".join(map(str, step["sizes"]))
            return f"axis {step['axis']} taken for ({sizes}) in order {step['order']}"
        case "stack":
            return f"stacked along axis {step['axis']} over {step['over']}"
    return _made_up(step)


def _made_up(step: Mapping[str, Any]) -> str:
    """Says an operation that makes values up or leaves some out."""
    match step["op"]:
        case "replicate" | "keep_first":
            where = f" along axis {step['axis']}" if "axis" in step else f", one for each {step['over']}"
            copies = f"{step['count']} copies{where}"
            return copies if step["op"] == "replicate" else f"the first of {copies}"
        case "resize":
            new = f"new places: {step['param']}, in slots {step['slots']}"
            return f"axis {step['axis']} of length {step['to']} instead of {step['from']}; {new}"
        case "scale":
            root = (
                f"the root of axis {step['root_of_axis']}" if "root_of_axis" in step else str(step["factor"])
            )
            return f"{'divided by' if step.get('divides') else 'times'} {root}"
        case "cast":
            return f"{step['to']} instead of {step['from']}"
        case _:
            return f"{step['op']}ed by {', '.join(step['axes'])}"
