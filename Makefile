# Every target works in $(VENV). PYTHON= makes it, TORCH= is the torch put there, VENV= names one that
# exists already: a torch found in it is left as it is.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Two processes of one thread each. A file's tests stay in one: they share what they have made.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder \
	  --max-worker-restart 0
DONE := $(VENV)/.torchgradx
SOURCES := pyproject.toml setup.py README.md $(shell find build_tools csrc torchgradx -type f \
             ! -name '*.so' ! -name '*.pyc')
PYTHON_CODE := torchgradx tests examples benchmarks build_tools setup.py
CXX_CODE := $(shell find csrc tests/emulation -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo wheel docs test test-all bench zoo corpus calibrate gpu lint format sanitize mutants clean

help:
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: $(DONE)/examples  ## build, then find mislabelled digits by their gradient norms; writes out/
	$(BIN)/python examples/rank_digits.py --out out

wheel: $(DONE)/wheel  ## build a wheel, load it, and name what it needs; writes dist/
	mkdir -p dist && cp $(WHEELS)/*.whl dist/
	$(BIN)/python build_tools/built_wheel.py dist/*.whl

docs: $(DONE)/docs  ## the documentation as a site, strictly; writes site/
	$(BIN)/mkdocs build --strict

test: $(DONE)/test  ## build, then the test suite against the installed package
	$(PYTEST) tests $(PYTEST_ARGS)

test-all: $(DONE)/test  ## the same with every case of each grid of parameters (tests/grids.py)
	$(PYTEST) --all-cases tests $(PYTEST_ARGS)

bench: $(DONE)/bench  ## build, then time it against the plain step and the rivals, and real models; results, plots, README
	$(BIN)/python -W ignore benchmarks/run.py
	$(BIN)/python -W ignore benchmarks/zoo.py

zoo: $(DONE)/bench  ## the real models alone: of transformers, peft and timm (pip install .[zoo])
	$(BIN)/python -W ignore benchmarks/zoo.py

corpus: $(DONE)/bench  ## every model class of transformers and timm, tiny: are its norms exact? (pip install .[zoo])
	$(BIN)/python -W ignore benchmarks/corpus.py

calibrate: $(DONE)/bench  ## fit the cost model's constants to this machine; WRITE=1 puts them into it
	$(BIN)/python benchmarks/calibrate.py $(if $(WRITE),--write)

gpu:  ## where a GPU is, with the torch of PYTHON=: build, test, sanitize, benchmark; or STAGES= of it
	PYTHON="$(PYTHON)" OUT="$(OUT)" STAGES="$(STAGES)" LIMIT="$(LIMIT)" MODELS="$(MODELS)" .ci/gpu

lint: $(DONE)/lint  ## ruff, clang-format and mypy; changes nothing
	$(BIN)/ruff check $(PYTHON_CODE)
	$(BIN)/ruff format --check $(PYTHON_CODE)
	$(BIN)/clang-format --dry-run -Werror $(CXX_CODE)
	$(BIN)/mypy

format: $(DONE)/lint  ## have ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix $(PYTHON_CODE)
	$(BIN)/ruff format $(PYTHON_CODE)
	$(BIN)/clang-format -i $(CXX_CODE)

# A second copy of the package, before the installed one in the search path. Python itself is not
# instrumented, hence the preloads; its own allocator would hide heap errors, hence malloc. A refused
# allocation is Python's to report (return_null). A report goes to the process's stderr just before
# it dies, which pytest would swallow: --capture=sys.
SANITIZED := build/sanitize/package
SANITIZERS := LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	  PYTHONMALLOC=malloc PYTHONPATH=$(CURDIR)/$(SANITIZED)
sanitize: $(DONE)/test  ## operator tests and fuzz under AddressSanitizer and UndefinedBehaviorSanitizer
	rm -rf $(SANITIZED) build/sanitize/lib*
	TORCHGRADX_SANITIZE=1 $(PIP) install --no-deps --target $(SANITIZED) .
	cd $(SANITIZED) && $(SANITIZERS) $(abspath $(BIN))/python -m torchgradx | grep 'extension *loaded'
	$(SANITIZERS) $(PYTEST) --capture=sys -k "not emulated and not reference" $(wildcard tests/test_ops*.py tests/test_fuzz*.py tests/test_affine*.py tests/test_gather*.py)

mutants: $(DONE)/test  ## plant bugs in the CUDA kernels, all or PART=: the emulation must catch each; without a GPU
	$(BIN)/python tests/emulation/mutants.py $(PART)

clean:  ## remove all that make has made, .venv included (an environment named by VENV= stays)
	rm -rf .venv build dist out site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamp is a constraint: no extra's library brings another torch than the one that we are built for.
$(DONE)/torch: | $(BIN)/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install "$(TORCH)"
	mkdir -p $(DONE)
	$(BIN)/python -c "import torch; print('torch==' + torch.__version__.split('+')[0])" > $@

# Built once, whatever the extras. setuptools packs whatever an earlier build left in build/lib*.
WHEELS := $(DONE)/wheels
$(DONE)/wheel: $(DONE)/torch $(SOURCES)
	rm -rf build/lib* $(WHEELS)
	$(PIP) wheel --no-deps --wheel-dir $(WHEELS) .
	$(PIP) install --no-deps --force-reinstall $(WHEELS)/*.whl
	touch $@

# BackPACK asks for torchvision, which would bring a torch of its own, and runs without it.
$(DONE)/bench: $(DONE)/wheel
	$(PIP) install -c $(DONE)/torch "$$(echo $(WHEELS)/*.whl)[bench]"
	$(PIP) install --no-deps backpack-for-pytorch==1.7.1 einops unfoldNd
	touch $@

# One stamp for each extra; the package itself is there already.
$(DONE)/%: $(DONE)/wheel
	$(PIP) install -c $(DONE)/torch "$$(echo $(WHEELS)/*.whl)[$*]"
	touch $@
