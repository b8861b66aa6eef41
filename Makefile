# `make help` lists the targets. Everything is installed into .venv, nothing outside this folder.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
READY  := $(VENV)/.ready
RANKS  ?= 2
WORKERS ?= 2

export OMP_NUM_THREADS ?= 1 # several ranks share the cores of one machine

unexport PYTHONDONTWRITEBYTECODE # hundreds of processes would compile the same sources

# Debian's Python comes without ensurepip: virtualenv does the same job
define make-venv
$(PYTHON) -m venv $(@D) 2>/dev/null || { $(PYTHON) -m pip install -q --target $(@D)/.bootstrap virtualenv && PYTHONPATH=$(@D)/.bootstrap $(PYTHON) -m virtualenv -q $(@D); }
endef

.DEFAULT_GOAL := help
.PHONY: help setup demo groups hub test sweep mutants check lint types docs reference pictures site plan doctor bench bench-gate invariance bench-overlap gpu asan tsan compile gate streams check-triton check-torch check-transformers check-megatron check-torchtitan wheel sdist clean

ifneq (,$(filter check-torch check-triton,$(MAKECMDGOALS)))
ifeq (,$(VERSION))
$(error $(filter check-torch check-triton,$(MAKECMDGOALS)): expected the version to try, as in VERSION=$(if $(filter check-torch,$(MAKECMDGOALS)),2.14.1,3.9.0))
endif
endif

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv: pinned packages, this package, its C++ extension

$(READY): constraints.txt pyproject.toml setup.py $(wildcard csrc/*.*)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, found " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	$(make-venv)
	$(PIP) install -q -c constraints.txt setuptools ninja torch
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(READY) ## the main job: train a small GPT on ranks of this machine, and compare with an unsharded run
	$(BIN)/python -m tpkernels train --data data/alice.txt --tp $(RANKS) --sequence-parallel --steps 150 --prove 4 --sample 300 --page out/demo/index.html

groups: $(READY) ## ranks on this machine form every kind of group and use it
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/groups.py

test: $(READY) ## the test suite, on WORKERS processes
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

sweep: $(READY) ## what the test suite leaves out: the rest of its products, and long schedules
	TPKERNELS_SWEEP=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

check: lint types test ## all that CI checks

lint: $(READY) ## style of Python and C++
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror csrc/*.* csrc/tests/*.cpp

types: $(READY) ## static types
	$(BIN)/mypy

asan: $(READY) ## the extension's tests under address and undefined-behaviour sanitizers, in build/asan
	$(BIN)/python csrc/tests/sanitize.py asan

tsan: $(READY) ## the extension used by many threads, under the thread sanitizer, in build/tsan
	$(BIN)/python csrc/tests/sanitize.py tsan

gate: $(READY) ## compile the kernels and run them interpreted, without a GPU
	$(BIN)/python -m tpkernels check

streams: $(READY) ## ranks and streams of our operators executed in many orders, without a GPU
	$(BIN)/python -m bench streams $(if $(ORDERS),--orders $(ORDERS))

compile: $(READY) ## the compile half of the gate
	$(BIN)/python -m tpkernels check --skip numerics

# Pinned as here, but for torch and Triton: what another version of these is tried with
$(VENV)-triton-%/.ready: constraints.txt
	$(make-venv)
	grep -vE '^(torch|triton)==' $< > $(@D)/constraints.txt
	@# the interpreter of Triton 3.6 breaks with numpy 2.4
	$(@D)/bin/python -m pip --disable-pip-version-check install -q triton==$* $(if $(filter 3.6.%,$*),'numpy<2.4',-c $(@D)/constraints.txt numpy) "$$(grep '^torch==' $<)"
	@touch $@

check-triton: $(VENV)-triton-$(VERSION)/.ready ## the gate on another Triton, in a venv of its own: VERSION=3.9.0
	PYTHONPATH=. $(VENV)-triton-$(VERSION)/bin/python -m tpkernels check --allow-no-budgets

TEST_NEEDS := numpy ninja setuptools build packaging pytest pytest-benchmark pytest-xdist hypothesis matplotlib mypy pdoc pyyaml safetensors spmd_types
$(VENV)-torch-%/.ready: constraints.txt
	$(make-venv)
	grep -vE '^(torch|triton)==' $< > $(@D)/constraints.txt
	$(@D)/bin/python -m pip --disable-pip-version-check install -q -c $(@D)/constraints.txt torch==$* $(TEST_NEEDS)
	@touch $@

ANOTHER = cd build/torch-$(VERSION) && $(CURDIR)/$(VENV)-torch-$(VERSION)/bin/python
TESTS ?= tests

# A copy, as the extension of this folder is built for another torch
check-torch: $(VENV)-torch-$(VERSION)/.ready ## suite and gate on another torch, with its Triton, in a venv of its own (5.5 GB with CUDA): VERSION=2.14.1
	rm -rf build/torch-$(VERSION) && git clone -q --shared . build/torch-$(VERSION)
	git ls-files -z -co --exclude-standard | xargs -0 cp --parents -t build/torch-$(VERSION)
	export TPKERNELS_REQUIRE_EXT=1; $(ANOTHER) setup.py -q build_ext --inplace
	$(ANOTHER) -m bench.cuda_build
	$(ANOTHER) -m pytest -n $(WORKERS) --dist worksteal $(TESTS)
	$(ANOTHER) -m tpkernels check --allow-no-budgets

check-transformers: $(READY) ## compare with Hugging Face's transformers, which it installs (180 MB): tests
	$(PIP) install -q -c constraints.txt safetensors transformers accelerate peft lightning kernels
	$(BIN)/python -m pytest tests/interop tests/test_docs.py -k "interop or README or huggingface or lora or trainers"

check-megatron: $(READY) ## train Megatron-Core's own GPTModel, which it installs (17 MB), with its layers and with ours
	$(PIP) install -q -c constraints.txt megatron-core
	$(BIN)/python -m pytest tests/interop tests/test_docs.py -k "megatron_core or megatron.md"

# Of the pins only these: torchtitan 0.3.0 requires older versions of spmd_types and, by way of datasets, of fsspec
$(VENV)-torchtitan/.ready: constraints.txt
	$(make-venv)
	grep -E '^(torch|torchtitan|triton|numpy|pytest|hypothesis)' $< > $(@D)/constraints.txt
	$(@D)/bin/python -m pip --disable-pip-version-check install -q -c $(@D)/constraints.txt torch triton $(TEST_NEEDS) torchtitan
	@touch $@

check-torchtitan: $(VENV)-torchtitan/.ready ## torchtitan's layers and Llama on our ops, with its checker of types, in a venv of its own (2.3 GB)
	$(VENV)-torchtitan/bin/python -m pytest tests/interop/test_torchtitan.py

docs: $(READY) ## run the code blocks and commands of README and docs
	$(BIN)/python -m pytest tests/test_docs.py

reference: $(READY) ## the API reference, from docstrings, as HTML in out/reference
	$(BIN)/python docs/reference.py out/reference

pictures: $(READY) ## the pictures of the pages, docs/*.svg, from recorded runs and from groups that are made
	$(BIN)/python -m docs.pictures

site: $(READY) ## pages and API reference as a site to search, in out/site, with mkdocs-material, which it installs (15 MB)
	$(PIP) install -q -c constraints.txt mkdocs-material
	$(BIN)/python docs/site.py out/site

plan: $(READY) ## the 16-GPU lesson example, in words and as plan.svg
	$(BIN)/python -m tpkernels plan --world-size 16 --tp 2 --pp 4 --svg plan.svg

doctor: $(READY) ## what this machine has, and what is wrong with it
	$(BIN)/python -m tpkernels doctor

bench: $(READY) ## benchmarks, with ratios against the naive way
	$(BIN)/python -m pytest bench

bench-gate: $(READY) ## count what ops do, and compare with the baseline
	$(BIN)/python -m bench gate

invariance: $(READY) ## train at tensor-parallel sizes 1 to 8 under TP-invariance, and compare all bits
	$(BIN)/python -m bench invariance

mutants: $(READY) ## plant faults of one line, and see which of them the tests notice; SEED=N for others (an hour)
	$(BIN)/python -m bench.mutants $(if $(SEED),--seed $(SEED)) $(if $(RESUME),--resume)

bench-overlap: $(READY) ## what communication hides behind computation, on a throttled link; needs root
	$(BIN)/python -m pytest -s bench/test_overlap.py

gpu: ## on a machine with a GPU, with its own Python and torch: kernels, times, tests, gate; JSON into OUT or out/gpu; QUICK=1: nine minutes
	@exec $(PYTHON) -m bench gpu $(if $(QUICK),--quick) $(if $(REHEARSE),--rehearse) $(if $(STAGES),--stages $(STAGES)) $(if $(RESUME),--resume) $(if $(DRY_RUN),--dry-run)

hub: $(READY) ## local ops as a package for Hugging Face's kernels, in out/hub
	$(BIN)/python -m tpkernels.interop.hub out/hub

wheel: $(READY) ## dist/tpkernels-*.whl, for every Python and torch: it builds its C++ extension at first use
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build --wheel

sdist: $(READY) ## the source distribution
	$(BIN)/python -m build --sdist --no-isolation

clean: ## remove what the other targets made
	rm -rf $(VENV) $(VENV)-torchtitan $(VENV)-triton-* $(VENV)-torch-* build dist out/* *.egg-info tpkernels/*.so plan.svg
