"""The dashboard in Chromium, over the real HTTP side and a controller in memory: looks, keys, live updates, hostile
data."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from longprefill.orchestrator.config import ApiKey
from longprefill.orchestrator.job import JobState

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
try:
    from dashboard_scenes import browser as browsers  # pyright: ignore[reportMissingImports]
    from dashboard_scenes import scenes  # pyright: ignore[reportMissingImports]
    from dashboard_scenes.controller import SceneController, job_view  # pyright: ignore[reportMissingImports]
    from dashboard_scenes.server import SceneServer  # pyright: ignore[reportMissingImports]
finally:
    sys.path.remove(str(SCRIPTS))

expect.set_options(timeout=20_000)
JOB_OF = {"idle": scenes.DONE_JOB, "running": scenes.RUNNING_JOB, "failed": scenes.FAILED_JOB}
KEYS = {"research": "lp-research-key", "root": "lp-operator-key"}
HOSTILE = '"><img src=x onerror="window.hacked=1"><script>window.hacked=1</script>{{7*7}}'


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    program = browsers.find_chromium()
    if program is None:
        what = "chromium is not on the path (Debian: apt-get install chromium)"
        if browsers.is_required():
            pytest.fail(f"{what}, and {browsers.REQUIRED} asks for it")
        pytest.skip(what)
    with browsers.browser(program) as started:
        yield started


class Watched:
    """A page, and what it complained of."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[Any] = []
        page.set_default_timeout(20_000)
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request))


@pytest.fixture
def wide(chromium: Browser) -> Iterator[Watched]:
    with browsers.page(chromium, "wide", "light") as page:
        yield Watched(page)


def show_job(page: Page, url: str, job: str) -> None:
    page.goto(f"{url}/#/jobs/{job}")
    expect(page.locator("#job h2")).to_have_text(job)
    expect(page.locator("#job .figures").first).to_be_visible()


def steps_shown(page: Page) -> Any:
    return page.locator('#job section[aria-label="Steps"] tbody tr')


@pytest.mark.parametrize("name", scenes.SCENES)
def test_looks(wide: Watched, name: str, tmp_path: Path) -> None:
    """Every state at every width and scheme: nothing to complain of, and nothing to scroll to the side for."""
    page = wide.page
    with SceneServer(scenes.SCENES[name](tmp_path)) as server:
        page.goto(server.url)
        expect(page.locator("#jobs tbody tr").first).to_be_visible()
        expect(page.locator("#nodes tbody tr")).to_have_count(3)
        word = "ready, 1 of 3 groups down" if name == "failed" else "ready"
        expect(page.locator("#service-state")).to_have_text(word)
        check_widths(page)
        show_job(page, server.url, JOB_OF[name])
        expect(steps_shown(page).first).to_be_visible()
        check_widths(page)
    assert wide.errors == []


def check_widths(page: Page) -> None:
    """Nothing is wider than the window, down to the narrowest phones."""
    for size in (*browsers.SIZES.values(), {"width": 320, "height": 600}):
        page.set_viewport_size(size)  # pyright: ignore[reportArgumentType]
        for scheme in browsers.SCHEMES:
            page.emulate_media(color_scheme=scheme)  # pyright: ignore[reportArgumentType]
            assert browsers.overflow(page) == 0, (size, scheme)


def test_a_wide_page_is_noticed(wide: Watched, tmp_path: Path) -> None:
    """The measure of the test above."""
    with SceneServer(scenes.idle(tmp_path)) as server:
        wide.page.goto(server.url)
        expect(wide.page.locator("#jobs tbody tr").first).to_be_visible()
        wide.page.evaluate("document.querySelector('#jobs').style.width = '3000px'")
        assert browsers.overflow(wide.page) > 1000


def test_nothing_yet(wide: Watched, tmp_path: Path) -> None:
    with SceneServer(SceneController(tmp_path)) as server:
        wide.page.goto(server.url)
        expect(wide.page.locator("#jobs .note")).to_contain_text("No jobs yet")
        expect(wide.page.locator("#groups .note")).to_have_text("No groups are configured.")
        wide.page.get_by_role("button", name="failed").click()
        expect(wide.page.locator("#jobs .note")).to_have_text("No job is failed now.")
    assert wide.errors == []


def test_cancelling_by_keyboard(wide: Watched, tmp_path: Path) -> None:
    page = wide.page
    with SceneServer(scenes.running(tmp_path)) as server:
        page.goto(server.url)
        button = page.get_by_role("button", name=f"Cancel {scenes.RUNNING_JOB}")
        expect(button).to_be_visible()
        for _ in range(60):
            page.keyboard.press("Tab")
            if button.evaluate("element => element === document.activeElement"):
                break
        expect(button).to_be_focused()
        assert button.evaluate("element => getComputedStyle(element).outlineStyle") == "solid", "focus can be seen"

        page.keyboard.press("Enter")
        expect(page.locator("#cancel-job")).to_have_text(scenes.RUNNING_JOB)
        expect(page.locator("#cancel-no")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.locator("#cancel-dialog")).to_be_hidden()
        expect(button).to_be_focused()
        assert server.scene.cancels == []

        page.keyboard.press("Enter")
        expect(page.locator("#cancel-no")).to_be_focused()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#live")).to_have_text(f"Job {scenes.RUNNING_JOB} is cancelled")
        row = page.locator("#jobs").get_by_role("row", name=scenes.RUNNING_JOB)
        expect(row.locator(".state")).to_have_text("cancelled")
        expect(button).to_be_hidden()
        assert server.scene.cancels == [scenes.RUNNING_JOB]
    assert wide.errors == []


def test_live_updates_and_a_lost_connection(wide: Watched, tmp_path: Path) -> None:
    """A step shows when it ends; what happened while the service was away comes afterwards, each step once."""
    page, job = wide.page, scenes.RUNNING_JOB
    with SceneServer(scenes.running(tmp_path)) as server:
        show_job(page, server.url, job)
        expect(steps_shown(page)).to_have_count(9)
        server.do(lambda: server.scene.step(job, scenes.STEP_TOKENS, 0.9))
        expect(steps_shown(page)).to_have_count(10)
        expect(steps_shown(page).first.locator("th")).to_have_text("10")
        server.do(lambda: server.scene.step(job, scenes.STEP_TOKENS, 0.9))
        expect(steps_shown(page).first.locator("th")).to_have_text("11")
        page.get_by_role("button", name="Show all 11 steps").click()
        expect(steps_shown(page)).to_have_count(11)
        expect(page.get_by_role("progressbar", name="Prefill")).to_have_attribute("aria-valuenow", "180224")
        page.get_by_text("Generated text").click()
        server.do(lambda: server.scene.change(job, JobState.HANDING_OFF, decode_worker="decode-0"))
        server.do(lambda: server.scene.change(job, JobState.GENERATING))
        server.do(lambda: server.scene.token(job, "<b>one</b>"))
        expect(page.locator("#job pre")).to_have_text("<b>one</b>")
        expect(page.locator("#live")).to_have_text(f"Job {job} is generating")
        assert wide.errors == []
    expect(page.locator("#banner")).to_contain_text("Connection lost")
    expect(page.locator("#service-state")).to_have_text("connection lost")
    server.scene.change(job, JobState.QUEUED)
    server.scene.change(job, JobState.PREFILLING)
    server.scene.step(job, scenes.STEP_TOKENS, 0.9)
    wide.requests.clear()
    with SceneServer(server.scene, port=server.port) as again:
        expect(page.locator("#banner")).to_be_hidden()
        expect(steps_shown(page)).to_have_count(12)
        taken_up = [request for request in wide.requests if request.url.endswith("/events")]
        assert any(request.headers.get("last-event-id") == "16" for request in taken_up)
        again.do(lambda: again.scene.change(job, JobState.FAILED, reason="its group was lost"))
        expect(page.locator("#job .refusal")).to_have_text("its group was lost")
        expect(steps_shown(page)).to_have_count(12)


def test_a_controller_that_is_away(wide: Watched, tmp_path: Path) -> None:
    with SceneServer(scenes.idle(tmp_path)) as server:
        server.patience(0.05)
        wide.page.goto(server.url)
        expect(wide.page.locator("#service-state")).to_have_text("ready")
        server.scene.is_away = True
        expect(wide.page.locator("#banner")).to_contain_text("Connection lost")
        server.scene.is_away = False
        expect(wide.page.locator("#banner")).to_be_hidden()


def test_data_stays_text(wide: Watched, tmp_path: Path) -> None:
    page = wide.page
    scene = scenes.failed(tmp_path)
    view = job_view(HOSTILE, 4096, tenant=HOSTILE, group=HOSTILE, decode_worker=HOSTILE)
    scene.add(view)
    scene.step(HOSTILE, 64, 0.5)
    scene.token(HOSTILE, HOSTILE)
    scene.change(HOSTILE, JobState.FAILED, reason=HOSTILE, report={"comm": {HOSTILE: {"calls": 1, "bytes": 2}}})
    scene.nodes.append({"name": HOSTILE, "is_alive": False, "resources": {HOSTILE: 1.0}})
    with SceneServer(scene, trace=False) as server:
        page.goto(server.url)
        row = page.locator("#jobs tbody tr").first
        expect(row.locator(".reason")).to_have_text(HOSTILE)
        expect(page.locator("#nodes tbody tr").last.locator("th")).to_have_text(HOSTILE)
        row.locator("a").click()
        expect(page.locator("#job h2")).to_have_text(HOSTILE)
        expect(page.locator("#job .refusal").first).to_contain_text("there is no")
        page.locator("#find-job").evaluate("element => { location.hash = '#/' }")
        expect(page.locator("#jobs tbody tr").first).to_be_visible()
        assert page.locator("img, iframe").count() == 0
        assert page.evaluate("window.hacked") is None
        server.do(lambda: _rename(scene, HOSTILE, "job-1"))
        show_job(page, server.url, "job-1")
        expect(page.locator("#job .refusal").first).to_have_text(HOSTILE)
        expect(page.locator('#job section[aria-label="Sent between ranks"] th').last).to_have_text(HOSTILE)
        page.get_by_text("Generated text").click()
        expect(page.locator("#job pre")).to_have_text(HOSTILE)
        assert page.locator("img, iframe").count() == 0
        assert page.evaluate("window.hacked") is None


def _rename(scene: SceneController, old: str, new: str) -> None:
    from dataclasses import replace

    job = scene.jobs.pop(old)
    job.view = replace(job.view, id=new)
    scene.jobs[new] = job


def test_keys(chromium: Browser, tmp_path: Path) -> None:
    keys = [
        ApiKey(tenant=tenant, sha256=hashlib.sha256(value.encode()).hexdigest(), operator=tenant == "root")
        for tenant, value in KEYS.items()
    ]
    with SceneServer(scenes.running(tmp_path), keys=keys) as server:
        for tenant, value in KEYS.items():
            with browsers.page(chromium, "narrow", "dark") as page:
                watched = Watched(page)
                page.goto(server.url)
                field = page.get_by_label("Key", exact=True)
                expect(field).to_be_focused()
                field.fill("wrong")
                page.keyboard.press("Enter")
                expect(page.locator("#key-error")).to_contain_text("not known")
                field.fill(value)
                page.keyboard.press("Enter")
                expect(page.locator("#key-dialog")).to_be_hidden()
                expect(page.locator("#jobs tbody tr").first).to_be_visible()
                is_operator = tenant == "root"
                expect(page.locator("#groups-section")).to_be_visible(visible=is_operator)
                expect(page.locator("#jobs tbody tr")).to_have_count(7 if is_operator else 4)
                page.reload()
                expect(page.locator("#jobs tbody tr").first).to_be_visible()
                assert page.evaluate("localStorage.length + document.cookie.length") == 0
                assert all(value not in request.url for request in watched.requests)
                page.get_by_role("button", name="API key").click()
                page.get_by_role("button", name="Forget the key").click()
                expect(field).to_be_focused()
                assert page.evaluate("sessionStorage.length") == 0
                assert watched.errors == []


def test_the_timeline_of_ranks(wide: Watched, tmp_path: Path) -> None:
    page = wide.page
    with SceneServer(scenes.idle(tmp_path)) as server:
        show_job(page, server.url, scenes.DONE_JOB)
        expect(page.locator(".legend li")).to_have_text(["phase", "step", "layer", "kernel", "collective", "wait"])
        canvas = page.locator("canvas")
        expect(canvas).to_have_attribute("aria-label", re.compile(r"Timeline of 17\.\d s: 3 rows, 780 spans"))
        size = canvas.evaluate("it => [it.clientWidth, it.clientHeight, it.parentElement.scrollHeight]")
        assert size[1] == size[2] == 20 + (2 * 15 + 10) + 2 * (4 * 15 + 10), "every lane has its place"
        canvas.focus()
        page.keyboard.press("+")
        expect(page.locator(".timeline-words")).to_contain_text(" to ")
        blank = (
            "element => element.getContext('2d').getImageData(0, 0, element.width, element.height).data.some(Boolean)"
        )
        assert canvas.evaluate(blank), "something was drawn"
        page.get_by_role("button", name="Save as Chrome trace").wait_for()
        with page.expect_download() as saved:
            page.get_by_role("button", name="Save as Chrome trace").click()
        assert saved.value.suggested_filename == f"{scenes.DONE_JOB}.trace.json"
    assert wide.errors == []
