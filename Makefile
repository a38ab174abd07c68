# Two commands on a fresh machine: `make demo` and `make test`. Python 3.11+ and make are all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The release of Flower: the last one whose nodes speak gRPC, at a port of their own. Others: docs/deploy.md.
FLOWER ?= 1.39.*
# PyTorch, exactly; TORCH_INDEX is another package index to take it from, such as that of builds for CPUs.
TORCH ?= 2.13.0
TORCHVISION ?= 0.28.0
TORCH_INDEX ?=

ifneq ($(words $(CURDIR)),1)
$(info The path $(CURDIR) has a space: simulations run in it, and Flower's SuperLink (flwr run, fedprune deploy) does not)
endif

.PHONY: gallery settings site site-serve demo test full programs quick test-all record-hashes rehearsal flower-releases faults faults-sim planted-bugs lint fuzz format lock benchmarks clean

demo: $(STAMP)
	$(BIN)/fedprune demo --out runs/demo

# Two workers: the tests of a file share their federations in one of them, and so does the conformance of a system.
test: $(DEV_STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

# More systems, networks, faults and random inputs than `make test` has, and nothing that it has but the random inputs.
full: $(DEV_STAMP)
	HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder \
	    -m "(full or hypothesis) and not (slow or gpu or programs)"

# What waits for Flower's and Ray's own programs more than it computes: three workers hide the waiting.
programs: $(DEV_STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder -m "programs and not slow" --durations=15

# The inner loop, under a minute on two quiet cores: laws, training, options, rounds, and every system's recorded hash.
QUICK := $(addprefix tests/,laws learning clients config federation test_architecture.py conformance/test_recorded.py)
quick: $(DEV_STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal $(QUICK)

test-all: $(DEV_STAMP)
	$(BIN)/python -m pytest -m ""

# What docs/deploy.md says: the transcript of a deployment, and what becomes of it when things break. Minutes each.
rehearsal: $(DEV_STAMP)
	$(BIN)/python -m pytest -m slow tests/e2e/test_rehearsal.py tests/e2e/test_node_policies.py

# Every other release of Flower, in an environment of its own: the same models on all engines, resumed or not. An hour.
RELEASES ?= 1.40 1.41 1.42
flower-releases: $(DEV_STAMP)
	$(BIN)/python tests/e2e/release_environments.py .releases $(RELEASES)
	FEDPRUNE_FLOWER_ENVIRONMENTS=$(abspath .releases) $(BIN)/python -m pytest -m slow tests/e2e/test_flower_releases.py

faults: $(DEV_STAMP)
	$(BIN)/python -m pytest -m slow tests/e2e/test_deployment_faults.py

# What every system ends with, recorded anew: only where a change is meant to change results (see tests/conformance/recorded.py).
record-hashes: $(DEV_STAMP)
	RECORD_HASHES=1 $(BIN)/python -m pytest -q tests/conformance/test_recorded.py

# Deaths, lost data and bad messages, each seed a schedule: SEEDS=0:1000 SYSTEMS="dispfl fedp3"
SEEDS ?= 0:200
SYSTEMS ?= subfedavg dispfl fedp3 ldp-fedp3 fedltp
faults-sim: $(STAMP)
	$(BIN)/python -m devtools.faults --seeds $(SEEDS) $(addprefix --system ,$(SYSTEMS))

# After how many schedules each planted bug is found, written to docs/data/faults/planted.csv.
planted-bugs: $(DEV_STAMP)
	rm -f docs/data/faults/planted.csv
	PLANTED_BUGS=docs/data/faults/planted.csv $(BIN)/python -m pytest -q -m "" tests/faults -k planted_bugs
	$(BIN)/python docs/scripts/fault_tables.py

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A million inputs of what a model travels in, two minutes of everything else.
FUZZ := reply reply_object introduction statement state export run_config matrix jsonl run_info image_folder text_folder
FUZZED = $(BIN)/python devtools/fuzz/fuzz.py $(1) $(2) -rss_limit_mb=2048 -timeout=10 devtools/fuzz/corpus/$(1)
fuzz: $(DEV_STAMP)
	$(PIP) install --quiet --editable '.[fuzz]'
	$(call FUZZED,codec_bytes,-runs=1000000)
	for target in $(FUZZ); do $(call FUZZED,$$target,-max_total_time=120) || exit 1; done

format: $(DEV_STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The rows of docs/data/gallery.csv that are missing, some seconds each, and its table.
gallery: $(DEV_STAMP)
	$(BIN)/python docs/scripts/gallery_rows.py

# The packages of the container image, at today's versions: docker/*.lock.
lock: $(DEV_STAMP)
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python docker/lock.py

BENCHMARKS := $(filter-out benchmarks/_% $(addprefix benchmarks/,gpu.py llm_speed.py zero_shot.py),$(wildcard benchmarks/*.py))
benchmarks: $(DEV_STAMP)
	for script in $(BENCHMARKS); do $(BIN)/python $$script || exit 1; done

# torch first and exactly, with its torchvision: a range would let the resolver take newer ones, with gigabytes of CUDA packages.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "error: $(PYTHON) is too old, allowed: Python 3.11 or later (make PYTHON=python3.12 ...)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "error: $(PYTHON) has no module venv: install it (on Debian and Ubuntu the package python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml hatch_build.py $(wildcard fedprune_app/core/native/*.c) | $(BIN)/python
	@[ -n "$(TORCH_INDEX)" ] || command -v nvidia-smi >/dev/null || \
	    echo "No NVIDIA GPU here: TORCH_INDEX=..., the address that pytorch.org names for CPU, makes the download 4 GB smaller."
	$(PIP) install --quiet torch==$(TORCH) torchvision==$(TORCHVISION) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) install --quiet 'flwr[simulation]==$(FLOWER)' --editable '.[all]'
	touch $@

$(DEV_STAMP): $(STAMP)
	$(PIP) install --quiet --editable '.[dev]'
	touch $@

# The page of all settings, docs/reference/settings.md, from their declarations.
settings: $(DEV_STAMP)
	$(BIN)/python docs/scripts/settings_page.py

# The documentation as a site, in site/.
site: $(DEV_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

site-serve: $(DEV_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) .releases .pytest_cache .mypy_cache .ruff_cache
