# Everything starts here: `make demo` and `make test` need nothing but Python 3.11 or newer.
#
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu   the small CPU build of torch on Linux
#   make demo TORCH=own                                          keep the torch that this Python has already

PYTHON ?= python3
VENV ?= .venv
TORCH ?= pinned
TORCH_INDEX ?=
TWINE := 7.0.0
BIN := $(VENV)/bin
EXTRAS := flower,transformers,peft,pandas,docs,dev
PARALLEL := -n auto --dist worksteal  # neighbours stay on one core and share what is made once for a file
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo setup environments test test-core test-all test-kernels test-faults faults-planted mutants mutants-short bench bench-cuda reproduce-smoke docs check format hooks dist release-check test-pythons clean

# What can turn out differently without the extras: imports, the command line, the wheel, the list of networks, recipes
# at their smallest size, a run from the request to the report. All else is the same code on the same packages.
CORE_TESTS := tests/test_without_extras.py tests/test_architecture.py tests/test_cli.py tests/test_packaging.py \
  tests/test_public_api.py tests/test_recipe.py tests/test_smoke.py tests/models

demo: setup
	$(BIN)/fedquit demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "not slow and not faults"

# With the slow ones, which `make test` leaves out.
test-all: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) --by-file -m "not faults"

# Real federations on this machine whose processes are killed. They also wait (for a node that was killed, a minute), so
# three at a time on two cores.
test-faults: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v -n 3 --dist worksteal --by-file -m faults tests/flower

# Faults that are planted in a copy of the tree, one at a time, and must be caught by the tests named with each.
faults-planted: setup
	$(BIN)/python benchmarks/planted_faults.py

# Mutation testing: a fixed sample of small changes, each of which some test must notice. Up to two hours on two cores.
mutants: setup
	$(BIN)/python benchmarks/mutants.py

# Fifteen of them that were killed before, by the tests that killed them.
mutants-short: setup
	$(BIN)/python benchmarks/mutants.py --short

# The package must work without its extras: in an environment that has none of them all tests can be collected, and
# those run whose outcome can depend on it.
test-core: $(VENV)-core/.ready
	$(VENV)-core/bin/python -c "import importlib.util as u; assert not u.find_spec('flwr') and not u.find_spec('transformers')"
	$(VENV)-core/bin/python -m pytest --collect-only -qq > /dev/null
	OMP_NUM_THREADS=1 $(VENV)-core/bin/python -m pytest $(PARALLEL) -m "not slow and not flower and not transformers" $(CORE_TESTS)

# Triton's interpreter runs the GPU's kernels on a CPU, slowly; Triton alone is fetched, beside the environment.
test-kernels: setup
	test -d $(VENV)/kernels || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/kernels triton==3.9.0
	OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/kernels TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n auto tests/engine/test_kernels.py

# The other frameworks have an environment of their own: pfl needs an older attrs than Flower's is tested with.
bench: $(VENV)-bench/.ready
	$(VENV)-bench/bin/fedquit bench round --peers flower,pfl,fluke --out runs/bench

# The same on a GPU, with whatever torch and Triton this Python has: all four, and a failure at the end if one failed.
bench-cuda:
	failed=; for what in round agree unlearn scale; do PYTHONPATH=src $(PYTHON) -m fedquit bench $$what --device cuda --out runs/bench || failed="$$failed $$what"; done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pip check

# The pipeline of the paper's studies at toy size on a CPU, from the study's file to the pages: under three minutes.
reproduce-smoke: setup
	OMP_NUM_THREADS=1 $(BIN)/fedquit study run smoke --out runs/reproduce-smoke
	$(BIN)/fedquit report runs/reproduce-smoke
	$(BIN)/fedquit paper runs/reproduce-smoke --out runs/reproduce-smoke --smoke

# The documentation as a site in build/site: a warning, or a link that leads nowhere, is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# The sdist, and the wheel made from it.
dist: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

# Before a release: version, changelog, the page on an index, the project's URLs, all files in the sdist.
release-check: dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check twine==$(TWINE)
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python release/check.py dist/*.tar.gz dist/*.whl

# The wheel on every Python that pyproject.toml names, each in an environment of its own; gigabytes, so not in regular CI.
# PYTHONS=3.12,3.13 chooses.
test-pythons: dist
	$(PYTHON) release/pythons.py dist/*.whl $(if $(PYTHONS),--pythons $(PYTHONS))

# Git runs the checks before every commit: the hooks are the project's own tools, nothing is fetched.
hooks: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt pre-commit
	$(BIN)/pre-commit install

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

setup: $(VENV)/.ready

environments: $(VENV)/.ready $(VENV)-core/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(call install,$(VENV),$(EXTRAS))

$(VENV)-core/.ready: pyproject.toml constraints.txt
	$(call install,$(VENV)-core,dev)

$(VENV)-bench/.ready: pyproject.toml constraints.txt
	$(call install,$(VENV)-bench,bench,attrs)

# $(1) the environment, $(2) the extras, $(3) a package whose version is left open
define install
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'fedquit needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.11')"
	$(PYTHON) -m venv $(if $(filter own,$(TORCH)),--system-site-packages) $(1)
	grep -vE '^($(if $(filter own,$(TORCH)),torch,-)|$(or $(3),-))==' constraints.txt > $(1)/constraints.txt
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(INDEX) -c $(1)/constraints.txt -e '.[$(2)]'
	touch $(1)/.ready
endef

clean:
	rm -rf $(VENV) $(VENV)-core $(VENV)-bench dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
