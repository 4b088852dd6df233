"""The package as it is published: metadata, links, what the wheel holds, that it works alone."""

import importlib.metadata
import os
import re
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import plurax as px

REPOSITORY = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
README = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]


def published(text):
    """The README as the package index shows it."""
    for one in README["substitutions"]:
        text = re.sub(one["pattern"], one["replacement"], text)
    return text


def targets(text):
    return re.findall(r"\]\(([^)]+)\)", text)


def test_the_metadata_are_complete():
    assert PROJECT["authors"] == [{"name": "plurax developers"}]
    assert PROJECT["urls"].keys() >= {"Homepage", "Documentation", "Repository", "Changelog"}
    assert all(url.startswith("https://") for url in PROJECT["urls"].values())
    assert len(PROJECT["keywords"]) > 5
    assert re.fullmatch(r"(0\.[2-9]|[1-9]\d*\.\d+)\.\d+", px.__version__)
    extras = PROJECT["optional-dependencies"]
    for name in ("cuda12", "cuda13", "tpu"):
        assert extras[name] == [f"jax[{name}]>=0.10"]
    versions = [one.rsplit(" ", 1)[1] for one in PROJECT["classifiers"] if "Python :: 3." in one]
    assert versions == ["3.11", "3.12", "3.13"]


def test_links_of_the_readme_lead_somewhere():
    """Here to files that are there, on the package index to the repository."""
    text = (REPOSITORY / "README.md").read_text()
    local = [one for one in targets(text) if not one.startswith("http")]
    assert local
    assert all((REPOSITORY / one.partition("#")[0]).exists() for one in local)
    home = PROJECT["urls"]["Repository"]
    found = targets(published(text))
    assert all(one.startswith("https://") for one in found)
    assert all(f"{home}/blob/main/{one}" in found for one in local if not one.endswith(".png"))
    raw = home.replace("github.com", "raw.githubusercontent.com")
    assert all(f"{raw}/main/{one}" in found for one in local if one.endswith(".png"))


def test_a_release_is_built_checked_and_published_in_this_order():
    jobs = yaml.safe_load((REPOSITORY / ".github/workflows/release.yml").read_text())["jobs"]
    assert [*jobs] == ["build", "check", "publish"]
    assert (jobs["check"]["needs"], jobs["publish"]["needs"]) == ("build", "check")
    said = [step.get("run", "") for step in jobs["check"]["steps"]]
    assert "packaging/try_wheel.sh dist" in said
    script = (REPOSITORY / "packaging" / "try_wheel.sh").read_text()
    assert "twine check --strict" in script
    assert "plurax train mine.py" in script


def test_a_bug_report_asks_for_the_doctor():
    form = yaml.safe_load((REPOSITORY / ".github/ISSUE_TEMPLATE/bug.yml").read_text())
    doctor = next(one for one in form["body"] if one["id"] == "doctor")
    assert "plurax doctor" in doctor["attributes"]["label"]
    assert doctor["validations"] == {"required": True}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built as a release builds it: from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(REPOSITORY)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.slow
def test_what_is_in_the_wheel(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    examples = {path.name for path in (REPOSITORY / "examples").glob("*.py")}
    assert {name for name in names if name.startswith("plurax/examples/")} == {
        f"plurax/examples/{name}" for name in examples
    }
    source = REPOSITORY / "src"
    wanted = [
        path for path in source.rglob("*") if path.is_file() and "__pycache__" not in str(path)
    ]
    assert {str(path.relative_to(source)) for path in wanted} <= {*names}
    assert {name.partition("/")[0] for name in names} == {
        "plurax", f"plurax-{px.__version__}.dist-info"
    }  # fmt: skip
    (metadata,) = [name for name in names if name.endswith("METADATA")]
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert f"Version: {px.__version__}" in text
    assert "Author: plurax developers" in text
    assert text.endswith(published((REPOSITORY / "README.md").read_text()))
    assert wheel.stat().st_size < 5e6


@pytest.mark.slow
def test_the_wheel_works_without_the_repository(wheel, tmp_path):
    """In an environment of its own, which borrows the packages it needs from this one."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    paths = "import site; print(site.getsitepackages()[0])"
    own = subprocess.run([python, "-c", paths], capture_output=True, text=True, check=True)
    needed = "\n".join(site.getsitepackages())
    # A line of a .pth file is put on the path; the .pth files in that folder are not read, so the
    # package in development is not seen.
    Path(own.stdout.strip(), "borrowed.pth").write_text(needed)
    environment = {**os.environ, "PYTHONPATH": ""}
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel]
    subprocess.run(install, check=True, env=environment, capture_output=True)

    def plurax(*arguments):
        command = [tmp_path / "venv" / "bin" / "plurax", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = subprocess.run(
        [python, "-c", "import plurax; print(plurax.__file__)"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert where.stdout.startswith(own.stdout.strip())
    assert plurax("--version") == f"plurax {px.__version__}\n"
    plurax("new", "mine.py")
    assert "epoch 2/2" in plurax("train", "mine.py", "--epochs", "2")
    assert "wrote report.html" in plurax("report", "runs/mine")
    assert "spirals" in plurax("examples")
    plurax("examples", "spirals")
    assert (tmp_path / "spirals.py").is_file()
    assert importlib.metadata.version("jax") in plurax("doctor")
