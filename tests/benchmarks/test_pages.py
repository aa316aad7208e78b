import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def script(name: str) -> ModuleType:
    """A script of the benchmarks folder, which is no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


grid_examples = script("grid_examples")
simulate = script("simulate")


def test_the_page_is_what_the_script_writes() -> None:
    written = grid_examples.PAGE.read_text()
    assert written == grid_examples.page(), "run python benchmarks/grid_examples.py"


@pytest.fixture(scope="module")
def job():
    model = simulate.Model("tiny", 4, 512, 256, 1024, 4000, tied=False)
    return simulate.Job(model, ranks=16, tensor=4, stages=2)


def test_a_small_simulation(job) -> None:
    text = simulate.page([job], simulate.CHOICES[:2])
    assert text.startswith("# Sizes")
    rows = [line for line in text.splitlines() if line.startswith("| 1 MiB")]
    assert len(rows) == 2
    assert job.title in text


def test_all_parameters_are_counted(job) -> None:
    count = 2 * 4000 * 512 + 4 * (2 * 512 * 512 + 2 * 256 * 512 + 3 * 1024 * 512 + 2 * 512) + 512
    summary = simulate.summarize(
        simulate.plan_save(job.arrays(), job.ranks, simulate.Options()), job.same()
    )
    assert summary.real_bytes == summary.reads.needed_bytes == count * 10


def test_stages_hold_their_layers_only(job) -> None:
    target = job.other()
    assert target["model/layers.1.feed_forward.w1.weight"].ranks == (0, 1, 2, 3)
    assert target["optim/exp_avg/layers.2.feed_forward.w2.weight"].ranks == (4, 5, 6, 7)
    assert target["model/output.weight"].ranks == (4, 5, 6, 7)


def test_the_published_page_has_the_text_of_the_script() -> None:
    written = simulate.PAGE.read_text()
    assert written.startswith(simulate.INTRODUCTION), "run python benchmarks/simulate.py"
    assert all(f"## {job.title}\n" in written for job in simulate.JOBS)
