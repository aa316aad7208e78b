from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from manage.samples import flip, step_folder
from services.seaweed import S3Service
from typer.testing import CliRunner, Result

import ucpstore
from ucpstore.cli import exits
from ucpstore.cli.app import app
from ucpstore.errors import StorageError
from ucpstore.format.documents import group, marked
from ucpstore.format.layout import commit_key, step_path
from ucpstore.format.record import CommitRecord


def run(*arguments: object, env: Mapping[str, str] | None = None) -> Result:
    """One command, in this process."""
    return CliRunner().invoke(app, [str(each) for each in arguments], env=env)


def process(*arguments: object, **more: object) -> subprocess.CompletedProcess[str]:
    """One command as a user starts it."""
    command = [sys.executable, "-m", "ucpstore", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **more)  # type: ignore[call-overload, no-any-return]


def one_line(result: Result, start: str) -> None:
    """Nothing on stdout, one clear line on stderr."""
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith(f"ucpstore: {start}"), result.stderr


# ---- ls ------------------------------------------------------------------------------------------


def test_ls(made: Path) -> None:
    done = run("ls", made)
    assert (done.exit_code, done.stderr) == (0, "")
    head, first, second = done.stdout.splitlines()
    assert head.split() == [
        "step",
        "created",
        "(UTC)",
        "ranks",
        "arrays",
        "bytes",
        "generation",
        "metadata",
    ]
    assert first.split()[0] == "100"
    assert re.search(r"  20\d\d(-\d\d){2} (\d\d:){2}\d\d  +1  +16  +2\.3 MiB  +1  ", first)
    assert first.endswith('  {"loss":0.5}')
    assert second.endswith('2  {"loss":0.25,"run":"a"}')


def test_ls_json(made: Path) -> None:
    done = run("ls", made, "--json")
    found = json.loads(done.stdout)
    assert (found["url"], found["unreadable"], found["unfinished"]) == (str(made), [], [])
    assert [(each["step"], each["generation"]) for each in found["steps"]] == [(100, 1), (200, 2)]
    assert found["steps"][0]["path"] == f"steps/{step_folder(made, 100).name}"
    assert found["steps"][1]["metadata"] == {"loss": 0.25, "run": "a"}


def test_ls_shows_unfinished_saves_apart(store: Path) -> None:
    (store / step_path(300, "a" * 12)).mkdir()
    page = run("ls", store).stdout
    assert page.splitlines()[4:] == [
        "unfinished, so never loaded:",
        "  step  state    age  host  process  save",
        "  300   no mark  -    -           -  aaaaaaaaaaaa",
    ]
    (left,) = json.loads(run("ls", store, "--json").stdout)["unfinished"]
    assert left == {
        "step": 300,
        "save_id": "a" * 12,
        "state": "no mark",
        "age_s": None,
        "host": None,
        "pid": None,
    }


def test_ls_of_unreadable_records(store: Path) -> None:
    path = store / commit_key(200, 2)
    record = CommitRecord.from_bytes(path.read_bytes(), commit_key(200, 2))
    path.write_bytes(replace(record, format_version=2).to_bytes())
    done = run("ls", store)
    assert done.exit_code == 5
    assert "format version 2" in done.stdout
    flip(store / commit_key(100), 60)
    done = run("ls", store)
    assert done.exit_code == 1
    assert (
        "committed, but unreadable:\n  100: commits/0000000100/zarr.json is damaged" in done.stdout
    )


# ---- show ----------------------------------------------------------------------------------------


def test_show(made: Path) -> None:
    done = run("show", made)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("step 200, generation 2, saved 20")
    assert lines[1].endswith(f"in {step_folder(made, 200)}")
    assert lines[2] == 'metadata {"loss":0.25,"run":"a"}'
    cells = [re.split(r"  +", line.strip()) for line in lines[4:]]
    assert ["model/"] in cells
    assert ["0.weight", "float32", "16 x 24", "chunks 16 x 24", "1.5 KiB"] in cells
    assert ["table", "float32", "600 x 1000", "chunks 600 x 500", "2.3 MiB"] in cells
    assert ["step", "tensor(1.0, float32), for each of 4"] in cells
    assert ["milestones", "[10, 20]"] in cells
    assert "  exp_avg/" in lines


def test_show_a_match(made: Path) -> None:
    page = run("show", made, 100, "--match", "optim/exp_avg/*.bias").stdout
    assert [line.split()[0] for line in page.splitlines()[4:]] == [
        "optim/",
        "exp_avg/",
        "0.bias",
        "1.bias",
    ]
    done = run("show", made, 100, "--match", "nothing")
    assert done.exit_code == 3
    one_line(done, f"step 100 of {made} holds nothing that matches 'nothing'")


def test_show_path_is_a_plain_zarr_group(made: Path) -> None:
    import zarr

    done = run("show", made, 100, "--path")
    assert done.stdout == f"{step_folder(made, 100)}\n"
    model = zarr.open_group(done.stdout.strip(), mode="r")["model"]
    assert isinstance(model, zarr.Group)
    assert sorted(model.array_keys()) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_show_json(made: Path) -> None:
    found = json.loads(run("show", made, 100, "--json").stdout)
    assert (found["step"], found["url"]) == (100, str(step_folder(made, 100)))
    assert (found["record"]["generation"], found["record"]["arrays"]) == (1, 16)
    arrays = {each["name"]: each for each in found["arrays"]}
    assert arrays["large/table"]["shape"] == [600, 1000]
    assert arrays["large/table"]["chunk"] == [600, 500]
    assert {"name": "scheduler/last_epoch", "value": 7, "count": 1} in found["values"]


def test_show_path_goes_alone(made: Path) -> None:
    done = run("show", made, "--path", "--json")
    assert done.exit_code == 2
    one_line(done, "Invalid value: --path prints nothing but the path")


# ---- verify --------------------------------------------------------------------------------------


def test_verify(made: Path) -> None:
    done = run("verify", made)
    assert (done.exit_code, done.stderr) == (0, "")
    assert re.fullmatch(
        r"no problem in 2 steps, \d+ documents, 32 arrays, 32 objects "
        r"\([\d.]+ MiB by presence and size; --data reads them\)\n",
        done.stdout,
    )
    done = run("verify", made, 100, "--data")
    assert re.search(r"in 1 step, .* MiB read in [\d.]+ s\)\n$", done.stdout)


def test_verify_finds_damage(store: Path) -> None:
    flip(step_folder(store, 100) / "large/table/c.0.0", 9)
    assert run("verify", store).exit_code == 0
    done = run("verify", store, "--data")
    assert done.exit_code == 1
    problem, summary = done.stdout.splitlines()
    key = f"steps/{step_folder(store, 100).name}/large/table/c.0.0"
    assert problem.startswith(f"{key}: chunk 0 is damaged: its checksum is ")
    assert summary.startswith("1 problem in 2 steps")
    found = json.loads(run("verify", store, "--data", "--json").stdout)
    assert (found["ok"], found["steps"]) == (False, [100, 200])
    assert [each["key"] for each in found["problems"]] == [key]


def test_verify_prints_so_many_problems_and_counts_all(store: Path) -> None:
    for number in range(105):
        (step_folder(store, 100) / f"stranger{number:03}").write_bytes(b"")
    lines = run("verify", store).stdout.splitlines()
    assert lines[100] == "... and 5 more; --json lists all"
    assert lines[101].startswith("105 problems in 2 steps")
    assert len(json.loads(run("verify", store, "--json").stdout)["problems"]) == 105


def test_verify_what_is_too_new(store: Path) -> None:
    path = store / commit_key(100)
    record = CommitRecord.from_bytes(path.read_bytes(), commit_key(100))
    path.write_bytes(replace(record, features=("time-travel",)).to_bytes())
    done = run("verify", store)
    assert done.exit_code == 5
    assert done.stdout.startswith(f"{commit_key(100)}: not checked: needs time-travel")
    done = run("verify", store, 100)
    assert done.exit_code == 5
    one_line(done, f"{commit_key(100)} needs time-travel")


# ---- failures ------------------------------------------------------------------------------------


def test_no_store_and_no_step(made: Path, tmp_path: Path) -> None:
    for command in ("ls", "show", "verify"):
        done = run(command, tmp_path / "nothing")
        assert done.exit_code == 3
        one_line(done, f"there is no checkpoint store at {tmp_path / 'nothing'}")
    for command in ("show", "verify"):
        done = run(command, made, 150)
        assert done.exit_code == 3
        one_line(done, f"step 150 is not in {made}; committed are 100, 200")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_the_wrong_folder(made: Path, tmp_path: Path, command: str) -> None:
    for place in (made / "commits", step_folder(made, 100), step_folder(made, 100) / "model"):
        done = run(command, place)
        assert done.exit_code == 3
        one_line(done, f"{place} lies inside a store; give the folder above")
    (tmp_path / "zarr.json").write_bytes(group(b'{"title":"weather"}'))
    done = run(command, tmp_path)
    assert done.exit_code == 3
    one_line(done, f"{tmp_path} is a Zarr node, but not a checkpoint store")


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (["ls"], "Missing argument"),
        (["ls", "x", "--jsn"], "No such option: --jsn"),
        (["list", "x"], "No such command 'list'"),
        (["show", "x", "first"], "a step is a whole number >= 0, but STEP is 'first'\n"),
        (["show", "x", "-12"], "a step is a whole number >= 0, but STEP is '-12'\n"),
        (["verify", "x", "-1", "--data"], "a step is a whole number >= 0, but STEP is '-1'\n"),
        (["show", "x", "--", "-1"], "a step is a whole number >= 0, but STEP is '-1'\n"),
        (["show", "x", "1.5"], "a step is a whole number >= 0, but STEP is '1.5'\n"),
        (["show", "x", "9" * 20], "step must be from 0 to"),
        (["show", "x", "9" * 5000], "step must be from 0 to"),
        (["show", "x", "x" * 50], f"a step is a whole number >= 0, but STEP is '{'x' * 37}...'\n"),
        (["show", "x", "-v"], "No such option: -v"),
        (["ls", "x", "-1"], "No such option: -1"),
        (["ls", "gsx://bucket"], "'gsx://bucket': scheme 'gsx' is not known"),
        (["ls", "s3:/bucket"], "'s3:/bucket' looks like a URL that lost a slash"),
        (["ls", "x", "--endpoint-url", "http://h"], "'x' takes no storage options"),
        (["ls", "s3://b/p", "--storage-option", "keyy=1"], "unknown storage option 'keyy'"),
        (["ls", "s3://b/p", "--storage-option", "secret"], "a --storage-option must be KEY=VALUE"),
        (["ls", "s3://b/p", "--endpoint-url", "host"], "endpoint 'host' must start with http"),
    ],
)
def test_wrong_usage(arguments: list[str], start: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    one_line(done, start)


def test_a_store_of_another_layout(tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_bytes(marked("store", layout=9))
    for command in ("ls", "show", "verify"):
        done = run(command, tmp_path)
        assert done.exit_code == 5
        one_line(done, "zarr.json marks a store of layout 9")


def test_an_object_store_that_does_not_answer() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = run(
        *("ls", "s3://bucket/run", "--endpoint-url", f"http://127.0.0.1:{port}"),
        *("--storage-option", "key=k", "--storage-option", "secret=very-hidden"),
        *("--storage-option", "client_kwargs.region_name=eu-west-1"),
    )
    assert done.exit_code == 4
    one_line(done, "cannot read s3://bucket/run")
    assert "very-hidden" not in done.output


def test_storage_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[object, object]] = []

    def refuse(url: object, options: object) -> None:
        given.append((url, options))
        raise StorageError("enough")

    monkeypatch.setattr("ucpstore.storage.open_storage", refuse)
    done = run(
        *("ls", "s3://b/p", "--endpoint-url", "http://h", "--storage-option", "anon=True"),
        *("--storage-option", "key=a=b", "--storage-option", "client_kwargs.region_name=x"),
    )
    assert done.exit_code == 4
    expected = {
        "anon": True,
        "key": "a=b",
        "client_kwargs": {"region_name": "x"},
        "endpoint_url": "http://h",
    }
    assert given == [("s3://b/p", expected)]


def test_what_nobody_expected(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr("ucpstore.manage.listing.list_store", fail)
    done = run("ls", made)
    assert done.exit_code == 70
    one_line(done, "unexpected KeyError: 'lost'; this is a bug of ucpstore")
    done = run("ls", made, env={"UCPSTORE_DEBUG": "1"})
    assert done.exit_code == 70
    assert "Traceback (most recent call last)" in done.stderr


def test_an_interrupt(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ucpstore.manage.listing.list_store", interrupt)
    done = run("ls", made)
    assert done.exit_code == 130
    one_line(done, "interrupted")


# ---- a bucket ------------------------------------------------------------------------------------


def test_a_bucket(s3: S3Service, s3_bucket: str) -> None:
    url = f"s3://{s3_bucket}/run"
    state = {"model": torch.nn.Linear(4, 3), "table": torch.zeros(600, 1000)}
    ucpstore.save(url, state, step=5, storage_options=s3.options())
    key, secret = s3.identities["reader"]  # what only reads needs no right to write
    where = ("--endpoint-url", s3.endpoint, "--storage-option", f"key={key}")
    where += ("--storage-option", f"secret={secret}")
    assert [e["step"] for e in json.loads(run("ls", url, "--json", *where).stdout)["steps"]] == [5]
    assert "600 x 1000" in run("show", url, *where).stdout
    assert run("show", url, "--path", *where).stdout.startswith(f"{url}/steps/0000000005-")
    done = run("verify", url, "--data", *where)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("no problem in 1 step, ")
    done = run("ls", "s3://there-is-no-such-bucket/run", *where)
    assert done.exit_code == 4
    one_line(done, "cannot ")
    done = run("ls", url, *where[:-1], "secret=wrong")
    assert done.exit_code == 4
    one_line(done, "cannot read")


# ---- as a process --------------------------------------------------------------------------------


def test_version_and_help() -> None:
    assert run("--version").stdout == f"ucpstore {ucpstore.__version__}\n"
    assert run("--help").stdout == run().stdout
    assert re.findall(r"^  (ls|show|verify) ", run().stdout, re.M) == ["ls", "show", "verify"]
    for command in ("ls", "show", "verify"):
        assert run(command, "-h").exit_code == 0
    told = re.findall(r"\b\d+\b", " ".join(run().stdout.split()).partition("Exit codes: ")[2])
    codes = {value for name, value in vars(exits).items() if name.isupper()}
    assert {int(each) for each in told} == {each for each in codes if isinstance(each, int)}


def test_the_process(made: Path) -> None:
    done = process("ls", made, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["steps"]) == 2
    assert process("show", made, "0" * 5000 + "100").returncode == 0
    done = process("show", made, 7)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"ucpstore: step 7 is not in {made}; committed are 100, 200\n"
    assert process("ls", made, "--foo").returncode == 2


def test_no_command_imports_torch(made: Path) -> None:
    code = (
        "import sys\n"
        "from ucpstore.cli import main\n"
        "for arguments in (['ls'], ['show'], ['verify', '--data']):\n"
        "    sys.argv = ['ucpstore', *arguments, sys.argv[-1]]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as done:\n"
        "        assert done.code == 0, done.code\n"
        "print(sorted({'torch', 'zarr', 'obstore', 'rich'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_a_reader_that_stops_reading(made: Path) -> None:
    command = [sys.executable, "-m", "ucpstore", "show", str(made)]
    read, write = os.pipe()
    os.close(read)
    with subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, text=True) as shown:
        os.close(write)
        _, errors = shown.communicate(timeout=60)
    assert (shown.returncode, errors) == (141, "")


def test_interrupted_while_it_reads(made: Path) -> None:
    code = (
        "import os, time\n"
        "from ucpstore.storage import local\n"
        "def slow(*_):\n"
        "    os.write(1, b'reading\\n')\n"
        "    time.sleep(1)\n"
        "local._fill = slow\n"
        "from ucpstore.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "verify", "--data", str(made)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as reading:
        assert reading.stdout is not None
        assert reading.stdout.readline() == "reading\n"
        started = time.monotonic()
        reading.send_signal(signal.SIGINT)
        _, errors = reading.communicate(timeout=60)
    assert (reading.returncode, errors) == (130, "ucpstore: interrupted\n")
    assert time.monotonic() - started < 10  # 32 objects in turns of 8 would take longer
