# The targets set up the environment that they need.

PYTHON ?= python3
TASK ?= retinanet
ARGS ?=
TASKS := retinanet mask_rcnn upernet convert
SETUP := $(PYTHON) requirements/setup_env.py
# The Python of an environment. A GPU for which MMCV has no operators is hidden from it.
run = env $$(cat $(1)/.setup/run-env) $(1)/bin/python
# One test per core, and at most four: each needs much memory.
PYTEST := -m pytest tests --numprocesses auto --maxprocesses 4 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help env env-openmmlab demo lint format test test-all test-openmmlab clean distclean python task

help:
	@echo 'make demo             train, test, reparameterize and test again on real images'
	@echo '                      (TASK=retinanet, the default, mask_rcnn, upernet or convert)'
	@echo 'make test             run the tests (ARGS="-k ffn" goes to pytest)'
	@echo 'make test-all         the tests that take minutes too, and random cases anew'
	@echo 'make lint             check the style of the code; make format repairs it'
	@echo 'make env              only the set-up: .venv with the main stack'
	@echo 'make env-openmmlab    .venv-openmmlab with the last OpenMMLab releases'
	@echo 'make test-openmmlab   run the tests on those'
	@echo 'make clean            remove caches and build products'
	@echo 'make distclean        remove the environments too'
	@echo
	@echo 'Variables: PYTHON=python3.11 the Python to build on; MMCV_WHEEL=file a wheel'
	@echo 'of mmcv to use instead of compiling; MAX_JOBS=n compiler processes at a time.'

env: python
	@$(SETUP) --stack onedl --venv .venv

env-openmmlab: python
	@$(SETUP) --stack openmmlab --venv .venv-openmmlab

demo: task env
	@$(call run,.venv) tools/demo.py --task $(TASK) $(ARGS)

lint: env
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .

format: env
	@.venv/bin/ruff check --fix . && .venv/bin/ruff format .

test: env
	@OMP_NUM_THREADS=1 $(call run,.venv) $(PYTEST) -m 'not slow' $(ARGS)

test-all: env
	@OMP_NUM_THREADS=1 $(call run,.venv) $(PYTEST) --hypothesis-profile=default $(ARGS)

test-openmmlab: env-openmmlab
	@OMP_NUM_THREADS=1 $(call run,.venv-openmmlab) $(PYTEST) -m 'not slow' $(ARGS)

# An unknown task is refused before the set-up, which takes a quarter of an hour.
task:
	@case ' $(TASKS) ' in *' $(TASK) '*) ;; \
	*) echo 'TASK=$(TASK) is unknown; there are: $(TASKS)' >&2; exit 1;; esac

python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	echo 'There is no $(PYTHON). Install Python 3.10, 3.11 or 3.12, or name one: make ... PYTHON=/path/to/python3.11' >&2; exit 1; }

clean:
	rm -rf build dist repa_mm.egg-info .pytest_cache .hypothesis
	find repa_mm configs tools tests requirements -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-openmmlab repa_mm/.mim
