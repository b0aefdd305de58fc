# Every target is one command on a machine with Python 3.11, make and a compiler: it makes .venv,
# installs what it needs, runs, and prints its result on the last line.

PYTHON ?= python3.11
# A pin for the whole project. On an index that also serves CPU builds, pip may need its option
# for choosing that index, given in PIP_OPTIONS.
TORCH ?= torch==2.13.0
PIP_OPTIONS ?=

BIN := .venv/bin
RAY := .venv/.installed-ray
ALL := .venv/.installed-all
export HF_HUB_OFFLINE := 1

.PHONY: install install-all demo demo-crash chaos test explore lint bench clean

install: $(RAY)  ## base and ray
	@echo "installed into .venv: sc_core and sc_ray"

install-all: $(ALL)  ## everything that fits this machine
	@echo "installed into .venv: sc_core, sc_ray, trio, uvloop and the tools for development"

demo: $(RAY)  ## train on the built-in task; a second run resumes
	$(BIN)/python -m sc_ray train --config demo --out runs/demo

demo-crash: $(RAY)  ## the same, killed with SIGKILL in the middle, resumed and audited
	rm -rf runs/demo-crash
	$(BIN)/python -m sc_ray.demo_crash --out runs/demo-crash

chaos: $(ALL)  ## real runs, stopped at 11 moments, then killed 50 times at random ones; an hour
	rm -rf runs/stops runs/chaos
	$(BIN)/python -m sc_ray.stops --out runs/stops
	$(BIN)/python -m sc_ray.chaos --out runs/chaos

test: $(ALL)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --ignore tests/ray
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/ray

lint: $(ALL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

explore: $(ALL)  ## kill whole runs at every await and every disk effect: ten minutes or so
	$(BIN)/python -m sc_core.testing

bench: $(ALL)
	$(BIN)/python -m benchmarks.bench_barrier
	$(BIN)/python -m benchmarks.bench_index
	$(BIN)/python -m benchmarks.bench_controller
	$(BIN)/python -m benchmarks.bench_window
	$(BIN)/python -m benchmarks.bench_status

clean:  ## forget the environment; runs stay
	rm -rf .venv
	@echo "removed .venv"

$(BIN)/python:
	$(PYTHON) -m venv .venv

$(RAY): pyproject.toml | $(BIN)/python
	@echo "installing torch, ray and what they need into .venv: about 1.5 GB, some minutes"
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) "$(TORCH)" -e ".[ray]"
	@touch $@

$(ALL): pyproject.toml | $(BIN)/python
	@echo "installing torch, ray and the tools for development into .venv: some minutes"
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) "$(TORCH)" -e ".[ray,trio,uvloop,dev]"
	@touch $@ $(RAY)
