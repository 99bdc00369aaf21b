# Two commands on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `make test PARITY=` leaves out PyTorch, transformers and the tests that compare with them
PARITY ?= parity
AHEAD := $(VENV)-ahead
# what tests need: tools, and PyTorch unless it is left out
TESTED := $(VENV)/installed-test $(if $(PARITY),$(VENV)/installed-parity,without-parity)
# the newest Python that is tested, where there is one that runs (pyenv has commands that don't)
NEWEST_PYTHON := $(firstword $(wildcard $(HOME)/.pyenv/versions/3.13*/bin/python3.13) $(shell python3.13 -c 'import sys; print(sys.executable)' 2>/dev/null))
# Python compiles a package at its first import and keeps that, which takes half the time of compiling
# all of them when they are installed
unexport PYTHONDONTWRITEBYTECODE
comma := ,

# tests of a file stay with one worker, which compiles their programs once and then lets go of them
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(if $(PARITY),,--ignore=tests/parity)
# every code block of the documents, every lesson, every figure: a change of the code alone rarely
# breaks them, and they take as long as a third of the others
DOCS_TESTS := tests/test_documents.py tests/test_figures.py tests/test_gpu_benchmark.py \
	tests/test_lesson_checks.py tests/test_notebooks.py tests/test_one_page_gpt.py \
	tests/test_parts.py tests/test_site.py

.PHONY: train test without-parity test-docs test-all test-here test-ahead plain-install test-matrix lint notebooks student docs pictures

train: $(VENV)/installed-train
	$(BIN)/jgpt train
	@echo "here jgpt is $(BIN)/jgpt, or after: source $(BIN)/activate"

test: $(TESTED)
	@echo "Minutes on two cores, most of them compiling; a dot is a test."
	@$(PYTEST) -q -m "not slow" $(addprefix --ignore=,$(DOCS_TESTS))

# the quick tests of documents, lessons and figures; those of the site need `make docs` first
test-docs: $(TESTED)
	@$(PYTEST) -q -m "not slow" $(DOCS_TESTS)

test-all: test-here test-ahead

test-here: $(TESTED)
	$(PYTEST) --durations=20

# compilers for TPUs and GPUs have an environment of their own: where they are, JAX looks for the hardware
test-ahead: $(AHEAD)/installed
	JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(AHEAD)/bin/python -m pytest tests/training/test_ahead.py

plain-install:
	PYTHON=$(or $(NEWEST_PYTHON),$(PYTHON)) .ci/plain-install

test-matrix:
	.ci/test-matrix | tee benchmarks/results/test_matrix.md

# pyright reads the tests, too, where what they import is installed
lint: $(VENV)/installed-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright $(if $(wildcard $(VENV)/installed-parity),,jgpt)

# lessons 8 and 15 compare with PyTorch and transformers
notebooks: $(VENV)/installed-notebooks
	@.ci/parity $(BIN)/python
	$(BIN)/python notebooks/refresh.py

# lessons with starters in place of solutions in student/, and solved in teacher/
student: $(VENV)/installed-student
	$(BIN)/python notebooks/student.py

# from nothing, and nothing stays of a site with a warning: the tests of the site read it
docs: $(VENV)/installed-docs
	rm -rf site
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . site || (rm -rf site; exit 1)
	@echo site/index.html

# trains for a minute
pictures: $(VENV)/installed-train
	$(BIN)/python docs/pictures.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# installed again only when what to install has changed
$(VENV)/installed-train: pyproject.toml | $(BIN)/python
	@echo "pip downloads up to 220 MB into $(VENV)"
	$(BIN)/python -m pip install --no-compile --editable .
	touch $@

# the extra of a target; or those of several, which run side by side afterwards
$(VENV)/installed-%: pyproject.toml | $(BIN)/python
	@echo "pip downloads up to $(DOWNLOADED) into $(VENV)"
	$(BIN)/python -m pip install --no-compile --editable '.[$*]'
	touch $(addprefix $(VENV)/installed-,train $(subst $(comma), ,$*))

$(VENV)/installed-docs: DOWNLOADED := 250 MB
$(VENV)/installed-lint: DOWNLOADED := 230 MB
$(VENV)/installed-notebooks: DOWNLOADED := 260 MB
$(VENV)/installed-student: DOWNLOADED := 220 MB
$(VENV)/installed-test: DOWNLOADED := 320 MB
$(VENV)/installed-docs,lint,test: DOWNLOADED := 340 MB

# tried again by the next `make test` where PyTorch without CUDA isn't to be had
$(VENV)/installed-parity: pyproject.toml | $(VENV)/installed-test
	@if .ci/parity $(BIN)/python; then touch $@; fi

without-parity:
	@.ci/parity || true

# beside the packages of $(VENV); cuDNN without cuBLAS, and its graphs without what computes them, since
# a step is compiled there and never run
$(AHEAD)/installed: pyproject.toml | $(VENV)/installed-test
	$(PYTHON) -m venv $(AHEAD)
	packages='import sysconfig; print(sysconfig.get_path("purelib"))' && \
	$(BIN)/python -c "$$packages" > $$($(AHEAD)/bin/python -c "$$packages")/beside.pth
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && \
	$(AHEAD)/bin/python -m pip install --no-compile "jax[tpu]==$$version" && \
	$(AHEAD)/bin/python -m pip install --no-compile --no-deps \
		jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version nvidia-cudnn-cu12
	find $(AHEAD) -name 'libcudnn_*' ! -name '*_graph.*' ! -name '*_runtime_compiled.*' -delete
	touch $@
