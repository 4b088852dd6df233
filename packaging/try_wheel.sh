#!/usr/bin/env bash
# What was built, as a user gets it: the checks of the package index, then a fresh environment without
# this repository, in which a new experiment is trained, predicted with and reported.
#
#     packaging/try_wheel.sh dist [python]
set -euo pipefail
built=$(cd "$1" && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"${2:-python3}" -m venv "$place/venv"
export PATH="$place/venv/bin:$PATH" PYTHONPATH=
pip install --quiet --disable-pip-version-check twine
twine check --strict "$built"/*
pip uninstall --quiet --yes twine
pip install --quiet --disable-pip-version-check "$(echo "$built"/*.whl)[pictures]"
cd "$place"
plurax doctor
plurax new mine.py
plurax train mine.py --epochs 2
python -c "import numpy; numpy.save('inputs.npy', numpy.zeros((3, 2), 'float32'))"
python -c "import numpy; numpy.savez('inputs.npz', x=numpy.load('inputs.npy'))"
plurax predict runs/mine --inputs inputs.npz
plurax report runs/mine
plurax examples
plurax examples spirals
plurax plan spirals.py
echo "the wheel works without the repository"
