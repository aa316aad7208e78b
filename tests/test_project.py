"""Facts about the project itself: its layers, its promises in writing, its docs that run."""

from __future__ import annotations

import ast
import doctest
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ucpstore"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Only what lowers a state and what runs a collective call may talk to process groups.
KNOWS_DISTRIBUTED = {
    "agree",
    "describe",
    "exchange",
    "loading",
    "saving",
    "integrations",
    "perrank",
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """(path below the package, syntax tree) of every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def imported(tree: ast.AST) -> Iterator[str]:
    """What a module imports when it runs, `a.b` for `from a import b`; not what is for types."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imported(node)


def test_layers_import_only_from_below() -> None:
    command = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("import-linter is not installed: pip install -e '.[lint]'")
    # Without the inherited flags: the linter's own imports are not what is tested here.
    done = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_no_module_reaches_up_through_the_package() -> None:
    top = {path.stem for path in PACKAGE.iterdir()} | {"__version__"}
    for name, tree in modules():
        names = {
            module.split(".")[1] for module in imported(tree) if module.startswith("ucpstore.")
        }
        assert names <= top, f"{name} imports {names - top} from ucpstore itself"


def test_only_runners_and_describe_know_torch_distributed() -> None:
    found = {
        name
        for name, tree in modules()
        if any(module.startswith(("torch.distributed", "torch._C")) for module in imported(tree))
    }
    strangers = {
        name for name in found if name.split("/")[0].removesuffix(".py") not in KNOWS_DISTRIBUTED
    }
    assert not strangers


def test_nothing_can_run_code_from_a_checkpoint() -> None:
    unsafe = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    for name, tree in modules():
        if name.startswith("convert"):
            continue  # importers read other formats' pickles, with a list of allowed classes
        used = {module.split(".")[0] for module in imported(tree)} & unsafe
        calls = {
            ast.unparse(node.func)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("torch.load", "eval", "exec")
        }
        assert not used | calls, f"{name} uses {used | calls}"


def test_the_public_api_is_synchronous() -> None:
    for name, tree in modules():
        found = [node.name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)]
        assert not found or name.startswith("storage/"), f"{name} defines async {found}"


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = ["torch", "zarr", "numpy", "obstore", "fsspec", "s3fs", "typer", "rich"]
    code = f"import sys, ucpstore; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_public_names_are_sorted_and_exist() -> None:
    import ucpstore

    assert list(ucpstore.__all__) == sorted(ucpstore.__all__)
    for name in ucpstore.__all__:
        assert getattr(ucpstore, name, None) is not None, name
    assert {"save", "load", "CheckpointStore", "PerRank", "Options", "UcpstoreError"} <= set(
        ucpstore.__all__
    )


EXTRAS = ("test", "lint", "examples", "benchmarks", "deepspeed")


def requirements(*extras: str) -> dict[str, Requirement]:
    """The project's own requirements and those of `extras`, by canonical name."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    found = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): r for r in found if r.name != PROJECT["name"]}


def test_every_dependency_is_pinned_within_its_range() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints-dev.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    versions = {canonicalize_name(name): Version(version) for name, version in pins.items()}
    for name, requirement in requirements(*EXTRAS).items():
        assert versions[name] in requirement.specifier, f"{requirement} but pinned {versions[name]}"


def test_dependencies_are_documented() -> None:
    text = (ROOT / "docs/dependencies.md").read_text()
    needed, extras = text.split("## Extras")
    listed = {canonicalize_name(name) for name in re.findall(r"^\| `([^`]+)` ", needed, re.M)}
    assert listed == set(requirements())
    for name in requirements(*EXTRAS).keys() - requirements().keys():
        assert f"`{name}`" in extras, f"{name} is missing under Extras"


def test_the_readme_is_short_and_has_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 150
    assert "make demo" in lines
    assert "make test" in lines


DOCUMENTS = (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")))


def anchors(path: Path) -> set[str]:
    """The names that links give to the headings of a document, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", path.read_text()):
            where = f"{path.relative_to(ROOT)} links to {target}#{anchor}"
            found = path.parent / target if target else path
            assert found.exists(), where
            assert not anchor or anchor in anchors(found), where


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    for path in ROOT.glob("docs/*.md"):
        assert f"](docs/{path.name}" in text, f"README.md does not link to docs/{path.name}"


def test_errors_that_documents_quote_are_raised() -> None:
    trees = dict(modules())
    said = " ... ".join(
        " ".join(text.split())
        for tree in trees.values()
        for node in ast.walk(tree)
        if (text := text_of(node))
    )
    classes = defined(trees["errors.py"]) | {"UserWarning"}
    for name in ("troubleshooting", "storage"):
        quotes = [text for cell in symptoms(ROOT / f"docs/{name}.md") for text in quoted(cell)]
        assert len(quotes) > 15
        for text in quotes:
            kind = re.match(r"(\w+(?:Error|Warning)): ", text)
            assert not kind or kind[1] in classes, f"docs/{name}.md: there is no {kind[1]}"
            words = longest_run(text)
            threes = [" ".join(words[at : at + 3]) for at in range(max(1, len(words) - 2))]
            # Not all: a message may have a name of the example in their midst.
            there = sum(each in said for each in threes)
            assert 2 * there >= len(threes), f"docs/{name}.md: nothing says {text}"


def text_of(node: ast.AST) -> str:
    """A string of the source, with dots for what is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or " ... " for part in node.values)
    return ""


NOT_OURS = ("ucpstore ", "ValueError: No Zarr data", "ZarrUserWarning: ", "No space left on device")


def quoted(cell: str) -> list[str]:
    """The messages that a cell quotes, without commands and what the system or zarr-python says."""
    found = [text for text in re.findall(r"`([^`]+)`", cell) if not text.startswith(NOT_OURS)]
    return [text for text in found if len(longest_run(text)) > 1]


EXAMPLES = {"save", "load", "int", "float"}


def longest_run(text: str) -> list[str]:
    """The longest run of words that are no names or numbers of an example."""
    runs: list[list[str]] = [[]]
    for word in re.sub(r"^\w+(Error|Warning): ", "", text).split():
        if re.fullmatch(r"[A-Za-z]+[,;:]?", word) and word not in EXAMPLES:
            runs[-1].append(word)
        if runs[-1][-1:] != [word] or word.endswith(":"):
            runs.append([])
    return max(runs, key=len)


def defined(tree: ast.Module) -> set[str]:
    """Names of the classes of a module."""
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def symptoms(path: Path) -> list[str]:
    """The first cells of the tables whose first column is what a user sees."""
    found: list[str] = []
    for table in re.findall(
        r"^\| (?:you see|the message says) \|.*\n((?:\|.*\n)+)", path.read_text(), re.M
    ):
        found += [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[1:]]
    return found


def test_compose_pins_its_images_and_listens_on_loopback_only() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    images = re.findall(r"^\s+image: (\S+)$", text, re.M)
    assert len(images) == 3
    assert all(":" in image and not image.endswith(":latest") for image in images)
    ports = re.findall(r'^\s+- "([\d.:]+:\d+)"$', text, re.M)
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


# ---- docs that run -------------------------------------------------------------------------------

FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.M | re.S)


def snippets(path: Path) -> list[tuple[int, str, str | None]]:
    """(line, code, the output shown below it or None) of each python block of a document."""
    text = path.read_text()
    blocks = list(FENCE.finditer(text))
    found = []
    for here, after in zip(blocks, [*blocks[1:], None], strict=True):
        if here[1] != "python" or "no-run" in here[2]:
            continue
        shown = None
        if (
            after is not None
            and after[1] == "text"
            and not text[here.end() : after.start()].strip()
        ):
            shown = after[3]
        found.append((text[: here.start()].count("\n") + 2, here[3], shown))
    return found


def run_document(path: str) -> None:
    """Run a document's python blocks one after the other in one namespace, in this process."""
    names: dict[str, object] = {"__name__": "__main__"}
    for line, code, shown in snippets(Path(path)):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("\n" * (line - 1) + code, path, "exec"), names)
        if shown is not None and not doctest.OutputChecker().check_output(
            shown, printed.getvalue(), doctest.ELLIPSIS
        ):
            raise AssertionError(
                f"{path} line {line} shows\n{shown}but prints\n{printed.getvalue()}"
            )


@pytest.mark.parametrize(
    "name", ["README.md", "docs/quickstart.md", "docs/parallelism.md", "docs/specification.md"]
)
def test_documents_run(name: str, tmp_path: Path) -> None:
    # In a process of its own: a document sets seeds and starts what a user's program would.
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['run_document'](sys.argv[2])"
    assert snippets(ROOT / name), f"{name} has no python block"
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", code, __file__, str(ROOT / name)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
