"""Training in a notebook, by a real kernel: what is shown, and what an interrupt does."""

import json
import runpy
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

pytestmark = [pytest.mark.gangs, pytest.mark.filterwarnings("ignore")]  # the client's own

BEGIN = """
import signal
import numpy as np, optax, plurax as px

before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
data = {"x": x, "y": x.sum(1)}
task = px.Task(
    init=lambda key: {"w": np.zeros(3, np.float32)},
    loss=lambda params, batch, keys: (batch["x"] @ params["w"] - batch["y"]) ** 2,
)
"""
SHORT = """
result = px.fit(task, optax.sgd(0.1), data, batch_size=16, epochs=3)
"""
OF_MEMBERS = """
result = px.fit(task, optax.sgd(0.1), data, batch_size=16, epochs=3, members=px.Members(4))
result.plot()
"""
STUCK = """
import threading
from plurax.guards.stop_signals import StopSignals

note = StopSignals._note
def noting(self, *signalled):
    note(self, *signalled)
    print("noted")
StopSignals._note = noting

class Stuck:
    def on_step(self, run, row):
        print("waits")
        threading.Event().wait()

px.fit(task, optax.sgd(0.1), data, batch_size=16, epochs=3, callbacks=[Stuck()])
"""
LONG = """
result = px.fit(task, optax.sgd(0.01), data, batch_size=16, epochs=10**7, output=FOLDER)
now = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
print(result.interrupted, now == before, result.state.steps_taken > 0)
print(px.Checkpoints(FOLDER + "/checkpoints").steps()[-1] == result.state.steps_taken)
"""


class Kernel:
    def __init__(self):
        self.manager, self.client = start_new_kernel(kernel_name="python3")

    def run(self, code, *untils, error=None):
        """The outputs of a cell; it is interrupted where each `until(message)` in order is true.

        It has to end with an error of the name `error`, or with none.
        """
        untils, raised = [*untils], None
        asked = self.client.execute(code)
        found = []
        while True:
            message = self.client.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "error":
                raised = content["ename"]
                assert raised == error, "\n".join(content["traceback"])
            if kind == "status" and content["execution_state"] == "idle":
                assert raised == error
                return found
            found.append((kind, content))
            if untils and untils[0](kind, content):
                self.manager.interrupt_kernel()
                del untils[0]


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    kernel.run(BEGIN)
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)


def frames(outputs):
    return [
        content["data"]["text/html"]
        for kind, content in outputs
        if kind in ("display_data", "update_display_data")
    ]


def test_one_output_with_a_bar_and_a_table_is_updated_in_place(kernel):
    outputs = kernel.run(SHORT)
    kinds = [kind for kind, _ in outputs if "display" in kind]
    assert kinds[0] == "display_data"
    assert set(kinds[1:]) == {"update_display_data"}
    names = {content["transient"]["display_id"] for kind, content in outputs if "display" in kind}
    assert len(names) == 1
    assert not any(kind == "stream" for kind, _ in outputs)
    last = frames(outputs)[-1]
    assert '<progress value="12" max="12">' in last
    assert [f">{epoch}/3<" in last for epoch in (1, 2, 3)] == [True] * 3
    assert ">loss<" in last


def test_curves_are_shown_inline(kernel):
    (shown,) = [
        content for kind, content in kernel.run("result.plot()") if kind == "execute_result"
    ]
    assert shown["data"]["image/png"].startswith("iVBOR")


def test_curves_of_members_are_shown_inline(kernel):
    (shown,) = [content for kind, content in kernel.run(OF_MEMBERS) if kind == "execute_result"]
    assert shown["data"]["image/png"].startswith("iVBOR")
    bands = kernel.run("print(len(result.plot().axes[0].collections) > 0)")
    assert bands[-1][1]["text"] == "True\n"


def test_a_second_interrupt_raises_at_once_and_the_kernel_goes_on(kernel):
    """The step would never end; the second comes once the first has been noted."""

    def printed(word):
        return lambda kind, content: kind == "stream" and word in content["text"]

    kernel.run(STUCK, printed("waits"), printed("noted"), error="KeyboardInterrupt")
    kernel.run("StopSignals._note = note")
    code = "print((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before)"
    assert kernel.run(code)[-1][1]["text"] == "True\n"


def test_an_interrupt_saves_and_returns_and_the_kernel_goes_on(kernel, tmp_path):
    code = f"FOLDER = {str(tmp_path / 'run')!r}" + LONG

    def trained(kind, content):
        return kind == "update_display_data" and "examples/s" in content["data"]["text/html"]

    outputs = kernel.run(code, trained)
    said = "".join(c["text"] for k, c in outputs if k == "stream" and c["name"] == "stdout")
    assert said.split() == ["SIGINT", "True", "True", "True"]
    outputs = kernel.run("print(result.program.plan)")
    assert outputs[-1][1]["text"].startswith("Plan(")


DOCS = Path(__file__).parents[2] / "docs"


def test_the_tutorial_is_a_notebook_too():
    written = (DOCS / "tutorial.ipynb").read_text("utf-8")
    made = runpy.run_path(str(DOCS / "notebook.py"))["notebook"]
    assert written == made((DOCS / "tutorial.md").read_text("utf-8")), "python docs/notebook.py"


def test_the_tutorials_notebook_runs(tmp_path):
    kernel = Kernel()
    kernel.run(f"import os; os.chdir({str(tmp_path)!r})")
    for cell in json.loads((DOCS / "tutorial.ipynb").read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            kernel.run("".join(cell["source"]))
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)
