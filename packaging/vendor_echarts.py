"""Take Apache ECharts from npm into the package, for the page of `plurax report`.

    make echarts                    the version that is there now, anew
    make echarts VERSION=6.2.0      another one

`npm pack` checks what it downloads against the registry's checksum. What is written: the minified
library, its licences, and `echarts.toml` with the version and checksums, which a test compares.
"""

import argparse
import hashlib
import json
import subprocess
import tarfile
import tempfile
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "src" / "plurax" / "report" / "page" / "vendor"
TAKEN = {
    "package/dist/echarts.min.js": "echarts.min.js",
    "package/LICENSE": "LICENSE",
    "package/NOTICE": "NOTICE",
    "package/licenses/LICENSE-d3": "LICENSE-d3",
}
"""The files of the npm package, and their names here."""


def main() -> None:
    """Download a version, write its files, and print what was written."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("version", nargs="?", default=current_version())
    version = options.parse_args().version
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["npm", "pack", "--json", "--silent", f"echarts@{version}"],
            cwd=folder, check=True, capture_output=True, text=True,
        )  # fmt: skip
        packed = json.loads(done.stdout)
        found = packed[0] if isinstance(packed, list) else next(iter(packed.values()))
        with tarfile.open(Path(folder) / found["filename"]) as archive:
            files = {ours: _content(archive, theirs) for theirs, ours in TAKEN.items()}
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (FOLDER / name).write_bytes(content)
    (FOLDER / "echarts.toml").write_text(described(found["version"], found["integrity"], files))
    print(f"wrote {FOLDER}: echarts {found['version']}, {len(files['echarts.min.js']):,} bytes")


def current_version() -> str:
    """Return the version that the package holds, or the newest of major version 6."""
    path = FOLDER / "echarts.toml"
    return tomllib.loads(path.read_text())["version"] if path.exists() else "6"


def described(version: str, integrity: str, files: dict[str, bytes]) -> str:
    """Return the text of `echarts.toml`."""
    lines = [
        "# Written by packaging/vendor_echarts.py.",
        'name = "Apache ECharts"',
        f'version = "{version}"',
        'source = "https://www.npmjs.com/package/echarts"',
        f'integrity = "{integrity}"',
        "",
        "[sha256]",
        *(f'"{name}" = "{hashlib.sha256(data).hexdigest()}"' for name, data in files.items()),
    ]
    return "\n".join(lines) + "\n"


def _content(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(name)
    assert member is not None, name
    return member.read()


if __name__ == "__main__":
    main()
