"""`mesh …`, `status --url` and `top` on an agent, on documents that a server shows."""

import http.server
import json
import threading
from contextlib import contextmanager, nullcontext

import msgspec
import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.cli import mesh_asking
from fabrictool.cli.live import LiveStatus
from fabrictool.cli.main import main
from fabrictool.cli.mesh_asking import LiveFleet, ReachedUnit
from fabrictool.cli.mesh_text import fitting_table, member_lines, path_lines
from fabrictool.cli.mesh_watching import changes, unheard
from fabrictool.status.client import StatusUnavailableError
from fabrictool.status.documents import AgentStatus, EngineStatus, encode
from fabrictool.status.fleet import FleetStatus, RecordRow, RecordsStatus
from tests.answers import check_answer
from tests.status_views import AGENT, HUB, NOW, OTHER, accusation, engine, fleet, member


def agent_status():
    return AgentStatus(
        release="0", at=NOW, started_at=NOW, fabric="swiss-ai", provider="p", site="s", cluster="one", node="n1",
        replica="llama/0", model="llama", session=AGENT, lifecycle="SERVING", accepting=True, in_flight=0,
        ends_at=None, certificate_ends_at=NOW, engine=EngineStatus(engine="vllm", state="ready"), links=[HUB],
        dial_errors={}, registry_root="00",
    )  # fmt: skip


def record(key, kind, about, owner=AGENT):
    return RecordRow(
        key=key, record=kind, owner=owner, provider="alpha", about=about, lifecycle="SERVING", version=2,
        not_after=NOW, octets=1000, hash="00",
    )  # fmt: skip


RECORDS = RecordsStatus(
    release="0", at=NOW, fabric="swiss-ai", session=AGENT, role="agent", root="00" * 8,
    rows=[record(AGENT, "node", "one/n1"), record(AGENT + "ee" * 16, "service", "llama/0"),
          record(HUB + "00" + OTHER, "witness", OTHER, owner=HUB)],
)  # fmt: skip


@contextmanager
def serving(pages):
    """A server that answers with `pages`: path → status and body, or a function of these."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            page = pages.get(self.path, (404, b"404: Not Found"))
            status, body = page() if callable(page) else page
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def agent_pages(**changes):
    return {
        "/status": (200, encode(agent_status())),
        "/fleet": (200, msgspec.json.encode(fleet(**changes))),
        "/records": (200, msgspec.json.encode(RECORDS)),
    }


@pytest.fixture
def url():
    with serving(agent_pages()) as address:
        yield address


def shown(capsys, *arguments, code=0):
    assert main([*arguments]) == code
    out = capsys.readouterr().out
    check_answer(arguments, out)
    return out


def test_members_say_who_is_suspected_by_whom_and_why(url, capsys):
    out = shown(capsys, "mesh", "members", "--url", url)
    assert f"as the agent {AGENT[:8]} sees it" in out
    own, other = (next(line for line in out.splitlines() if line.startswith(s[:8])) for s in (AGENT, OTHER))
    assert own.split()[4:8] == ["serving", "itself", "llama/0", "vllm"]
    assert "4×gh200 384GiB" in own
    assert other.split()[4:6] == ["suspected", "–"], "an agent lacks no link to another"
    assert f"! {OTHER[:8]} (two/n1): {HUB[:8]} (alpha) suspects it: its end closed the tunnel, another hub lost" in out
    assert "fabrictool reconcile" in out


def test_members_are_chosen_by_model_and_provider_and_those_that_left_are_counted(capsys):
    left = member("11" * 16, provider="beta", state="left", lifecycle="LEFT")
    with serving(agent_pages(members=[*fleet().members, left])) as url:
        everything = shown(capsys, "mesh", "members", "--url", url, "--all")
        assert "11111111" in everything
        assert "not shown" not in everything
        out = shown(capsys, "mesh", "members", "--url", url, "--provider", "beta")
        assert AGENT[:8] not in out.partition("\n\n")[2]
        assert OTHER[:8] in out
        assert "1 whose session is over is not shown" in out
        document = json.loads(shown(capsys, "mesh", "members", "--url", url, "--model", "llama", "--json"))
        assert [m["session"] for m in document["document"]["members"]] == [AGENT, OTHER]


def test_documents_come_back_from_json_as_they_were(url, capsys):
    printed = json.loads(shown(capsys, "mesh", "members", "--url", f"{url}/status", "--json"))
    assert (printed["format_version"], printed["type"]) == ("1.0", "fleet")
    assert msgspec.convert(printed["document"], FleetStatus) == fleet()
    printed = json.loads(shown(capsys, "mesh", "records", "--url", url, "--json"))
    assert msgspec.convert(printed["document"], RecordsStatus) == RECORDS


def test_paths_say_what_failed_and_what_is_in_use(url, capsys):
    lines = shown(capsys, "mesh", "paths", "--url", url).splitlines()
    assert next(line for line in lines if line.startswith(HUB[:8])).split()[4:] == [
        "up", "h:1", "proxy", "2.0", "KiB", "0.4", "s", "ago",
    ]  # fmt: skip
    assert "~ h:1: direct does not lead there: no answer within 5 s" in lines
    assert "! h:2: connection refused" in lines
    assert not any("refused 0 records" in line for line in lines)
    assert "it refused records (7)" in path_lines(fleet(refused_records=7), NOW)[-1]


def test_records_by_the_beginning_of_a_key_or_what_they_are_about(url, capsys):
    out = shown(capsys, "mesh", "records", "--url", url)
    assert out.splitlines()[-1] == "all of them: 2.9 KiB"
    out = shown(capsys, "mesh", "records", "llama/0", "--url", url)
    assert f"{AGENT[:8]}…eeeeeeee" in out
    assert out.splitlines()[-1] == "1 of them: 1000 B"
    assert main(["mesh", "records", "nothing", "--url", url]) == 64
    assert "FT9009" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "exit_code", "code"),
    [
        ((404, b"no"), 1, "FT5203"),  # an earlier release
        ((401, b"{}"), 1, "FT5203"),  # a gateway's client address
        ((200, b"<html>"), 69, "FT5201"),
        ((200, b'{"kind": "agent"}'), 69, "FT5201"),
        ((500, b"oh"), 69, "FT5201"),
    ],
)
def test_what_shows_no_fleet_is_told_with_a_code(page, exit_code, code, capsys):
    with serving({"/fleet": page}) as url:
        for command in (["members"], ["paths"], ["observe"]):
            assert main(["mesh", *command, "--url", url]) == exit_code
            assert code in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://h", "http://[", "nonsense"])
def test_a_wrong_url_is_told_with_a_code(url, capsys):
    assert main(["mesh", "members", "--url", url]) == 69
    assert "FT5201" in capsys.readouterr().err


def test_convergence_of_those_that_agree_and_of_those_that_cannot_be_asked(url, capsys):
    out = shown(capsys, "mesh", "convergence", "--url", url, "--url", f"{url}/status", "--url", "http://127.0.0.1:1")
    assert out.startswith("All 2 that answer hold the same records\n")
    assert "? http://127.0.0.1:1: no status" in out
    assert shown(capsys, "mesh", "convergence", "--url", url).startswith("Only one answers")
    assert main(["mesh", "convergence", "--url", "http://127.0.0.1:1"]) == 69
    assert "FT5204" in capsys.readouterr().err


def test_convergence_asks_again_before_it_says_that_they_differ(url, capsys, monkeypatch):
    monkeypatch.setattr(mesh_asking, "AGAIN_S", 0.0)
    answers = []

    def late():
        answers.append(0)
        return 200, msgspec.json.encode(fleet(root="ff" * 8) if len(answers) == 1 else fleet())

    with serving({"/fleet": late}) as slow:
        out = shown(capsys, "mesh", "convergence", "--url", url, "--url", slow)
        assert "All 2 that answer hold the same records now; at a first look they did not" in out
    with serving(agent_pages(root="ff" * 8, records=5)) as odd:
        arguments = ["mesh", "convergence", "--url", url, "--url", f"{url}/status", "--url", odd]
        out = shown(capsys, *arguments, code=1)
        assert out.startswith("1 of 3 differ, in two looks")
        assert f"! {odd} differs" in out
        document = json.loads(shown(capsys, *arguments, "--json", code=1))
        assert (document["agreed"], document["differing"], document["looks"]) == (False, [odd], 2)


def test_status_of_an_agent_shows_the_fleet_below_its_own_line(url, capsys):
    out = shown(capsys, "status", "--url", url)
    assert out.startswith("llama/0 on one/n1: vllm ready")
    assert f"{HUB[:8]}  gateway" in out
    document = json.loads(shown(capsys, "status", "--url", url, "--json"))
    assert msgspec.convert(document["fleet"], FleetStatus) == fleet()
    with serving({"/status": (200, encode(agent_status()))}) as old:
        assert shown(capsys, "status", "--url", old).strip() == "llama/0 on one/n1: vllm ready"
        assert json.loads(shown(capsys, "status", "--url", old, "--json"))["fleet"] is None
        with LiveStatus(None, old, "") as ask:
            assert isinstance(ask(), AgentStatus)
    with LiveStatus(None, url, "") as ask:
        assert ask() == fleet()


def test_what_a_hub_knows_of_a_loss_is_told_with_its_age():
    lost = member(OTHER, state="lost", lost_at=NOW - 12, lost_how="silent")
    text = "\n".join(member_lines(fleet(session=HUB, role="gateway"), [lost], 0, NOW))
    assert f"! {OTHER[:8]} (one/n1): lost 12 s ago, nothing was heard for three beats" in text


def events(before, after):
    return [(event.kind, event.text) for event in changes(before, after)]


def test_what_changes_between_two_looks_is_told_as_events():
    hub, west, own, other = fleet().members
    calm = msgspec.structs.replace(other, state="serving", accusations=[])
    before = fleet(members=[hub, own, calm])
    assert events(before, before) == []
    assert events(before, fleet(members=[hub, own, other])) == [
        ("suspected", ""), ("accused", f"by {HUB[:8]} (alpha): closed, other-hub"),
    ]  # fmt: skip
    refuted = msgspec.structs.replace(calm, version=3, accusations=[accusation(stands=False)])
    assert [kind for kind, _ in events(fleet(members=[other]), fleet(members=[refuted]))] == ["serving", "refuted"]
    assert [kind for kind, _ in events(fleet(members=[refuted]), fleet(members=[calm]))] == ["withdrawn"]
    assert events(fleet(members=[hub]), fleet(members=[hub, west])) == [("joined", "gateway of beta")]
    assert [kind for kind, _ in events(fleet(members=[hub, west]), fleet(members=[hub]))] == ["forgotten"]
    draining = msgspec.structs.replace(own, services=[engine("llama/0", accepting=False)])
    assert events(fleet(members=[own]), fleet(members=[draining])) == [("service-draining", "llama/0 on one/n1")]
    unlinked = msgspec.structs.replace(hub, linked=False)
    assert events(fleet(members=[hub]), fleet(members=[unlinked])) == [("link-down", "")]
    assert events(fleet(members=[hub]), fleet(session=HUB, members=[unlinked])) == [], "another node's links"


def test_who_is_not_known_where_the_next_one_answers_is_neither_forgotten_nor_new():
    hub, west, *_ = fleet().members
    lively = msgspec.structs.replace(west, certificate_ends_at=NOW + 3600)
    ended = msgspec.structs.replace(west, certificate_ends_at=NOW - 3600)
    other = fleet(session=HUB, members=[hub])
    assert events(fleet(members=[hub, lively]), other) == []
    assert [kind for kind, _ in events(fleet(members=[hub, ended]), other)] == ["forgotten"]
    assert unheard(fleet(members=[hub, lively]), other) == {lively.session: lively}
    assert unheard(fleet(members=[hub, ended]), other) == {}
    told = fleet(session=HUB, members=[hub, lively])
    assert list(changes(other, told, {lively.session: lively})) == []
    down = msgspec.structs.replace(lively, state="down")
    (event,) = changes(other, fleet(session=HUB, members=[hub, down]), {lively.session: lively})
    assert event.kind == "down"


def test_observe_goes_on_at_another_node_with_what_the_former_one_knew(capsys, monkeypatch):
    lively = [msgspec.structs.replace(member, certificate_ends_at=NOW * 2) for member in fleet().members]
    views = [fleet(members=lively), *[fleet(session=HUB, members=lively[:3])] * 2, fleet(session=HUB, members=lively)]
    looks = []

    def next_look(_seconds):
        looks.append(0)
        if len(looks) == len(views):
            raise KeyboardInterrupt

    monkeypatch.setattr("fabrictool.cli.mesh_watching.time.sleep", next_look)
    with serving({"/fleet": lambda: (200, msgspec.json.encode(views[len(looks)]))}) as url:
        assert main(["mesh", "observe", "--url", url, "--json"]) == 130
    assert [json.loads(line)["type"] for line in capsys.readouterr().out.splitlines()] == ["version"]


def test_observe_prints_events_and_says_once_that_nobody_answers(capsys, monkeypatch):
    views = [fleet(), fleet(root="11" * 8), (500, b"oh"), (500, b"oh"), fleet(members=fleet().members[:3])]
    looks = []

    def answer():
        view = views[min(len(looks), len(views) - 1)]
        return view if isinstance(view, tuple) else (200, msgspec.json.encode(view))

    def next_look(_seconds):
        looks.append(0)
        if len(looks) == len(views):
            raise KeyboardInterrupt

    monkeypatch.setattr("fabrictool.cli.mesh_watching.time.sleep", next_look)
    with serving({"/fleet": answer}) as url:
        assert main(["mesh", "observe", "--url", url, "--json"]) == 130
    printed = capsys.readouterr()
    check_answer(["mesh", "observe", "--json"], printed.out)
    _, event = [json.loads(line) for line in printed.out.splitlines()]
    assert (event["kind"], event["subject"]) == ("forgotten", f"{OTHER[:8]} (two/n1)")
    assert printed.err.count("! no answer") == 1
    assert printed.err.count(f"the agent {AGENT[:8]} answers") == 1


def test_without_a_url_the_first_that_shows_the_mesh_is_asked_and_another_when_it_is_gone(url, monkeypatch):
    units = [ReachedUnit("gateway/east", "http://127.0.0.1:1"), ReachedUnit("gateway/west", ""),
             ReachedUnit("replica/llama/0", url)]  # fmt: skip
    monkeypatch.setattr(mesh_asking, "_reachable", lambda _source: nullcontext(units))
    with LiveFleet(None, "") as ask:
        assert ask() == fleet()
        assert ask.url == url
        with serving(agent_pages(session=HUB)) as other:
            units[2] = ReachedUnit("replica/llama/0", "http://127.0.0.1:1")
            ask._url = "http://127.0.0.1:1"  # it died
            with pytest.raises(StatusUnavailableError):
                ask()
            units.append(ReachedUnit("replica/llama/1", other))
            assert ask().session == HUB
    units[:] = [ReachedUnit("gateway/east", "")]
    with pytest.raises(FabrictoolError, match="FT5204"), LiveFleet(None, "") as ask:
        ask()


def test_a_narrow_terminal_does_without_some_columns_and_keeps_who_and_how():
    rows = [["aaaaaaaa", "serving", "itself", "a-replica/0"]]
    headings = ("SESSION", "STATE", "LINK", "REPLICA")
    assert fitting_table(headings, rows, None).split() == [*headings, *rows[0]]
    narrow = fitting_table(headings, rows, 34)
    assert narrow.split() == ["SESSION", "STATE", "REPLICA", "aaaaaaaa", "serving", "a-replica/0"]
    assert max(map(len, narrow.splitlines())) <= 34
