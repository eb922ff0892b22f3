"""The repository keeps its own rules: README, sizes, imports, configurations."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxinfer.config_file import load_toml

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("jaxinfer", "kernels")
MAX_LINES = 400


def tracked():
    """Paths of all files git has or would take."""
    try:
        listing = subprocess.run(
            # The checkout may belong to another user, as in a container.
            ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git does not know this folder: {error}")
    return [path for path in listing.stdout.splitlines() if (ROOT / path).is_file()]


def children(paths, folder=""):
    """Names directly below a folder; folders end with a slash."""
    rest = [path.removeprefix(folder) for path in paths if path.startswith(folder)]
    return {name.split("/")[0] + ("/" if "/" in name else "") for name in rest}


def readme_tree():
    """Folder ('' for the root) -> names below it, from the README's tree."""
    [block] = re.findall(r"```text\n(\.ci/.*?)```", README, flags=re.DOTALL)
    tree, parent = {"": set()}, ""
    for line in block.splitlines():
        indent, entry = re.fullmatch(r"( *)(\S.*)", line).groups()
        # Several names may share a line's phrase: two spaces end them.
        names, *phrase = re.split(r" {2,}", entry, maxsplit=1)
        assert phrase, f"README tree: {line!r} has no phrase"
        if not indent:
            parent = names if names.endswith("/") else ""
            tree[""].update(names.split())
        else:
            assert indent == "  ", f"README tree: {line!r} is indented too far"
            tree.setdefault(parent, set()).update(names.split())
    return tree


def console_lines():
    blocks = re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def test_the_readme_tree_is_what_is_tracked():
    tree, paths = readme_tree(), tracked()
    assert {f"{package}/" for package in PACKAGES} <= tree.keys()
    for folder, names in tree.items():
        assert names == children(paths, folder), f"README tree below {folder or './'}"


def test_the_readme_has_the_two_commands():
    lines = console_lines()
    assert "pip install -e . && python serve.py" in lines
    # .ci/run takes the test command from the README with the same pattern.
    assert [line for line in lines if re.search(r"\[test\].*pytest", line)] == [
        "pip install -e '.[test]' && pytest -n auto"
    ]


def test_the_readmes_python_is_the_notebooks():
    notebook = json.loads((ROOT / "examples/quickstart.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    [block] = re.findall(r"```python\n(import jaxinfer\n.*?)```", README, flags=re.DOTALL)
    assert block.strip() == "\n\n".join(code)
    assert not any(cell.get("outputs") for cell in notebook["cells"])


def flags_of(*command):
    """What a command's `--help` lists."""
    listed = subprocess.run(
        [sys.executable, "-m", "jaxinfer", *command, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return set(re.findall(r"--[a-z][a-z-]+", listed))


def test_flags_in_the_readme_exist():
    known, benched = flags_of("serve"), flags_of("bench", "serve")
    lines = [line.split() for line in console_lines() if "serve" in line]
    loads = [line for line in lines if line[:3] == ["jaxinfer", "bench", "serve"]]
    assert {flag for line in loads for flag in line if flag.startswith("--")} <= benched
    used = [flag for line in lines if line not in loads for flag in line]
    used += re.findall(r"`(--[a-z-]+)", README)
    # The last is one of `kernels.bench`.
    assert {flag for flag in used if flag.startswith("--")} <= known | {"--help", "--tune"}


@pytest.mark.parametrize("arguments", [["-c", "import jaxinfer"], ["-m", "jaxinfer", "--help"]])
def test_jax_is_not_imported_early(arguments):
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()}
    assert "jaxinfer" in imported
    assert not imported & {"jax", "jaxlib", "flax", "numpy", "aiohttp"}


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.toml")), ids=lambda path: path.name)
def test_configurations_load(path):
    load_toml(path)
    assert f"configs/{path.name}" in path.read_text(encoding="utf-8"), "says how to use it"


def test_there_are_configurations():
    assert list(ROOT.glob("configs/*.toml"))


def test_files_stay_small():
    sizes = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert {path: lines for path, lines in sizes.items() if lines > MAX_LINES} == {}


def test_every_file_says_what_it_is():
    without = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if not path.read_text(encoding="utf-8").startswith('"""')
    ]
    assert without == []


def test_tests_shadow_no_package():
    # A tests/kernels/__init__.py would be imported in place of kernels.
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_extras_of_the_readme_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    assert {"cuda", "tpu", "test", "oracle", "bench"} <= extras
    assert set(re.findall(r"'\.\[([a-z]+)\]'", README)) <= extras
    assert not any("torch" in line for line in project["optional-dependencies"]["test"])
