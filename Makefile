# Orthogonal random attention, measured. `make` lists what can be made.
#
# Everything runs in .venv, which is set up once and again only when pyproject.toml or constraints.txt change.
# PYTHON names the interpreter to set it up with; EXACT=1 takes the very files of requirements/, with PyTorch for CPUs.
# To use an environment of your own (conda), say `make PY=python ...`.

PYTHON ?= python3
PY ?= .venv/bin/python
EXTRAS := book,test,dev,hf,cluster,experiments,translation,browser
READY := $(if $(filter .venv/bin/python,$(PY)),.venv/.ready)
INSTALL := -m pip install --quiet --disable-pip-version-check --no-input

HTML := _build/html
BOOK := $(abspath $(HTML))
PORT ?= 8000
NOTEBOOKS ?=
TESTS ?=
BUDGET ?=
JOBS ?=
LIMITS = $(if $(BUDGET),--budget $(BUDGET)) $(if $(JOBS),--jobs $(JOBS))

.DEFAULT_GOAL := help
.PHONY: help env exact book html pages pdf paper serve execute check test browser lint experiments lock triton clean
.SUFFIXES:

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(READY) ## set up .venv at the versions of constraints.txt (EXACT=1: from the files of requirements/)

# PyTorch first, as it has an index of its own. What pip would resolve is complete there.
exact: ## install the files of requirements/, by their hashes, into the environment of PY
	@$(PY) $(INSTALL) --no-deps --require-hashes -r requirements/torch.txt
	@$(PY) $(INSTALL) --no-deps --require-hashes -r requirements/exact.txt
	@$(PY) $(INSTALL) --no-deps --no-build-isolation -e .

# In a copy of the tree, so that this one stays as it is, also where another processor draws another pixel.
book: $(READY) ## execute every notebook and build the pages, all in _build
	@rm -rf _build/executed && mkdir -p _build/executed
	@tar -c --exclude=./_build --exclude=./.venv --exclude=./.git --exclude='*.part' . | tar -x -C _build/executed
	@$(MAKE) --no-print-directory -C _build/executed PY=$(if $(findstring /,$(PY)),$(abspath $(PY)),$(PY)) BOOK=$(BOOK) execute html
	@rm -rf $(HTML) && mv _build/executed/$(HTML) $(HTML)

html: $(READY) ## build the pages from the stored outputs, warnings as errors
	@rm -rf $(HTML)
	@$(MAKE) --no-print-directory -j 2 pages check $(HTML)/article.pdf
	@echo "The book: file://$(BOOK)/index.html"

# Pages are trees of many objects that stay: Python's collector, as it is set, takes a fifth of the time going through
# them again and again.
pages:
	@$(PY) -c 'import gc; gc.set_threshold(50_000); from jupyter_book.cli.main import main; main()' build . -W -n --keep-going --all -q >/dev/null

$(HTML)/article.pdf:
	@$(PY) -m tools.article $@ >/dev/null

paper: $(READY) ## typeset the article on all of this, _build/article.pdf, from what the executed pages show
	@$(PY) -m tools.article

pdf: html ## print the pages as one PDF, _build/book.pdf, in Chromium (CHROMIUM=/path/to/another)
	@$(PY) tools/pdf.py

serve: $(READY) ## serve the built book on this machine (PORT=8000)
	@test -f $(HTML)/index.html || $(MAKE) --no-print-directory html
	@echo "The book: http://127.0.0.1:$(PORT)/ (stop with Ctrl-C; if the port is taken: make serve PORT=8001)"
	@$(PY) -m http.server --bind 127.0.0.1 --directory $(HTML) $(PORT)

execute: $(READY) ## for authors: run notebooks in place (NOTEBOOKS="..." for some; FRESH=1 takes live timings anew)
	@$(PY) -m tools.notebooks execute $(if $(FRESH),--fresh) $(NOTEBOOKS)
	@$(PY) tools/readme.py

check: $(READY) ## reject notebooks that are not fully executed, fail, warn or assert nothing
	@$(PY) -m tools.notebooks check

test: $(READY) ## unit tests, then every notebook, strictly compared (TESTS="..." for some; ORTHO_TESTS=all for more)
ifneq ($(TESTS),)
	$(PY) -m pytest --nbval -n auto --dist loadfile $(TESTS)
else
	$(PY) -m pytest -n auto --dist worksteal
	OMP_NUM_THREADS=1 $(PY) -m pytest --nbval -n auto --dist loadfile notebooks book
endif

browser: $(READY) ## look at every built page in Chromium (CHROMIUM=/path/to/another)
	@test -f $(HTML)/index.html || $(MAKE) --no-print-directory html
	@ORTHO_BROWSER=required $(PY) -m pytest tests/browser -m browser -n auto --dist loadgroup

lint: check ## style, types, direction of imports
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

experiments: $(READY) ## measure what has no record (BUDGET=seconds a pass, JOBS=runs side by side)
	-$(PY) -m paper experiments $(LIMITS)
	$(PY) -m tools.rates
	$(PY) -m paper experiments $(LIMITS)

lock: ## rewrite requirements/exact.txt, the hashes of what constraints.txt names, with uv
	uv pip compile --quiet --universal --python-version 3.11.5 --generate-hashes --no-annotate --all-extras \
	  --constraints constraints.txt --no-emit-package torch --output-file requirements/exact.txt pyproject.toml

triton: $(READY) ## install Triton (1 GB), whose interpreter tests the kernel for GPUs on a CPU
	@$(PY) $(INSTALL) 'triton>=3.3,<4'

clean: ## remove what was built, not .venv
	rm -rf _build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
	find ortho tests tools notebooks book -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready: pyproject.toml constraints.txt $(if $(EXACT),$(wildcard requirements/*.txt))
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON): install Python 3.11 or newer, or name one: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$$($(PYTHON) -V 2>&1) is too old: Python 3.11 or newer is needed; name one: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make environments: install its venv module (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@.venv/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv || { echo "$(PYTHON) could not make .venv: check that this folder can be written to"; exit 1; }
	@echo "Installing into .venv; this takes minutes, once."
	@$(if $(EXACT),$(MAKE) --no-print-directory exact,.venv/bin/python $(INSTALL) -c constraints.txt -e '.[$(EXTRAS)]') || { echo "The installation failed, for the reason above: check the network, or pip's settings, and run make again"; exit 1; }
	@touch $@
