"""Executes the notebooks of docs/notebooks: notebooks.py [--write]

With --write the results, pictures too, are saved in the notebooks.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[2] / "docs/notebooks"


def main():
    notebooks = sorted(FOLDER.glob("*.ipynb"))
    if not notebooks:
        sys.exit(f"{FOLDER} has no notebooks")
    for path in notebooks:
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}).execute()
        kinds = [kind for cell in notebook.cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
        if "image/png" not in kinds:
            sys.exit(f"{path.name} shows no picture")
        if "--write" in sys.argv[1:]:
            for cell in notebook.cells:
                cell.metadata.pop("execution", None)  # times, which differ each time
            nbformat.write(notebook, path)
        print(f"{path.name}: {len(notebook.cells)} cells, {kinds.count('image/png')} pictures")


if __name__ == "__main__":
    main()
