"""``trace``: import, make up, describe and cut workloads, and what is refused."""

import gzip
import json

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.cli import tracing
from fabrictool.workload.formats import read


def test_generate_import_export_and_stats(command, folder):
    recipe = "gamma,rate=4,cv=3,input=lognormal:900:700:10:4000,output=200,models=5"
    code, out, _ = command("trace", "generate", recipe, "--requests", 500, "--seed", 2)
    assert code == 0
    assert command("trace", "generate", recipe, "--requests", 500, "--seed", 2, "-o", "made.jsonl")[0] == 0
    assert (folder / "made.jsonl").read_text() == out
    trace = read(out)
    assert len(trace) == 500
    assert set(trace.output.tolist()) == {200}
    assert trace.prompt.min() >= 10

    (folder / "made.jsonl.gz").write_bytes(gzip.compress(out.encode()))
    code, out, _ = command("trace", "stats", "made.jsonl.gz", "--json")
    described = json.loads(out)
    assert (code, described["requests"], next(iter(described["popularity"]))) == (0, 500, "model-0")
    code, out, _ = command("trace", "stats", "made.jsonl")
    assert (code, "500 in" in out, "5: model-0" in out) == (0, True, True)

    code, out, _ = command("trace", "export", "made.jsonl", "--model", "model-1", "--start", 5, "--end", 40)
    piece = read(out)
    assert code == 0
    assert 0 < len(piece) < 500
    assert piece.span <= 35
    assert piece.models == ("model-1",)


@pytest.mark.parametrize(
    ("workload", "exit_code", "problem"),
    [
        ("sometimes", 64, "FT9001"),
        ("poisson,rate", 64, "FT9001"),
        ("poisson,rate=fast", 64, "FT9001"),
        ("poisson,models=nan", 64, "FT9001"),
        ("poisson,models=-1", 64, "FT9001"),
        ("poisson,models=inf", 64, "FT9001"),
        ("poisson,input=a:b", 64, "FT9001"),
        ("poisson,input=normal:9:9:1:inf", 64, "FT9001"),
        ("poisson,input=normal:9:9:1:nan", 64, "FT9001"),
        ("poisson,input=nan", 65, "FT2203"),
        ("poisson,output=empirical:9", 65, "FT2203"),
        ("poisson,rate=nan", 65, "FT2202"),
        ("gamma,cv=0", 65, "FT2202"),
        ("bursts,on=0", 65, "FT2202"),
        ("poisson,models=3,rate=0", 65, "FT2202"),
    ],
)
def test_mistakes_with_a_workload(workload, exit_code, problem):
    with pytest.raises(FabrictoolError) as caught:
        tracing.generated(workload, 20, 0)
    assert (caught.value.exit_code, caught.value.problems[0].code) == (exit_code, problem)


def test_a_workload_that_cannot_be_made_writes_nothing(command):
    code, out, err = command("trace", "generate", "sometimes", "--requests", 20)
    assert (code, out, "FT9001" in err) == (64, "", True)


def test_import_counts_what_it_drops(command, folder):
    (folder / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50,x,109\nnever,396,109\n2023-11-16 18:15:51.5,879,55\n"
    )
    code, _, err = command("trace", "import", "azure.csv", "-o", "own.jsonl")
    assert code == 0
    assert "2 requests over 5 s; dropped: 1 no time, 1 no token count" in err
    assert read((folder / "own.jsonl").read_text()).prompt.tolist() == [374, 879]


def clients(folder, count):
    """A ServeGen folder; every third client is broken."""
    for number in range(count):
        rows = "".join(f"{600 * i},0.5,2.0,Gamma,0.25,8.0\n" for i in range(12))
        lengths = {"input_tokens": "{100: 0.5, 300: 0.5}", "output_tokens": "{20: 1.0}"}
        folder.mkdir(exist_ok=True)
        (folder / f"chunk-{number}-trace.csv").write_text("broken\n" if number % 3 == 2 else rows)
        (folder / f"chunk-{number}-dataset.json").write_text(json.dumps({"0": lengths}))


def test_clients_of_a_folder_are_drawn_from(command, folder):
    clients(folder / "servegen", 9)
    code, _, err = command("trace", "import", "servegen", "-o", "drawn.jsonl", "--seed", 6)
    assert code == 0
    assert "dropped: 3 clients with a broken trace" in err
    text = (folder / "drawn.jsonl").read_text()
    assert command("trace", "import", "servegen", "--seed", 6)[1] == text
    assert command("trace", "import", "servegen", "--seed", 7)[1] != text
    # Six clients with 0.5 req/s for two hours; three standard deviations of a cv of 2.
    assert len(read(text)) == pytest.approx(21600, abs=3 * 2 * 21600**0.5)
    hour = read(command("trace", "import", "servegen", "--hours", "0.5:1.5", "--rate", 1)[1])
    assert len(hour) == pytest.approx(3600, rel=0.1)
    assert hour.span < 3600


@pytest.mark.parametrize(
    ("arguments", "exit_code", "problem"),
    [
        (["servegen", "--hours", "2"], 64, "FT9001"),
        (["servegen", "--hours", "2:1"], 64, "FT9001"),
        (["servegen", "--hours", "nan:1"], 64, "FT9001"),
        (["servegen", "--hours", "0:inf"], 64, "FT9001"),
        (["servegen", "--hours", "a:b"], 64, "FT9001"),
        (["servegen", "--hours", "9:10"], 65, "FT2204"),
        (["servegen", "--rate", "nan"], 65, "FT2202"),
        (["servegen", "--rate", "1e6"], 65, "FT2204"),
        (["servegen", "--seed", "-1"], 64, "FT9001"),
        (["empty"], 65, "FT2204"),
        (["blueprint.yaml", "--hours", "1:2"], 64, "FT9001"),
    ],
)
def test_mistakes_with_a_folder_of_clients(command, folder, arguments, exit_code, problem):
    clients(folder / "servegen", 2)
    (folder / "empty").mkdir()
    code, _, err = command("trace", "import", *arguments)
    assert (code, problem in err) == (exit_code, True), err


@pytest.mark.parametrize(
    ("content", "exit_code", "problem"),
    [
        (b"\x1f\x8bgarbage", 1, "FT4302"),
        (gzip.compress(b"t,in,out\n" * 99)[:-12], 1, "FT4302"),
        (gzip.compress(b"t,in,out\n")[:10] + b"\xff\xff\xff\xff\xff\xff\xff\xff", 1, "FT4302"),
        (b"\xff\xfe\x00\x01", 65, "FT2201"),
        (b"", 65, "FT2201"),
    ],
)
def test_a_file_that_is_no_trace(command, folder, content, exit_code, problem):
    (folder / "trace").write_bytes(content)
    for verb in ("import", "stats", "export"):
        code, _, err = command("trace", verb, "trace")
        assert (code, problem in err) == (exit_code, True), err


def test_a_piece_with_nothing_in_it(command, folder):
    (folder / "t.csv").write_text("t,in,out\n0,1,1\n1,1,1\n")
    for piece in (["--model", "nobody"], ["--start", "9"], ["--end", "-1"], ["--end", "nan"]):
        code, _, err = command("trace", "export", "t.csv", *piece)
        assert (code, "FT2201" in err) == (65, True), piece
