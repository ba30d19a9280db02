"""The page of a timeline in a real browser: what is drawn and said, by mouse and keys, in both colour schemes."""

import re

import pytest
import torch

import collectives
from collectives.tracing.page import page_text
from tests.ddp.training import loss_of, make_model, over_gloo, run, wrap
from tests.tracing.browser import Browser, find_chromium
from tests.tracing.records import MS, record, training

if find_chromium() is None:
    pytest.skip("needs Chromium: apt-get install chromium, which `make test` does as root", allow_module_level=True)


@pytest.fixture(scope="module")
def browser():
    with Browser() as started:
        yield started


class Shown:
    """A page in the browser; a bar is (place of the rank, lane, position)."""

    def __init__(self, browser, folder, records, **options):
        self.browser, self.path = browser, folder / "page.html"
        if records is not None:
            self.path.write_text(page_text(records))
        browser.open(self.path, **options)

    def run(self, code):
        return self.browser.run(f"(() => {{ const p = timelinePicture, m = p.model; return {code} }})()")

    def middle(self, rank, lane, i):
        """The place of a bar's middle in the window."""
        self.run("p.box.scrollIntoView({block: 'center'})")
        self.browser.settle()
        return self.run(
            f"(() => {{ const lane = m.ranks[{rank}].lanes[{lane}], r = p.canvas.getBoundingClientRect(); return "
            f"[r.left + (p.x(lane.start[{i}]) + p.x(lane.end[{i}])) / 2, r.top + p.y(lane) + LANE / 2] }})()"
        )

    def colour(self, x, y):
        """The colour at a place of the window, as #rrggbb."""
        return self.run(
            f"(() => {{ const r = p.canvas.getBoundingClientRect(); return '#' + [...p.context.getImageData("
            f"{x} - r.left, {y} - r.top, 1, 1).data].slice(0, 3)"
            ".map(part => part.toString(16).padStart(2, '0')).join('') })()"
        )

    def colours_of(self, rank, lane, i):
        """All colours in the middle row of pixels of a bar."""
        return set(self.run(
            f"(() => {{ const lane = m.ranks[{rank}].lanes[{lane}], x = Math.round(p.x(lane.start[{i}])), found = []; "
            f"const width = Math.max(Math.round(p.x(lane.end[{i}])) - x, 1); "
            "const d = p.context.getImageData(x, Math.round(p.y(lane) + LANE / 2), width, 1).data; "
            "for (let n = 0; n < d.length; n += 4) found.push('#' + [d[n], d[n + 1], d[n + 2]].map(part => "
            "part.toString(16).padStart(2, '0')).join('')); return found })()"
        ))  # fmt: skip

    def details(self):
        return self.browser.run("document.getElementById('details').innerText")

    def view(self):
        return self.run("[p.from, p.to]")

    def check(self):
        """Nothing was asked for but the file, and nothing complained."""
        assert self.browser.requests == [f"file://{self.path}"]
        # It warns of pixels that are read often, as these tests do.
        assert [each for each in self.browser.errors if "readback" not in str(each)] == []
        assert self.browser.run("performance.getEntriesByType('resource').length") == 0


@over_gloo
def recorded(ctx, path):
    ddp = wrap(make_model(), "torch", collectives.HookState(streams=2))
    for step in range(2):
        loss_of(ddp, step, ctx.rank).backward()
    with collectives.timeline(path):
        for step in range(3):
            loss_of(ddp, step, ctx.rank).backward()
    return torch.__version__


def test_a_page_of_real_training(browser, tmp_path):
    (version, _) = run(recorded, 2, tmp_path / "store", tmp_path / "page.json")
    page = Shown(browser, tmp_path, None)
    assert page.run("m.ranks.map(rank => rank.rank)") == [0, 1] and page.run("m.steps.length") == 3
    text = browser.run("document.body.innerText")
    assert version in text and "host" in text and "float32" in text
    # Each rank has bars in its program and in both streams, of the colours that the legend gives.
    for rank in range(2):
        assert page.run(f"m.ranks[{rank}].lanes.map(lane => lane.row)") == ["program", "stream 0", "stream 1"]
        for lane, colour in ((0, "blocked"), (1, "all_reduce"), (2, "all_reduce")):
            assert page.run(f"m.ranks[{rank}].lanes[{lane}].count") >= 3
            page.run(f"zoomTo(p, {{lane: m.ranks[{rank}].lanes[{lane}], i: 1}})")
            browser.settle()
            assert page.run(f"p.colours['{colour}']") in page.colours_of(rank, lane, 1)
    browser.click(*page.middle(1, 2, 1))
    assert re.search(r"size\s+[\d.]+ k?B \(\d+ B\)", page.details()) and ".weight" in page.details()
    assert "busbw" in page.details() and "rank 1" in page.details()
    page.check()


def test_a_click_tells_of_a_bar_on_all_ranks(browser, tmp_path):
    page = Shown(browser, tmp_path, training())
    browser.click(*page.middle(1, 1, 2))  # step 2's bucket 0 is the lane's third: a step has 0 and 2
    text = page.details()
    for part in ("No. 3: bucket 0, 3 MB, rank 1", "bfloat16", "layer0.weight", "3 kB (3000 B)", "12.500 ms, 14.500 ms"):
        assert part in text
    assert re.search(r"waited for the last rank\s+500.0 µs", text) and re.search(r"exposed\s+500.0 µs", text)
    # 3 MB in 2 ms; in 1.5 ms once rank 2 had come; busbw is 4/3 of it on three ranks.
    assert "1.50 GB/s, busbw 2.00 GB/s" in text and "2.00 GB/s, busbw 2.67 GB/s" in text
    rows = browser.run("[...document.querySelectorAll('#details tbody tr')].map(row => row.innerText)")
    assert [re.split(r"\s*\t\s*", row)[:2] for row in rows] == [
        ["0", "first"], ["1", "500.0 µs after the first"], ["2", "1.000 ms after the first, the last"],
    ]  # fmt: skip
    # Beside it, in the empty lane, a click takes the details away.
    x, y = page.middle(1, 2, 1)
    browser.click(x + 60, y)
    assert page.details() == ""
    page.check()


def test_hover_marks_the_same_collective_on_all_ranks(browser, tmp_path):
    page = Shown(browser, tmp_path, training())
    page.run("chooseStep(p, 2)")
    x, y = page.middle(0, 1, 2)
    same, frames = page.run("p.colours.same"), page.run(
        "m.members[3].map(({lane, i}) => { const r = p.canvas.getBoundingClientRect(); return "
        "[r.left + p.x(lane.end[i]), r.top + p.y(lane) + LANE / 2] })"
    )

    def framed():
        return [same in {page.colour(x + pixel, y) for pixel in (-1, 0, 1)} for x, y in frames]

    assert framed() == [False] * 3
    browser.move(x, y)
    assert framed() == [True] * 3
    tip = browser.run("document.getElementById('tip').innerText")
    assert "No. 3: bucket 0, 3 MB, rank 0" in tip and "waited for the last rank: 1.000 ms" in tip
    browser.move(5, 5)
    assert framed() == [False] * 3
    assert browser.run("document.getElementById('tip').hidden")
    page.check()


def test_exposed_and_waiting_parts_are_marked(browser, tmp_path):
    page = Shown(browser, tmp_path, training(), width=1600)
    page.run("zoomTo(p, {lane: m.ranks[0].lanes[1], i: 0})")
    x, y = page.middle(0, 1, 0)
    bottom = y + 6  # in the lowest pixels of a bar: 16 pixels, in a lane of 22
    at = {time: page.run(f"p.canvas.getBoundingClientRect().left + p.x({time})") for time in (2.2e6, 3.5e6, 4.25e6)}
    kinds = page.run("p.colours")
    assert page.colour(at[3.5e6], bottom) == kinds["all_reduce"] and page.colour(at[4.25e6], bottom) == kinds["blocked"]
    stripes = {page.colour(at[2.2e6] + pixel, y) for pixel in range(12)}
    assert kinds["late"] in stripes and kinds["all_reduce"] not in stripes
    program = page.middle(0, 0, 0)[1]
    assert page.colour(at[3.5e6], program) == kinds["compute"]
    assert page.colour(at[4.25e6] + 20, bottom) == kinds["blocked"]
    page.check()


def test_zoom_pan_and_steps(browser, tmp_path):
    page = Shown(browser, tmp_path, training())
    x, y = page.middle(0, 1, 2)
    time = "p.time({} - p.canvas.getBoundingClientRect().left)".format
    under, (first, last) = page.run(time(x)), page.view()
    browser.wheel(x, y, -240)
    begin, end = page.view()
    assert end - begin < (last - first) * 0.7 and abs(page.run(time(x)) - under) < (end - begin) / 500
    browser.drag(x, y, x - 100, y)
    assert abs(page.run(time(x - 100)) - under) < (end - begin) / 100 and page.details() == ""
    press = "document.getElementById('{}').click()".format
    before = page.view()
    for name, smaller in (("in", True), ("out", False)):
        browser.run(press(name))
        after = page.view()
        assert (after[1] - after[0] < before[1] - before[0]) is smaller
        before = after
    browser.run(press("all"))
    browser.settle()
    assert page.view() == [0, 40 * MS] and browser.run("document.getElementById('step').value") == "0"
    assert browser.run("document.getElementById('previous').disabled")
    for step in (1, 2):
        browser.run(press("next"))
        browser.settle()
        begin, end = page.view()
        edges = [0, 9.75 * MS, 19.75 * MS]
        assert begin < edges[step - 1] + 1 and edges[step] < end < edges[step] + MS
        assert browser.run("document.getElementById('step').value") == str(step)
    browser.run("const s = document.getElementById('step'); s.value = 4; s.dispatchEvent(new Event('change'))")
    browser.settle()
    assert browser.run("document.getElementById('next').disabled")
    # Far in and far out: it stays within the recording.
    for pixels in (-300, 300):
        for _ in range(30):
            browser.wheel(x, y, pixels)
        begin, end = page.view()
        assert -MS <= begin < end <= 41 * MS and end - begin >= 199
    page.check()


def test_keys_alone(browser, tmp_path):
    page = Shown(browser, tmp_path, training())
    browser.run("document.getElementById('rows').focus()")
    browser.key("n")
    assert "No. 0: bucket 0, 3 MB, rank 0" in page.details()
    browser.key("n")
    assert "No. 2: bucket 2" in page.details()
    browser.key("ArrowUp")
    assert "bucket 1, rank 0" in page.details()  # the program: the last to begin before
    for _ in range(4):
        browser.key("ArrowDown")
    assert "rank 1" in page.details()
    browser.key("Enter")
    begin, end = page.view()
    assert end - begin < 10 * MS
    browser.key("+")
    assert page.view()[1] - page.view()[0] < end - begin
    before = page.view()
    browser.key("ArrowRight")
    assert page.view()[0] > before[0]
    browser.key("Home")
    browser.key("Escape")
    assert page.view() == [0, 40 * MS] and page.details() == ""
    page.check()


def test_a_row_of_the_table_shows_its_bar(browser, tmp_path):
    page = Shown(browser, tmp_path, training(ranks=12, buckets=4))
    browser.run("document.querySelectorAll('#longest button')[2].click()")
    browser.settle()
    number = browser.run("document.querySelectorAll('#longest button')[2].textContent")
    assert f"No. {number}: bucket" in page.details()
    group = "p.selected.lane.group[p.selected.i]"
    assert page.run(f"String({group})") == number
    assert page.run("p.y(p.selected.lane) >= 0 && p.y(p.selected.lane) < p.height")
    begin, end = page.view()
    assert begin < page.run("p.selected.lane.start[p.selected.i]") < end
    page.check()


@pytest.mark.parametrize(("width", "scheme"), [(800, "light"), (800, "dark"), (1600, "dark")])
def test_widths_and_colour_schemes(browser, tmp_path, width, scheme):
    page = Shown(browser, tmp_path, training(), width=width, scheme=scheme)
    assert browser.run("document.documentElement.scrollWidth") <= width
    dark = browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert dark == (scheme == "dark")
    ground = page.colour(*[edge + 3 for edge in page.run("(r => [r.left, r.top])(p.canvas.getBoundingClientRect())")])
    assert ground == {"dark": "#1b1f23", "light": "#ffffff"}[scheme]
    assert page.run("p.colours['all_reduce']") in page.colours_of(2, 1, 0)
    page.check()


def test_without_javascript(browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page_text(training()))
    browser.open(path, scripts=False)
    text = browser.run("document.body.innerText")
    for part in ("world size 3", "slowest", "12 of 12", "layer0.weight", "needs JavaScript"):
        assert part in text
    assert browser.run("document.getElementById('picture').offsetHeight") == 0


def test_hostile_names_stay_names(browser, tmp_path):
    hostile = "</script><img src=x onerror=alert(1)><b>&"
    page = Shown(browser, tmp_path, training(parameters=hostile + "{}"))
    browser.click(*page.middle(1, 1, 2))
    assert hostile in page.details()
    assert browser.run("document.querySelectorAll('img, b').length") == 0
    page.check()


def test_odd_recordings_are_drawn(browser, tmp_path):
    """No events; no steps; one rank of many; rows that no one knows; events before the beginning."""
    for records in (
        [record(0, size=1)],
        [record(2, [("horovod", "allreduce.x", -3, 5)], size=4)],
        [record(0, [("lane 0", "barrier", 1, 1), ("lane 0", "barrier", 1, 2), ("odd", "x", 1, 9), ("odd", "y", 2, 12)],
                (50,)), record(1, [])],
    ):  # fmt: skip
        page = Shown(browser, tmp_path, records)
        page.run("p.draw()")
        assert page.run("m.ranks.length") == len(records)
        browser.run("document.getElementById('rows').focus()")
        for key in ("n", "ArrowDown", "p", "Enter", "Home"):
            browser.key(key)
        page.check()


def test_a_large_recording_draws_what_is_in_sight(browser, tmp_path):
    page = Shown(browser, tmp_path, training(ranks=8, steps=100, buckets=50))
    everything = page.run("m.lanes.reduce((sum, lane) => sum + lane.count, 0)")
    assert everything == 8 * 100 * 101
    assert 0 < page.run("p.drawn") < 24 * 1200 * 2  # lanes, pixels, colours of a lane
    page.run("chooseStep(p, 40)")
    browser.settle()
    assert 8 * 50 < page.run("p.drawn") < 8 * 150
    page.check()
