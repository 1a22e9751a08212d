# Two commands matter: `make book` and `make test`. Both set .venv up first; a second run installs nothing.

PYTHON ?= python3
PORT ?= 8000
NB ?= $(wildcard notebooks/*.ipynb)
THREADS ?= 1 2 4

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

# What a user's shell may hold: other packages, Python without asserts, notebooks without pictures.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE PYTHONOPTIMIZE MPLBACKEND
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# One thread a process: pytest runs three at a time, for two cores, since some wait for others.
export OMP_NUM_THREADS := 1
unexport MKL_NUM_THREADS OPENBLAS_NUM_THREADS

BUILD = $(VENV)/bin/jupyter-book build . -W -n --keep-going --all
NBVAL = --nbval --nbval-current-env -n 3 --dist loadscope -p no:benchmark

.PHONY: help setup book serve test portable lint bench notebooks figures evidence lock clean

help:
	@echo "make book       set up .venv and build the book to _build/html/index.html"
	@echo "make serve      serve the built book on 127.0.0.1 (PORT=8000)"
	@echo "make test       everything CI runs: lint, strict build, tests, every notebook re-executed and compared"
	@echo "make portable   notebooks again as on an old processor, with 1, 2 and 4 threads (THREADS=2 for one), about 10 minutes"
	@echo "make bench      benchmarks of the loss check"
	@echo "make notebooks  re-execute notebooks in place (NB=notebooks/x.ipynb for one)"
	@echo "make figures    draw the pictures of book/figures anew"
	@echo "make evidence   run the whole engine in every topology and write its record to evidence/, about 10 minutes; with a GPU, that of the GPU too"
	@echo "make lock       compile requirements.in to requirements.txt"
	@echo "make clean      remove what was built; .venv stays"
	@echo "PYTHON=python3.12 names another Python; 3.11 and 3.12 are supported."

setup: $(READY)

$(READY): requirements.txt requirements-releases.txt pyproject.toml
	@version=$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); \
	case "$$version" in \
	3.11|3.12) ;; \
	"") echo "PYTHON=$(PYTHON) does not run; name a Python 3.11 or 3.12, for example: make book PYTHON=python3.11" >&2; exit 1 ;; \
	*) echo "PYTHON=$(PYTHON) is Python $$version, but 3.11 or 3.12 is needed, for example: make book PYTHON=python3.11" >&2; exit 1 ;; \
	esac; \
	"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { \
	echo "PYTHON=$(PYTHON) lacks the modules venv and ensurepip; install them (on Debian and Ubuntu: the package python$$version-venv)" >&2; exit 1; }
	@rm -f $(READY)
	@echo "Setting up $(VENV): a few minutes the first time."
	"$(PYTHON)" -m venv $(VENV)
	$(PY) -m pip install --no-compile --no-deps -r requirements.txt
	$(PY) -m pip install -c requirements.txt torch
	$(PY) -m pip install --no-deps --no-build-isolation -e .
	rm -rf $(VENV)/releases
	for version in $$(sed -n 's/^verl==//p' requirements-releases.txt); do \
	$(PY) -m pip install --no-compile --no-deps --target $(VENV)/releases/verl-$$version verl==$$version || exit 1; done
	@touch $(READY)

book: $(READY)
	$(BUILD)

serve: $(READY)
	@test -f _build/html/index.html || $(BUILD)
	@$(PY) -m cpnorm.serve _build/html $(PORT)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/book.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

test: lint
	$(BUILD)
	$(PY) -m pytest tests notebooks $(NBVAL)

# Instruction sets of 2008 for torch, MKL, oneDNN and numpy: stored outputs must not hang on them.
OLD_CORE = ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 OPENBLAS_CORETYPE=Nehalem

portable: $(READY)
	for threads in $(THREADS); do \
	echo "Notebooks as on an old processor, threads: $$threads"; \
	env $(OLD_CORE) OMP_NUM_THREADS=$$threads MKL_NUM_THREADS=$$threads OPENBLAS_NUM_THREADS=$$threads \
	$(PY) -m pytest $(NB) $(NBVAL) || exit 1; done

bench: $(READY)
	$(PY) -m pytest benchmarks --benchmark-only

notebooks: $(READY)
	$(PY) -m cpnorm.execute $(NB)

figures: $(READY)
	MPLBACKEND=agg $(PY) -W ignore -m cpnorm.figures

evidence: $(READY)
	$(PY) -W ignore -m cpnorm.engine evidence
	$(PY) -W ignore -m cpnorm.gpu evidence

# Keeps the pins that still fit; remove requirements.txt first to move them all.
lock: $(READY)
	$(PY) -m pip install --quiet uv
	$(PY) -m uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate \
		requirements.in -o requirements.txt
	@{ echo "# Written by \`make lock\` from requirements.in, for Python 3.11 and 3.12. Do not edit by hand."; \
	echo "# What a CUDA build of torch needs is left out: \`make\` lets the installed torch ask for it."; \
	grep -vE '^(nvidia-|cuda-|triton==)' requirements.txt; } > $(VENV)/lock.txt
	@mv $(VENV)/lock.txt requirements.txt
	@touch $(READY)

clean:
	rm -rf _build .pytest_cache .ruff_cache .hypothesis .benchmarks
