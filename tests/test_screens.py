"""What people do with the service, in a real browser that reaches nothing but it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect
from serving import write_step

from browsing import (
    CHROMIUM,
    SOON,
    Watched,
    axe,
    chromium,
    data,
    needs_chromium,
    opened,
    row,
    served,
    until,
)
from goldens import COMPACT
from statekit.errors import size
from statekit.files.manifest import beside

pytestmark = needs_chromium

T5 = COMPACT / "t5x_train" / "t5_11_unscanned" / "checkpoint" / "checkpoint_8"
LEGACY = COMPACT / "torch_formats" / "adamw_legacy" / "checkpoint" / "checkpoint.pt"
TRAINER = COMPACT / "torch_formats" / "adamw_trainer" / "checkpoint" / "checkpoint-4"
EMBEDDING = "token_embedder/embedding"
SCRIPT = "<img src=x onerror=alert(1)>.pt"
TURNED = "turned \u202egnp.pt"
LONG = "long-" * 48 + ".pt"
"""255 bytes is the most that a file's name may have; these are 243."""


class Session:
    """A browser that has signed in once.

    Attributes:
        origin: Where the service is.
        root: What it shows.
    """

    def __init__(self, browser: Browser, link: str, root: Path) -> None:
        self.origin, self.root = link.partition("/sign-in")[0], root
        self._browser = browser
        context = browser.new_context()
        first = Watched(context, self.origin)
        first.page.goto(link)
        first.page.wait_for_url(f"{self.origin}/")
        expect(first.page.get_by_role("heading", name="Catalogue")).to_be_visible()
        first.page.goto(link)
        self.again = first.page.locator("body").inner_text()
        self._state = context.storage_state()
        context.close()

    def context(self, dark: bool = False, width: int = 1280) -> BrowserContext:
        """Returns a window of its own that is signed in."""
        return self._browser.new_context(
            storage_state=self._state,
            color_scheme="dark" if dark else "light",
            viewport={"width": width, "height": 900},
            reduced_motion="reduce",
        )


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = tmp_path_factory.mktemp("screens")
    root = folder / "root"
    shutil.copytree(T5, root / "run" / "checkpoint_8")
    write_step(T5, 9, root / "run" / "checkpoint_9", "t5x", "t5x")
    for step in (4, 9):
        write_step(LEGACY, step, root / "adamw" / f"step-{step}.pt", "torch", "torch-optim", times=100)
    for step in range(10, 40, 10):
        write_step(LEGACY, step, root / "long" / f"step-{step}.pt", "torch", "torch-optim")
    shutil.copytree(TRAINER, root / "trainer" / "checkpoint-4")
    for name in ("a.pt", "b.pt", SCRIPT, TURNED, LONG):
        shutil.copy(LEGACY, root / name)
    (root / "broken.pt").write_bytes(LEGACY.read_bytes()[:1000])
    with served(folder / "data", root) as link, chromium() as browser:
        yield Session(browser, link, root)


@pytest.fixture
def page(session: Session) -> Iterator[Page]:
    context = session.context()
    watched = Watched(context, session.origin)
    watched.page.goto(session.origin)
    yield watched.page
    context.close()
    assert watched.complaints == []


def test_a_link_signs_in_once(session: Session) -> None:
    assert "used already" in session.again


def test_who_has_not_signed_in_sees_nothing(session: Session) -> None:
    with_nothing = session._browser.new_context()
    page = with_nothing.new_page()
    page.goto(session.origin)
    assert "Token" in page.locator("body").inner_text()
    assert "checkpoint" not in page.locator("body").inner_text()
    with_nothing.close()


def test_by_keys_alone_a_checkpoint_is_found_opened_and_read(page: Page) -> None:
    expect(row(page, "a.pt")).to_be_visible(timeout=SOON)
    expect(page.locator("#list[hx-trigger]")).to_have_count(
        0, timeout=SOON
    )  # while a scan runs it is drawn anew
    page.keyboard.press("/")
    page.keyboard.type("trainer")
    expect(page.locator("tr[data-row]")).to_have_count(1)
    expect(page).to_have_url(re.compile(r"/\?q=trainer$"))
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    chosen = page.evaluate("document.activeElement.textContent")
    page.evaluate(  # as while a scan runs
        "htmx.ajax('GET', location.href, {target: '#list', select: '#list', swap: 'outerHTML'})"
    )
    assert chosen and page.evaluate("document.activeElement.textContent") == chosen
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="checkpoint-4")).to_be_visible()
    expect(page.get_by_role("heading", name="Go on from it")).to_be_visible(timeout=SOON)
    page.keyboard.press("?")
    expect(page.get_by_role("heading", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    expect(page.get_by_role("heading", name="Catalogue")).to_be_visible()


def test_what_cannot_be_read_says_why(page: Page) -> None:
    assert len(row(page, "broken.pt").locator(".reason").inner_text()) > 20


@pytest.mark.parametrize("name", [SCRIPT, LONG])
def test_a_name_is_only_text(name: str, page: Page) -> None:
    expect(row(page, name)).to_be_visible()
    row(page, name).get_by_role("link").first.click()
    expect(page.get_by_role("heading", name=name)).to_be_visible()
    assert page.locator("main img").count() == 0


def test_a_name_that_turns_what_follows_it_is_spelt_out(page: Page) -> None:
    assert "\u202e" not in page.content()
    expect(page.get_by_role("link", name=re.compile(r"^turned \\u202egnp\.pt$"))).to_be_visible()


def test_doctor_is_asked_and_read(page: Page) -> None:
    opened(page, "a.pt")
    page.get_by_role("button", name="Look for faults").click()
    expect(page.locator("#verdict").get_by_text("no silent fault was found")).to_be_visible(timeout=SOON)
    expect(page.locator("#verdict .badge.good")).to_have_text("clean")


def test_it_says_where_a_run_resumes_and_by_which_code(page: Page) -> None:
    opened(page, "checkpoint_8")
    expect(page.locator("#code").get_by_text("statekit.torch.load_optimizer")).to_be_visible(timeout=SOON)
    assert [" ".join(title.split()) for title in page.locator("#code h3").all_inner_texts()] == [
        "PyTorch bitwise",
        "JAX bitwise",
        "Keras bitwise",
        "Its own system bitwise",
    ]
    page.get_by_text("in which it resumes").click()
    exact = page.locator("#resumes tr").filter(has_text="statekit-torch")
    expect(exact.locator(".badge")).to_have_text("bitwise")
    expect(page.locator("#resumes tr").filter(has_text="torch-optim").locator(".badge")).to_have_text(
        "statistics"
    )


def test_modules_open_when_asked_and_statistics_come_by_themselves(page: Page) -> None:
    opened(page, "checkpoint_8")
    tree = page.locator(".tree")
    expect(tree.get_by_text("logits_dense/kernel")).to_have_count(0)
    tree.locator("summary").filter(has_text="decoder").first.click()
    expect(tree.get_by_text("logits_dense/kernel")).to_be_visible()
    page.get_by_role("button", name="Measure norms").click()
    expect(page.locator(".tree svg.spark").first).to_be_visible(timeout=SOON)


def test_tags_and_notes_are_kept_and_found(page: Page) -> None:
    page.get_by_role("link", name="b.pt", exact=True).click()
    page.get_by_placeholder("tag").fill("best")
    page.get_by_role("button", name="Tag", exact=True).click()
    page.locator("summary").filter(has_text="Note").click()
    page.get_by_role("textbox", name="Note").fill("before the learning rate was cut")
    page.get_by_role("button", name="Keep the note").click()
    page.goto(page.url.partition("/checkpoints")[0] + "/?q=cut&tag=best")
    expect(page.locator("tr[data-row]")).to_have_count(1)
    expect(row(page, "b.pt")).to_be_visible()


def test_a_conversion_with_a_map_is_planned_followed_and_found_in_the_lineage(page: Page) -> None:
    opened(page, "checkpoint_8")
    page.get_by_text("Convert it").click()
    form = page.locator("#convert form")
    form.get_by_label("and path below it").fill("hf-t5")
    form.locator("[name=to]").select_option("hf-trainer")
    form.get_by_label("Map to another model").select_option("t5x-t5:hf-t5")
    form.get_by_label("What the map needs to know").fill("num_heads=4")
    form.get_by_role("button", name="Say what it would do").click()
    expect(page.get_by_text("It would be written so")).to_be_visible(timeout=SOON)
    page.go_back()
    page.get_by_text("Convert it").click()
    form.get_by_role("button", name="Convert", exact=True).click()
    expect(page.get_by_text("Written, read again and compared")).to_be_visible(timeout=SOON)
    made = page.locator("tr[data-row]").filter(has_text="hf-t5")
    until(page, lambda: page.goto("/".join(page.url.split("/")[:3]) + "/?q=hf-t5"), made)
    made.get_by_role("link").first.click()
    page.get_by_role("link", name="Lineage").click()
    expect(page.locator("svg").get_by_text("convert")).to_be_visible()
    page.locator("svg a").filter(has_text="checkpoint_8").click()
    expect(page.get_by_role("heading", name="checkpoint_8")).to_be_visible()


ASK = """async (asked) => {
  const headers = {"content-type": "application/json"};
  return (await (await fetch("/api/v1/jobs", {method: "POST", headers, body: JSON.stringify(asked)})).json()).id;
}"""


def test_a_job_that_is_not_wanted_any_more_is_cancelled(page: Page) -> None:
    of = [row(page, f"checkpoint_{step}").get_by_role("link").first.get_attribute("href") for step in (8, 9)]
    # So many steps that it can't be done before it is cancelled.
    asked = {
        "kind": "verify",
        "subjects": [int(str(one).rpartition("/")[2]) for one in of],
        "options": {"steps": 10**6},
    }
    page.goto(f"{page.url.rstrip('/')}/jobs/{page.evaluate(ASK, asked)}")
    expect(page.locator("[data-state]")).to_have_text("running", timeout=SOON)
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("[data-state]")).to_have_text("cancelled", timeout=SOON)


def test_two_are_compared(page: Page) -> None:
    opened(page, "a.pt")
    page.get_by_role("link", name="Compare").last.click()
    chosen = page.get_by_label("and this")
    other = page.locator("#choices option[value$=': b.pt']").get_attribute("value")
    chosen.fill(str(other))
    page.get_by_role("button", name="Compare").first.click()
    expect(page.locator("#difference .verdict")).to_contain_text("Equal", timeout=SOON)


def test_a_tensor_in_which_two_differ_is_looked_at_closer(page: Page) -> None:
    both = [
        str(row(page, f"checkpoint_{step}").get_by_role("link").first.get_attribute("href"))
        for step in (8, 9)
    ]
    first, second = (one.rpartition("/")[2] for one in both)
    page.goto(f"{page.url.rstrip('/')}/diff?a={first}&b={second}")
    expect(page.locator("#difference .verdict.bad")).to_be_visible(timeout=SOON)
    page.get_by_role("link", name=f"slots/{EMBEDDING}/v_row", exact=True).click()
    expect(page.get_by_role("heading", name=f"{EMBEDDING}, slot v_row")).to_be_visible()
    expect(page.locator("#difference figure").filter(has_text="How far v_row is apart")).to_be_visible(
        timeout=SOON
    )
    assert (data(page)["path"], data(page)["slot"]) == (EMBEDDING, "v_row")
    page.get_by_role("link", name="All in which").click()
    assert not data(page)["equal"]
    page.get_by_role("link", name=f"params/{EMBEDDING}", exact=True).click()
    expect(page.locator("#difference figure").filter(has_text="How far p is apart")).to_be_visible(
        timeout=SOON
    )
    page.get_by_role("link", name=re.compile(r"^Job \d")).click()
    expect(page.locator("#job figure").filter(has_text="How far p is apart")).to_be_visible()
    assert axe(page) == []


def test_lists_are_there_as_data_too(page: Page) -> None:
    page.goto(f"{page.url.rstrip('/')}/?q=b.pt&readable=yes")
    assert [one["name"] for one in data(page)["items"]] == ["b.pt"]
    opened(page, "b.pt")
    assert data(page)["name"] == "b.pt"
    page.get_by_role("link", name="Lineage").click()
    assert [one["checkpoint"]["name"] for one in data(page)["nodes"]] == ["b.pt"]
    page.goto("/".join(page.url.split("/")[:3]) + "/jobs?kind=inspect&state=done")
    assert {(one["kind"], one["state"]) for one in data(page)["items"]} == {("inspect", "done")}
    page.locator("tr[data-row] a[data-open]").first.click()
    assert data(page)["kind"] == "inspect"


def test_what_is_not_sealed_is_not_thinned_until_it_is(page: Page) -> None:
    opened(page, "a.pt")
    page.get_by_text("Thin it").click()
    page.get_by_role("button", name="Thin", exact=True).click()
    expect(page.locator(".verdict.bad")).to_contain_text("it is unsealed")
    page.go_back()
    page.get_by_role("button", name="Seal it").click()
    expect(page.locator("#verdict .badge").first).to_have_text("sealed", timeout=SOON)
    page.get_by_text("Thin it").click()
    page.get_by_role("button", name="Thin", exact=True).click()
    expect(page.locator(".verdict.bad")).to_contain_text("it is the last step of its run")


def _taken(file: Path) -> int:
    """Returns how many bytes of the disk a file takes, with its manifest."""
    return sum(one.stat().st_blocks * 512 for one in (file, beside(file)) if one.exists())


def test_an_older_step_is_checked_and_thinned_and_the_lineage_shows_it(page: Page, session: Session) -> None:
    older = session.root / "adamw" / "step-4.pt"
    opened(page, older.name)
    address, before = page.url.partition("#")[0], _taken(older)
    page.get_by_role("button", name="Check every byte").click()
    expect(page.locator("#verdict").get_by_text("Every byte was read and is")).to_be_visible(timeout=SOON)
    promised = _thinned(page, address, "Say what it would free", "It would free about (.*)")
    assert older.exists()
    freed = _thinned(page, address, "Thin", "(.*) are free now")
    assert not older.exists()
    really = before - _taken(older.with_name("step-4-weights.pt"))
    assert promised == freed == size(really)
    lineage = address.replace("/checkpoints/", "/lineage/")
    made = page.locator("svg a").filter(has_text="step-4-weights.pt")
    until(page, lambda: page.goto(lineage), made)
    expect(page.locator("svg").get_by_text("thin of step-4.pt", exact=True)).to_be_visible()
    said = page.locator("tr[data-row]").filter(has_text="step-4-weights.pt")
    expect(said).to_contain_text("thin")
    expect(said).to_contain_text('{"params_only":')
    expect(said).not_to_contain_text("statekit statekit")


def test_steps_that_a_rule_does_not_keep_are_seen_and_thinned_together(page: Page, session: Session) -> None:
    run = session.root / "long"
    page.get_by_role("link", name="long", exact=True).first.click()
    page.get_by_role("link", name="Thin it").click()
    expect(page.get_by_text("Nothing", exact=True)).to_be_visible()  # three steps are kept unless it is said
    page.get_by_label("Keep the last good steps").fill("1")
    page.get_by_label("Keep each multiple of").fill("20")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("tr[data-row]")).to_have_count(1)
    assert axe(page) == []
    assert sorted(file.name for file in run.glob("*.pt")) == ["step-10.pt", "step-20.pt", "step-30.pt"]
    page.get_by_label("Keep each multiple of").fill("0")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("button", name="Thin 2 steps").click()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    until(page, page.reload, page.locator("tr[data-row]").filter(has_text="step-20").filter(has_text="done"))
    assert [file.name for file in sorted(run.glob("*.pt"))] == [
        "step-10-weights.pt",
        "step-20-weights.pt",
        "step-30.pt",
    ]


def _thinned(page: Page, address: str, button: str, said: str) -> str:
    """Asks for a thinning, and returns the figure that its verdict has."""
    page.goto(address)
    page.get_by_text("Thin it").click()
    page.get_by_role("button", name=button, exact=True).click()
    verdict = page.locator(".verdict strong")
    expect(verdict).to_have_text(re.compile(said), timeout=SOON)
    match = re.fullmatch(said, verdict.inner_text())
    assert match is not None
    return match[1]


SCREENS = (
    "/", "/?q=nothing-fits", "/jobs", "/diff", "/checkpoints/1", "/lineage/1", "/runs/1", "/checkpoints/999999"
)  # fmt: skip


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious_on_any_screen(dark: bool, session: Session) -> None:
    context = session.context(dark)
    watched = Watched(context, session.origin)
    for screen in SCREENS:
        watched.page.goto(session.origin + screen)
        watched.page.wait_for_load_state("networkidle") if screen == "/checkpoints/1" else None
        assert axe(watched.page) == [], screen
    context.close()


def test_no_screen_is_wider_than_a_telephone(session: Session) -> None:
    context = session.context(width=400)
    page = Watched(context, session.origin).page
    wide = []
    for screen in SCREENS:
        page.goto(session.origin + screen)
        if page.evaluate("document.documentElement.scrollWidth") > 400:
            wide.append(screen)
    context.close()
    assert wide == []


def test_the_first_page_is_light(session: Session) -> None:
    context = session.context()
    page = context.new_page()
    sizes: dict[str, int] = {}
    page.on("response", lambda response: sizes.update({response.url: len(response.body())}))
    page.goto(session.origin, wait_until="networkidle")
    context.close()
    assert sum(sizes.values()) < 150_000, sizes


def test_the_theme_that_is_chosen_stays(page: Page) -> None:
    page.get_by_role("button", name="Light or dark").click()
    page.reload()
    assert page.locator("html").get_attribute("data-theme") == "dark"


def test_a_page_that_asks_for_another_server_is_noticed(session: Session) -> None:
    context = session.context()
    watched = Watched(context, session.origin)
    watched.page.goto(session.origin)
    watched.page.evaluate("fetch('http://example.com/x').catch(() => 0)")
    watched.page.wait_for_timeout(100)
    context.close()
    assert any("example.com" in one for one in watched.complaints)
    assert CHROMIUM is not None


def test_a_slot_is_looked_at_and_its_plot_exported(page: Page) -> None:
    opened(page, "checkpoint_8")
    page.locator(".tree").get_by_role("link", name="token_embedder/embedding").click()
    expect(page.get_by_role("heading", name="Slot v_row")).to_be_visible(timeout=SOON)
    expect(page.locator("figure svg.plot").first).to_be_visible()
    assert {*data(page)["tensors"]} == {"values", "v_row", "v_col"}
    with page.expect_download() as download:
        page.locator("figure .files a").filter(has_text="CSV").first.click()
    assert download.value.path().read_text(encoding="utf-8").count("\n") > 2
    assert axe(page) == []
    page.get_by_role("button", name="Light or dark").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert axe(page) == []


def test_a_parameter_is_followed_over_the_steps_of_its_run(page: Page) -> None:
    opened(page, "checkpoint_8")
    page.locator(".tree").get_by_role("link", name=EMBEDDING).click()
    page.get_by_role("link", name="Over 2 steps").click()
    plot = page.locator("#slots figure").filter(has_text="rms(values)")
    expect(plot).to_be_visible(timeout=SOON)
    plot.get_by_text("Numbers").click()
    (first, before), (second, after) = (
        line.split() for line in plot.locator("details tbody tr").all_inner_texts()
    )
    assert (first, second) == ("8", "9")
    assert data(page)["updates"] == [8, 9]
    assert float(after) == pytest.approx(float(before) * 9 / 7, rel=1e-3)


def test_a_run_is_held_against_itself_and_a_slot_followed_alone(page: Page) -> None:
    page.locator("#runs").get_by_role("link", name="run", exact=True).click()
    expect(page.get_by_role("heading", name="Run run")).to_be_visible()
    page.get_by_role("button", name="Look for faults over all steps").click()
    expect(page.locator("#between .verdict")).to_contain_text(re.compile("finding|Nothing"), timeout=SOON)
    assert axe(page) == []
    assert data(page)["steps"] == 2
    page.locator("#between").get_by_role("link", name=re.compile(r"^\d+$")).click()
    expect(page.get_by_role("heading", name="Result")).to_be_visible()
    page.go_back()
    row(page, "checkpoint_9").get_by_role("link", name="Compare").click()
    page.get_by_role("link", name=f"slots/{EMBEDDING}/v_row", exact=True).click()
    page.get_by_role("link", name="Over all steps of the run").click()
    expect(page.locator("#difference figure").filter(has_text="How far from the step before")).to_be_visible(
        timeout=SOON
    )
    _before, after = data(page)["changes"]["v_row"]["relative"]
    assert after == pytest.approx(2 / 7, rel=1e-5)  # 9/7 of it, in float32
    assert row(page, "8 to 9").locator("td").nth(1).inner_text() == "0.2857"
    assert axe(page) == []


def test_a_curve_that_hardly_moves_is_drawn(page: Page) -> None:
    """The cosine between steps of a run that has nearly ended; an error left the place of the plot blank."""
    plot = _layers(page)
    expect(plot.locator("canvas")).to_be_visible(timeout=SOON)
    figure = page.locator("figure").filter(has_text="Slot v_row by layer")
    nearly = {"at": [1, 2, 3], "curves": {"p": [None, 0.9999999962725793, 0.9999999999998608]}, "guides": {},
              "index": "step", "unit": "cosine", "powers": False, "whole": True}  # fmt: skip
    figure.evaluate("(figure, said) => { figure.dataset.curves = JSON.stringify(said); }", nearly)
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    expect(figure.locator(".u-axis").first).to_be_visible()


def _layers(page: Page) -> Locator:
    """Opens a checkpoint's curves along the layers, and returns one of them."""
    opened(page, "checkpoint_8")
    page.get_by_role("link", name="Layers").click()
    measure = page.get_by_role("button", name="Measure norms")
    plot = page.locator("figure").filter(has_text="Slot v_row by layer").locator(".curves")
    expect(measure.or_(plot)).to_be_visible(timeout=SOON)
    if measure.count():
        measure.click()
    return plot


def test_curves_are_read_off_and_zoomed_into_by_keys(page: Page) -> None:
    plot = _layers(page)
    expect(plot.locator("canvas")).to_be_visible(timeout=SOON)
    plot.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    said = plot.locator("[aria-live]").inner_text()
    (curves,) = [data(page)["curves"]["v_row"]]
    assert said.startswith("layer 1: decoder/layers ")
    assert float(said.split()[3].rstrip(",")) == pytest.approx(curves["decoder/layers"]["1"], rel=1e-5)
    page.get_by_label("Of each layer").select_option("mlp/wo/kernel")
    page.get_by_role("button", name="Show").click()
    assert "part=mlp%2Fwo%2Fkernel" in page.url
    assert data(page)["curves"]["v_row"]["encoder/layers"]["0"] < curves["encoder/layers"]["0"]
    assert axe(page) == []
    page.get_by_role("button", name="Light or dark").click()
    expect(plot.locator("canvas")).to_be_visible()
    assert axe(page) == []


def test_a_part_of_a_matrix_is_zoomed_into_by_keys(page: Page) -> None:
    opened(page, "checkpoint_8")
    page.locator(".tree").get_by_role("link", name=EMBEDDING).click()
    page.get_by_role("link", name="Zoom into the parameter").click(timeout=SOON)
    part = page.get_by_role("link", name="rows 64 to 127, columns 16 to 31")
    expect(part).to_be_visible(timeout=SOON)
    part.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("rows 64 to 127 of 256, columns 16 to 31 of 64")).to_be_visible()
    picture = page.locator("#region figure").filter(has_text="Where p is large")
    expect(picture).to_be_visible(timeout=SOON)
    seen = data(page)["tiles"]
    assert (seen["shape"], seen["each"]) == ([64, 16], [1, 1])
    assert axe(page) == []
    page.get_by_role("link", name="Out", exact=True).click()
    expect(page.get_by_text("rows 0 to 255 of 256")).to_be_visible()


def test_modules_that_stand_open_stand_in_the_address(page: Page) -> None:
    opened(page, "checkpoint_9")
    page.keyboard.press("k")  # the last row
    expect(page.get_by_role("link", name=EMBEDDING)).to_be_focused()
    page.keyboard.press("k")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.locator(".tree summary").filter(has_text="layers_1").first.click()
    inner = page.locator(".tree summary").filter(has_text="mlp").first
    expect(inner).to_be_visible()
    assert page.url.endswith("?open=decoder&open=decoder%2Flayers_1")
    page.reload()
    expect(inner).to_be_visible()
    page.locator(".tree summary").filter(has_text="decoder").first.click()
    page.wait_for_url(lambda url: "open=decoder&" not in url)


def test_an_address_that_there_is_not_is_a_page(session: Session) -> None:
    context = session.context()
    page = context.new_page()
    for address in ("/nowhere", "/checkpoints/x", "/jobs/1/2", "/runs/999"):
        answer = page.goto(session.origin + address)
        assert answer is not None and answer.status in {404, 422}
        expect(page.get_by_role("heading", name="That didn't work")).to_be_visible()
    page.get_by_role("link", name="To the catalogue").click()
    expect(page.get_by_role("heading", name="Catalogue")).to_be_visible()
    context.close()


def test_a_field_without_a_name_is_noticed(page: Page) -> None:
    page.evaluate("document.querySelector('main').append(document.createElement('input'))")
    assert any(one.startswith("label") for one in axe(page))
