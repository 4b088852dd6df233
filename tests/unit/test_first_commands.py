"""The commands of the first day: new, examples, help, completion, doctor."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.command import run

import plurax as px
from plurax.cli import doctor_command as doctor
from plurax.cli import example_commands, options
from plurax.cli.commands import COMMANDS
from plurax.cli.parser import GROUPS, field_texts
from plurax.exit_codes import ADVICE, MEANINGS, ExitCode

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_file_trains_and_predicts(capsys):
    code, out, _ = run(capsys, "new", "mine")
    assert (code, out) == (0, "wrote mine.py\n\n  plurax train mine.py\n")
    text = Path("mine.py").read_text()
    assert "plurax predict runs/mine --inputs" in text
    assert "template" not in text
    code, _, err = run(capsys, "train", "mine.py", "--epochs", "2", "--no-progress")
    assert code == 0, err
    np.savez("inputs.npz", x=np.zeros((3, 2), np.float32))
    code, out, err = run(capsys, "predict", "runs/mine", "--inputs", "inputs.npz")
    assert code == 0, err
    assert "float32[3]" in out


def test_a_new_file_in_a_folder_and_one_with_a_space(capsys, workplace):
    code, out, _ = run(capsys, "new", ".")
    assert (code, out) == (0, "wrote experiment.py\n\n  plurax train experiment.py\n")
    code, out, _ = run(capsys, "new", "my work/a")
    assert (code, out) == (0, "wrote my work/a.py\n\n  plurax train 'my work/a.py'\n")
    assert "\n    plurax train 'my work/a.py'\n" in Path("my work/a.py").read_text()
    _, out, _ = run(capsys, "examples", "lora", "--to", "my work")
    assert out.endswith(" 'my work/lora.py'\n")


def test_nothing_is_written_over(capsys):
    Path("mine.py").write_text("my own")
    for command in (["new", "mine.py"], ["new", "mine"]):
        code, _, err = run(capsys, *command)
        assert (code, "mine.py is there already, and is not written over." in err) == (2, True)
    assert Path("mine.py").read_text() == "my own"
    code, _, err = run(capsys, "new", "mine.py/other.py")
    assert (code, "error: mine.py is there already" in err) == (2, True)
    code, _, err = run(capsys, "new", "/proc/no/mine.py")
    assert (code, "/proc/no/mine.py could not be written" in err) == (2, True)


def test_examples_are_listed_and_written(capsys):
    code, out, _ = run(capsys, "examples")
    assert code == 0
    names = sorted(path.stem for path in (REPOSITORY / "examples").glob("*.py"))
    assert re.findall(r"^  (\w+)  ", out, re.M) == [one for one in names if one != "template"]
    assert "  spirals          Two noisy spirals: a hundred networks" in out
    code, out, _ = run(capsys, "examples", "spirals")
    assert (code, "plurax train spirals.py" in out) == (0, True)
    assert Path("spirals.py").read_text() == (REPOSITORY / "examples" / "spirals.py").read_text()
    assert run(capsys, "examples", "spirals")[0] == 2
    code, out, _ = run(capsys, "examples", "optuna_digits.py", "--to", "there")
    assert (code, "python there/optuna_digits.py" in out) == (0, True)
    assert Path("there/digits_ensemble.py").is_file()  # which it reads
    code, _, err = run(capsys, "examples", "digit")
    assert (
        code,
        "'digit' is not an example. Did you mean 'digits'? The examples are digits, " in err,
    ) == (2, True)


def test_an_example_says_what_it_needs():
    text = "import numpy, not_there.inside\nfrom also_not import a\nfrom .beside import b\n"
    assert example_commands.missing_packages(text) == ["also_not", "not_there"]


def test_every_example_has_a_first_line():
    for path in example_commands.examples().values():
        assert (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0].endswith(".")


def test_help_of_a_command_and_of_the_exit_codes(capsys):
    code, out, _ = run(capsys, "help", "watch")
    assert code == 0
    assert "usage: plurax watch" in out
    code, out, _ = run(capsys, "help", "exit-codes")
    assert code == 0
    assert [int(one) for one in re.findall(r"^ +(\d+)  ", out, re.M)] == sorted(ExitCode)
    for text in [*MEANINGS.values(), *ADVICE.values()]:
        assert text in out


def test_the_guide_has_every_exit_code():
    """Its table is that of the module: code, meaning, advice."""
    page = (REPOSITORY / "docs" / "guides" / "command-line.md").read_text()
    table = page.split("## Exit status")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \|$", table, re.M)
    assert rows == [(str(int(c)), MEANINGS[c], ADVICE.get(c, "")) for c in sorted(ExitCode)]


def test_every_option_of_train_has_a_group(capsys):
    """And is shown in it, in one piece: the line breaks are those of the terminal."""
    grouped = {name for group in GROUPS for name in group.options}
    nested = {"plan", "members", "servers", "rollback", "experiment"}
    names = {field.name for field in options.train_class().__dataclass_fields__.values()}
    assert names - nested - grouped == set()
    run(capsys, "new", "mine")
    code, out, _ = run(capsys, "train", "mine.py", "--help-all")
    assert code == 0
    titles = re.findall(r"^\W*(\w[\w ]*?) options\W*$", out, re.M)  # in boxes on a terminal
    assert titles == ["data", "training", "device", "output and checkpoint", "plan", "members",
                      "servers", "rollback", "experiment"]  # fmt: skip
    assert "--plan.shardings" not in out  # a value of Python
    said = " ".join(out.replace("│", " ").split())
    assert "beside what is measured. None: as in the file." in said
    text = field_texts(px.Plan)["microbatches"]
    words = re.search(r"(--plan.microbatches INT.*?)--plan.precision", out, re.S)[1].split("\n")
    lines = [line.strip("│ ") for line in words if line.strip("│ ")][1:]
    assert " ".join(lines) == f"{text} (default: 1)"
    assert min(len(line) for line in lines[:-1]) > 55, lines  # none ends early


def test_options_come_out_of_their_groups(capsys, monkeypatch):
    """Also where a group has the name of an option, as `search` of `plurax plan`."""
    from plurax.cli.options import Show
    from plurax.cli.parse import parse

    run(capsys, "new", "mine")
    given = ["mine.py", "--seconds", "3", "--plan.data", "2", "--members.folds", "4"]
    options = parse(given, "plan", Show).options
    assert (options.search, options.seconds, options.save) == (False, 3.0, None)
    assert (options.plan, options.members.folds) == (px.Plan(data=2), 4)
    assert parse([*given, "--search"], "plan", Show).options.search is True


NESTED = """
import dataclasses, numpy as np, plurax as px

@dataclasses.dataclass(frozen=True)
class Net:
    "A network."
    width: int = 3
    bias: bool = True

def experiment(net: Net = Net()):
    assert isinstance(net, Net)
    print(net)
    return px.Experiment(None, None, {"x": np.zeros((8, 2))}, batch_size=4)
"""


def test_an_argument_of_a_file_may_be_a_dataclass(capsys):
    """Which the file defines, so that its source is not found where modules are."""
    Path("nested.py").write_text(NESTED)
    for option in ("--help", "--help-all"):
        code, out, err = run(capsys, "train", "nested.py", option)
        assert (code, err, "--experiment.net.width INT" in out) == (0, "", True)
    code, out, _ = run(capsys, "train", "nested.py", "--experiment.net.width", "5", "--epochs", "x")
    assert (code, out) == (2, "Net(width=5, bias=True)\n")
    code, _, err = run(capsys, "train", "nested.py", "--experiment.net.width", "x")
    assert (code, "error: --experiment.net.width: invalid literal" in err) == (2, True)


def test_a_shell_completes_commands_and_options(capsys):
    """The real script in the real shell."""
    code, script, _ = run(capsys, "completion", "bash")
    assert code == 0
    Path("experiment.py").touch()
    lines = "\n".join(
        f'COMP_WORDS=({words} "{last}"); COMP_CWORD={len(words.split())}; COMPREPLY=(); '
        '_tyro_plurax plurax; echo "${COMPREPLY[@]}"'
        for words, last in [("plurax", "tr"), ("plurax train x.py", "--plan.micro"),
                            ("plurax train x.py --ragged", ""), ("plurax report", "--out"),
                            ("plurax machine", "--pre"), ("plurax", "")]
    )  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{lines}\ncomplete -p plurax"], capture_output=True, text=True
    )
    *found, every, how = done.stdout.splitlines()
    assert found == ["train", "--plan.microbatches", "pad drop error", "--output", "--preset"]
    assert {*every.split()} == {"-h", "--help", *(one.name for one in COMMANDS)}
    assert "-o default" in how  # names of files
    code, script, _ = run(capsys, "completion", "zsh")
    assert (code, script.startswith("#compdef plurax")) == (0, True)


def test_fish_completes_commands_options_and_files(capsys):
    """In the real shell where it is there; else what the script hands to it is looked at."""
    code, script, _ = run(capsys, "completion", "fish")
    assert code == 0
    for one in COMMANDS:
        assert f"'{one.name}': {{'description'" in script
    calls = [line for line in script.splitlines() if line.strip().startswith("complete ")]
    assert calls
    assert not any("--no-files" in line for line in calls)
    if shutil.which("fish") is None:
        return
    Path("experiment.py").touch()
    asked = ["plurax tr", "plurax train x.py --plan.micro", "plurax report --out",
             "plurax train x.py --ragged ", "plurax train experi"]  # fmt: skip
    lines = "\n".join(f"complete -C '{line}'; echo --" for line in asked)
    done = subprocess.run(["fish", "-c", f"{script}\n{lines}"], capture_output=True, text=True)
    assert done.stderr == ""
    found = [
        {line.split("\t")[0] for line in part.splitlines()} - {""}
        for part in done.stdout.split("--\n")
    ]
    wanted = {"train"}, {"--plan.microbatches"}, {"--output"}, {"pad", "drop", "error"}
    assert all(one <= got for one, got in zip((*wanted, {"experiment.py"}), found, strict=False))


def test_python_runs_the_package():
    done = subprocess.run(
        [sys.executable, "-m", "plurax", "--version"], capture_output=True, text=True
    )
    assert done.stdout == f"plurax {px.__version__}\n", done.stderr


# --- plurax doctor --------------------------------------------------------------------------------


def facts(**changes):
    """Those of a machine with nothing to say of."""
    known = {
        "platform": "gpu", "kinds": ["A"] * 2, "memory": 2**30, "cores": 8, "shm": 2**34,
        "gpus": 2, "settings": {"jax_compilation_cache_dir": "there"},
        "environment": {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}, "small_pages": True,
    }  # fmt: skip
    return doctor.Facts(**{**known, **changes})


def test_doctor_prints_what_a_bug_report_needs(capsys, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.42")
    monkeypatch.setenv("JAX_PLATFORM_NAME", "cpu\x1b[2J")
    hidden = ("PLURAX_TOKEN", "PLURAX_AUTH", "XLA_PASS", "JAX_CREDENTIALS", "PLURAX_COORDINATOR",
              "JAX_COORDINATOR_ADDRESS", "NCCL_SOCKET_IFNAME")  # fmt: skip
    for name in hidden:
        monkeypatch.setenv(name, "secret.host")
    code, out, err = run(capsys, "doctor")
    assert (code, err) == (0, "")
    for text in (
        f"plurax: {px.__version__}",
        "jax: ",
        "8 × cpu (cpu)",
        "cores for this process",
        "flax: ",
        "XLA_PYTHON_CLIENT_MEM_FRACTION: 0.42",
        "options of the compiler (compiler_options=...):\n  cpu: none is known to help\n",
        "slow, or surprising:\n  - ",
    ):
        assert text in out
    assert [f"  {name}: (set)" in out for name in hidden] == [True] * len(hidden)
    assert "secret" not in out
    assert r"JAX_PLATFORM_NAME: cpu\x1b[2J" in out


def test_doctor_says_which_options_of_the_compiler_help(monkeypatch):
    advice = {
        "xla_a": {"value": True, "why": "2 % shorter steps"},
        "xla_b": {"value": 8, "why": "less memory"},
    }
    monkeypatch.setattr(doctor, "advised_options", lambda: {"TPU 9": advice})
    assert doctor.advice_text(["TPU 9", "cpu", "TPU 9"]) == [
        "TPU 9: xla_a = True: 2 % shorter steps",
        "TPU 9: xla_b = 8: less memory",
        "cpu: none is known to help",
    ]


def test_doctor_says_what_is_missing_in_a_line(monkeypatch):
    def version(name):
        if name in ("keras", "torch"):
            raise importlib.metadata.PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    installed, missing = doctor.extras()
    assert missing == ["plurax[keras]", "plurax[torch]"]
    assert installed["flax"] == "1.0"
    assert installed.keys().isdisjoint(("keras", "torch"))


CPU = {"platform": "cpu", "kinds": ["cpu"] * 2, "gpus": 0, "small_pages": False}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "nothing"),
        ({**CPU, "gpus": 2}, "has 2 NVIDIA GPUs and JAX uses none of them"),
        ({**CPU, "kinds": ["cpu"]}, "one CPU device for 8 cores"),
        ({**CPU, "kinds": ["cpu"] * 16}, "16 virtual CPU devices share 8"),
        ({**CPU, "small_pages": True}, "GLIBC_TUNABLES=glibc.malloc.hugetlb=1, set before Python"),
        ({"kinds": ["A", "B"]}, "of several kinds"),
        ({"settings": {}}, "nothing that is compiled is kept"),
        ({"settings": {"jax_compilation_cache_dir": "a", "jax_enable_compilation_cache": False}},
         "nothing that is compiled is kept"),
        ({"settings": {"jax_compilation_cache_dir": "a", "jax_disable_jit": True}}, "is compiled"),
        ({"settings": {"jax_compilation_cache_dir": "a", "jax_debug_nans": True}}, "to the host"),
        ({"settings": {"jax_compilation_cache_dir": "a", "jax_enable_x64": True}}, "float64"),
        ({"settings": {"jax_compilation_cache_dir": "a",
                       "jax_default_matmul_precision": "highest"}}, "off the fast units"),
        ({"environment": {}}, "JAX takes three quarters of a GPU's memory"),
        ({"environment": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}}, "piece by piece"),
        ({"environment": {"XLA_FLAGS": "--xla_force_host_platform_device_count=8",
                          "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}}, "`--devices` does so"),
        ({"shm": 2**26}, "/dev/shm has 64.0 MiB"),
    ],
)  # fmt: skip
def test_doctor_says_what_is_slow(changes, said):
    (found,) = doctor.findings(facts(**changes))
    assert said in found


@pytest.mark.parametrize(
    ("library", "mode", "tunables", "small"),
    [
        (("glibc", "2.36"), "always [madvise] never", "", True),
        (("glibc", "2.35"), "always [madvise] never", "glibc.malloc.arena_max=1", True),
        (("glibc", "2.36"), "always [madvise] never", "glibc.malloc.hugetlb=1", False),
        (("glibc", "2.36"), "[always] madvise never", "", False),
        (("glibc", "2.36"), "always madvise [never]", "", False),
        (("glibc", "2.36"), None, "", False),
        (("glibc", "2.31"), "always [madvise] never", "", False),
        (("", ""), "always [madvise] never", "", False),
    ],
)  # fmt: skip
def test_doctor_knows_small_pages(library, mode, tunables, small, tmp_path):
    file = tmp_path / "enabled"
    if mode is not None:
        file.write_text(mode + "\n")
    assert doctor.in_small_pages(library, file, {"GLIBC_TUNABLES": tunables}) is small


def test_doctor_counts_devices_by_kind():
    lines = doctor.devices_text(facts(kinds=["A", "A", "B"], memory=None, shm=None))
    assert lines == ["2 × A (gpu)", "1 × B (gpu)", "8 cores for this process"]
