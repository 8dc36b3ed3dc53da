"""examples/first_run.ipynb runs from its first cell to its last, and is kept without outputs."""

from __future__ import annotations

import base64
import json

import pytest

from ..support import REPO, environment

nbformat = pytest.importorskip("nbformat", reason="needs the extra notebook")
PATH = REPO / "examples" / "first_run.ipynb"


def test_it_is_kept_without_outputs():
    notebook = nbformat.read(PATH, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) == 4
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.mark.slow
def test_every_cell_runs_and_the_model_learns(tmp_path, cache, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs the extra notebook")
    for name, value in environment(cache).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(PATH, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3",
                            resources={"metadata": {"path": str(tmp_path)}}).execute()
    trained, drawn, samples = [
        "".join(output.get("text") or output.get("data", {}).get("text/plain", "")
                for output in cell.outputs) for cell in notebook.cells
        if cell.cell_type == "code"][1:]
    assert "held-out accuracy" in trained and "Figure" in drawn and samples.count("\n") == 6
    (image,) = [output.data["image/png"] for cell in notebook.cells
                for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})]
    assert base64.b64decode(image).startswith(b"\x89PNG")
    (metrics,) = tmp_path.glob("outputs/*/*/metrics.jsonl")
    rows = map(json.loads, metrics.read_text().splitlines())
    accuracy = [row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None]
    assert len(accuracy) == 9 and accuracy[-1] > accuracy[0] + 0.1
