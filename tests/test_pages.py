"""Pages and reports: the verdict first, strangers' text as text, nothing from elsewhere."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import Markup

from goldens import COMPACT
from statekit.cli.main import DONE, FAILED, WANTING, main
from statekit.pages import charts
from statekit.pages.environment import environment, script
from statekit.pages.layers import by_layer
from statekit.pages.listing import listing, numbers
from statekit.pages.parameter import of_tensor
from statekit.pages.report import MARK, report
from statekit.statistics.pictures import picture
from statekit.tensors.stats import measure
from statekit.tensors.tensor import in_memory
from statekit.tensors.tree import to_json

RUN = COMPACT / "t5x" / "momentum_f32" / "checkpoint"
CERTIFICATES = Path(__file__).parents[1] / "docs" / "certificates"
HOSTILE = "</title><script>alert(1)</script>\x1b[2J\u202eevil\" onload='x' {{ 7 * 7 }}"


class Elements(HTMLParser):
    """What a page is made of: elements with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.text.append(data.strip())


def check_alone(page: str) -> Elements:
    """Holds that a page runs nothing but its own script, fetches nothing, and has no style but its own sheet."""
    parsed = Elements(page)
    names = {tag for tag, _ in parsed.elements}
    assert names.isdisjoint({"iframe", "object", "embed", "link", "base", "form", "img"})
    for tag, attributes in parsed.elements:
        assert "style" not in attributes and not any(name.startswith("on") for name in attributes), tag
        for name in ("href", "src"):
            assert re.match(r"data:|#", attributes.get(name) or "#"), attributes
    (policy,) = [a["content"] for t, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert re.findall("<script[^>]*>(.*?)</script>", page, re.DOTALL) == [script()]
    assert policy is not None and policy.startswith("default-src 'none'; style-src 'sha256-")
    assert page.count("<style>") == 1 and "@import" not in page and "url(" not in page
    return parsed


def inspected(**more: Any) -> dict[str, Any]:
    """Returns what `inspect` says of one parameter."""
    plain = {"shape": [2], "dtype": "float32", "bytes": 8}
    stats = measure(in_memory(np.array([1.0, 3.0], np.float32))).to_json()
    tensor = {**plain, "stats": stats}
    parameter = {"path": HOSTILE, **tensor, "group": 0, "rule": None, "slots": {HOSTILE: tensor}}
    totals = {
        "parameters": 1, "elements": 2, "parameter_bytes": 8, "slots": 1, "slot_bytes": 8, "others": 0, "other_bytes": 0
    }  # fmt: skip
    choice = {"name": "x", "title": HOSTILE, "because": HOSTILE}
    return {
        "path": HOSTILE, "container": choice, "layout": choice, "step": 1, "meta": {HOSTILE: HOSTILE},
        "optimizer": None, "parameters": [parameter], "others": [{"name": HOSTILE, **plain}], "totals": totals,
        "assumptions": [HOSTILE], "findings": [{"what": HOSTILE, "place": HOSTILE}], "contents": HOSTILE, **more,
    }  # fmt: skip


@pytest.mark.parametrize("verb", ["inspect", "doctor", "diff"])
def test_a_report_is_one_file_with_the_verdict_first(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report.html"
    each: dict[str, list[object]] = {"inspect": [RUN, "--stats"], "doctor": [RUN], "diff": [RUN, RUN]}
    assert main([verb, *map(str, each[verb]), "--report", str(target)]) == DONE
    page = target.read_text(encoding="utf-8")
    texts = check_alone(page).text
    after = texts.index("dark")  # the last of what stands in the page's head
    assert texts[after + 2] in (
        "A run's state: 4 updates of adafactor, variant t5x done",
        "Nothing found",
        "Equal",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html"]
    capsys.readouterr()


def test_a_certificate_is_a_report_too() -> None:
    for path in sorted(CERTIFICATES.glob("*.json"))[:4]:
        page = report("verify", json.loads(path.read_text(encoding="utf-8")))
        assert "the same run" in page.lower() or "Another rule" in page
        check_alone(page)


def test_what_is_found_stands_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = COMPACT / "t5x" / "bf16_params" / "checkpoint"
    target = tmp_path / "report.html"
    assert main(["diff", str(RUN), str(other), "--json", "--report", str(target)]) == WANTING
    result = json.loads(capsys.readouterr().out)
    page = target.read_text(encoding="utf-8")
    check_alone(page)
    assert all(one["place"] in page for one in result["differences"])


def test_a_report_takes_the_place_of_a_report_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign, link, again = tmp_path / "mine.html", tmp_path / "link.html", tmp_path / "again.html"
    foreign.write_text("<!doctype html>\nmine")
    link.symlink_to(foreign)
    for place in (foreign, link, tmp_path / "nowhere" / "x.html"):
        assert main(["inspect", str(RUN), "--report", str(place)]) == FAILED
    assert foreign.read_text() == "<!doctype html>\nmine" and link.is_symlink()
    for _ in range(2):
        assert main(["inspect", str(RUN), "--report", str(again)]) == DONE
    assert MARK in again.read_text().splitlines()[0]
    link.unlink()
    link.symlink_to(again)
    assert main(["inspect", str(RUN), "--report", str(link)]) == FAILED and link.is_symlink()
    capsys.readouterr()


def test_names_of_strangers_are_text() -> None:
    page = report("inspect", inspected())
    check_alone(page)
    assert "\x1b" not in page and "\u202e" not in page and "\\x1b[2J\\u202eevil" in page
    assert "49" not in re.findall(r"\d+", page.partition("<main")[2].partition("</h1>")[0])


def test_what_is_put_out_is_printable_whichever_way_it_is_escaped() -> None:
    made = environment().from_string("{{ x }} {{ x | e }} {{ x | escape }} {{ x ~ 'y' }} {{ ok }}")
    text = made.render(x="<\x1b\u202e>", ok=Markup("<b>"))
    assert text == r"&lt;\x1b\u202e&gt; &lt;\x1b\u202e&gt; &lt;\x1b\u202e&gt; &lt;\x1b\u202e&gt;y <b>"


def test_a_plot_has_its_numbers_and_is_whole_by_itself() -> None:
    binned = measure(in_memory(np.array([1.0, 3.0, 0.0, -5.0], np.float32))).magnitudes()
    plot = charts.magnitudes(HOSTILE, "|x|", binned)
    assert plot.rows == (("2^0", "2^1", 1), ("2^1", "2^2", 1), ("2^2", "2^3", 1))
    assert plot.csv() == "from,to,values\n2^0,2^1,1\n2^1,2^2,1\n2^2,2^3,1\n"
    picture = Elements(str(plot.picture))
    assert (
        {"svg", "path", "text"}
        <= {tag for tag, _ in picture.elements}
        <= {"svg", "rect", "line", "path", "text"}
    )
    for name, link in plot.links().items():
        assert b64decode(link.partition(",")[2]) == plot.files()[name]
    assert "<script" not in plot.picture and 'fill="#' in plot.picture


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-x", "@x"])
def test_no_cell_of_a_csv_is_a_formula(cell: str) -> None:
    plot = charts.bars("t", "f", "u", "i", [1.0])
    made = charts.Plot("n", "t", "f", plot.picture, "", ("a",), ((cell,), (-1.5,), (None,)))
    assert made.csv() == f'a\n\'{cell}\n-1.5\n""\n'


def test_a_heat_map_has_a_pixel_for_each_cell() -> None:
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    image = charts.png(pixels)
    import struct
    import zlib

    assert image[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", image[16:24]) == (3, 2)
    size = struct.unpack(">I", image[33:37])[0]
    rows = np.frombuffer(zlib.decompress(image[41 : 41 + size]), np.uint8).reshape(2, 10)
    assert not rows[:, 0].any() and np.array_equal(rows[:, 1:].reshape(2, 3, 3), pixels)
    plot = charts.heat_map("m", "f", "u", [[1.0, None], [0.0, 100.0]], (20, 40))
    assert set(plot.files()) == {"m.csv", "m.svg", "m.png"}


def test_a_picture_of_nothing_is_one() -> None:
    for plot in (
        charts.magnitudes("a", "b", None),
        charts.bars("a", "b", "c", "d", []),
        charts.lines("a", "b", "c", {}, []),
        charts.lines("a", "b", "c", {"x": [None, 0.0]}, [1, 2], powers=True),
        charts.heat_map("a", "b", "c", [], (0, 0)),
    ):
        assert "nan" not in plot.picture and "inf" not in plot.picture.replace("infin", "")


def test_thousands_of_parameters_are_folded_into_modules() -> None:
    plain = {"shape": [2], "dtype": "float32", "bytes": 8, "group": 0, "rule": None}
    each = [
        {"path": f"l{i // 100}/b{i % 100}/w{k}", **plain, "slots": {}} for i in range(5000) for k in (0, 1)
    ]
    page = report("inspect", inspected(parameters=each))
    check_alone(page)
    assert listing(each).deepest == 0
    assert "l49/" in page and len(page.replace(re.findall(r'data:text/csv[^"]*', page)[0], "")) < 150_000


def measured(path: str, value: float, **slots: float) -> dict[str, Any]:
    """Returns what `inspect --stats` says of a parameter of four equal values, and of slots of one value."""

    def one(value: float, count: int) -> dict[str, Any]:
        stats = measure(in_memory(np.full(count, value, np.float32))).to_json()
        return {"shape": [count], "dtype": "float32", "bytes": 4 * count, "stats": stats}

    each = {name: one(slot, 1) for name, slot in slots.items()}
    return {"path": path, **one(value, 4), "group": 0, "rule": None, "slots": each}


def test_curves_by_layer_are_of_each_stack_and_of_the_outer_number() -> None:
    layers = by_layer(
        [
            measured("encoder/layers_0/wi/kernel", 1.0, v=2.0),
            measured("encoder/layers_0/wo/kernel", 2.0, v=1.0),
            measured("encoder/layers_1/wi/kernel", 3.0, v=5.0),
            measured("decoder.block.10.layer.0.q", 1.0),
            measured("decoder.block.2.layer.1.q", 2.0),
            measured("head/dense_1/kernel", 7.0),
            measured("token_embedder/embedding", 9.0),
        ]
    )
    assert layers.to_json() == {
        "values": {
            "encoder/layers": {"0": np.sqrt(20), "1": 6.0},
            "decoder/block": {"2": 4.0, "10": 2.0},
        },
        "v": {"encoder/layers": {"0": np.sqrt(5), "1": 5.0}},
    }
    assert layers.to_json("rms")["values"]["encoder/layers"] == {"0": np.sqrt(20 / 8), "1": 3.0}
    assert layers.parts == ("wi/kernel", "wo/kernel", "layer/0/q", "layer/1/q")
    values, v = layers.plots()
    assert values.columns == ("layer", "encoder/layers", "decoder/block")
    assert [row[0] for row in values.rows] == [0, 1, 2, 10]
    assert v.rows == ((0, np.sqrt(5)), (1, 5.0)) and by_layer([measured("a/b", 1.0)]).plots() == []


def test_steps_and_rows_have_ticks_at_whole_numbers_alone() -> None:
    plot = charts.lines("x", "x", "x", {"x": [1.0, 2.0, 3.0]}, [8, 9, 10])
    said = re.findall(r">([0-9.]+)</text>", str(plot.picture).partition("updates done")[0])
    assert {"8", "9", "10"} <= {*said} and "8.5" not in said
    near = charts.lines("x", "x", "x", {"x": [0.999991, 0.999998]}, [8, 9])
    ticks = [text for text in re.findall(r">([0-9.]+)</text>", str(near.picture)) if text.startswith("0.99")]
    assert len(ticks) == len({*ticks}) > 2


@pytest.mark.parametrize(
    "values", [(1.7e308, -1.7e308), (5e-324, 0.0), ((1.7e308,) * 300,) * 2], ids=["far", "near", "many"]
)
def test_numbers_at_the_ends_of_what_there_is_have_a_picture(values: Any) -> None:
    record = to_json(picture(in_memory(np.array(values))))
    plots = of_tensor("values", record)
    assert plots and not any(re.search(r"nan|inf", f"{plot.csv()} {plot.picture}") for plot in plots)
    one = {"path": "w", "shape": [2], "dtype": "float64", "bytes": 16, "slots": {}, "stats": record["stats"]}
    assert "$float" not in numbers([one])
