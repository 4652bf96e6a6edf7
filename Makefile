# The targets set up the environment that they need, once.

PYTHON ?= python3
TASK ?= retinanet
ARGS ?=
# A compiled mmcv to take instead of compiling it.
MMCV_WHEEL ?=
# Python's own flags without debug symbols, which take a third of the time.
MMCV_CFLAGS := -DNDEBUG -fwrapv -O3 -g0 $(CFLAGS)
# One test per core, and at most four: each needs much memory.
PYTEST := -m pytest tests projects --numprocesses auto --maxprocesses 4 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help env env-openmmlab demo docs lint format test test-all test-openmmlab clean distclean

help:
	@echo 'make demo             train and test a small model, and the same reparameterized'
	@echo '                      (TASK=retinanet, the default, mask_rcnn, upernet or speed_up)'
	@echo 'make test             run the tests (ARGS="-k ffn" goes to pytest)'
	@echo 'make test-all         the tests that take minutes too, and random cases anew'
	@echo 'make docs             build the site in build/site, and run its tutorial (Python 3.11 or newer)'
	@echo 'make lint             check the style of the code; make format repairs it'
	@echo 'make env              only the set-up: .venv with the main stack'
	@echo 'make env-openmmlab    .venv-openmmlab with the last OpenMMLab releases'
	@echo 'make test-openmmlab   run the tests on those'
	@echo 'make clean            remove caches and build products'
	@echo 'make distclean        remove the environments too'
	@echo
	@echo 'Variables: PYTHON=python3.11 the Python to build on; MMCV_WHEEL=file a wheel'
	@echo 'of mmcv to use instead of compiling; MAX_JOBS=n compiler processes at a time.'

env: .venv/ready
.venv/ready: requirements/onedl.txt setup.py repa_mm/version.py
	$(call install,.venv,$<,onedl-mmcv)

env-openmmlab: .venv-openmmlab/ready
.venv-openmmlab/ready: requirements/openmmlab.txt setup.py repa_mm/version.py
	$(call install,.venv-openmmlab,$<,mmcv)

# Install a stack: $(1) its folder, $(2) its pins, $(3) its mmcv. mmcv fits only the PyTorch that it
# is compiled against, which therefore comes first; the wheel stays in the environment. The pins are
# complete: with their dependencies would come opencv-python, which needs libGL.
define install
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install --quiet --constraint $(2) uv
	$(1)/bin/uv pip install --python $(1) --constraint $(2) torch torchvision numpy setuptools wheel ninja
	set -e; wheels=$(1)/mmcv-for-$$(grep --only-matching '^torch==[^ ]*' $(2)); \
	if [ -n '$(MMCV_WHEEL)' ]; then mkdir -p $$wheels; cp '$(MMCV_WHEEL)' $$wheels; fi; \
	ls $$wheels/*.whl >/dev/null 2>&1 || MMCV_WITH_OPS=1 CFLAGS='$(MMCV_CFLAGS)' \
	$(1)/bin/pip wheel --verbose --no-build-isolation --no-deps --no-cache-dir \
	--no-binary $(3) --wheel-dir $$wheels $$(grep --only-matching '^$(3)==[^ ]*' $(2)); \
	$(1)/bin/uv pip install --python $(1) --no-deps $$wheels/*.whl
	$(1)/bin/uv pip install --python $(1) --no-deps --requirement $(2)
	$(1)/bin/uv pip install --python $(1) --no-deps --no-build-isolation --editable .
	$(1)/bin/python -c 'import repa_mm; print("repa_mm", repa_mm.__version__)'
	@touch $@
endef

demo: env
	@.venv/bin/python tools/demo.py --task $(TASK) $(ARGS)

# Sphinx lies beside the main stack, whose packages it imports and runs the tutorial with.
.venv-docs/ready: requirements/docs.txt .venv/ready
	.venv/bin/uv pip install --python .venv --target .venv-docs --no-deps --requirement $<
	@touch $@

docs: .venv-docs/ready
	PYTHONPATH=$(CURDIR)/.venv-docs:$(CURDIR) .venv/bin/python -m sphinx --fail-on-warning --keep-going \
	-c docs . build/site $(ARGS)

# ruff alone, as the requirements pin it.
RUFF := .venv-lint/bin/ruff
$(RUFF): requirements/onedl.txt
	@$(PYTHON) -m venv .venv-lint
	@.venv-lint/bin/pip install --quiet $$(grep --only-matching '^ruff==[^ ]*' $<)
	@touch $@

lint: $(RUFF)
	@$(RUFF) check . && $(RUFF) format --check .

format: $(RUFF)
	@$(RUFF) check --fix . && $(RUFF) format .

test: env
	@OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST) -m 'not slow' $(ARGS)

test-all: env
	@OMP_NUM_THREADS=1 .venv/bin/python $(PYTEST) --hypothesis-profile=default $(ARGS)

test-openmmlab: env-openmmlab
	@OMP_NUM_THREADS=1 .venv-openmmlab/bin/python $(PYTEST) -m 'not slow' $(ARGS)

clean:
	rm -rf build dist repa_mm.egg-info .pytest_cache .hypothesis .ruff_cache
	find repa_mm benchmarks configs demo projects tools tests -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-docs .venv-lint .venv-openmmlab repa_mm/.mim
