# Every target sets up what it needs in .venv; nothing outside this folder is changed.
PYTHON ?= python3
PYTHON312 ?= python3.12
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 3
# What runs on S3 servers: the loop, claims, kills, faults, and names of places.
S3_TESTS := tests/schemas tests/trainer/stream tests/hostile/test_names.py tests/loop/test_faults.py tests/loop/test_readers.py tests/loop/test_s3.py
ENGINES ?= # more options of the engines' tests: make engines ENGINES='-m engine' for the slow ones, too
RAW ?= # folder with the data sets of make release
DEMO ?= # more options: make demo DEMO='--set train.epochs=3'
IMAGE_PARTS := Dockerfile .dockerignore $(addprefix images/,health.py locked.txt requirements.py sbom.py)
PINNED := setup.cfg pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all engines s3server images images-digest lock lint types release gpu-bundle docs audit manifests clean

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*##/\t/' | expand -t 12

demo: $(VENV)/.demo  ## the whole loop on real data: shard, train, mine, join, evaluate (results in demo/)
	$(BIN)/extremis demo demo $(DEMO)

test: $(VENV)/.dev  ## the tests, 10 to 16 minutes on 2 cores
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow and not engine and not image and not s3server"

test-all: $(VENV)/.dev  ## every test, the slow ones too; engines and s3server have targets of their own
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not engine and not image and not s3server" --hypothesis-profile thorough

engines: $(VENV)/.dev  ## pipelines on Prism, Flink and Spark on this machine (Go, Java 17, Maven; downloads 600 MB once)
	$(BIN)/python -m pytest -m "engine and not slow and not s3server" -rs --durations 10 tests/engines $(ENGINES)

s3server: $(VENV)/.dev  ## the loop, claims, kills and faults on a real S3 server, versitygw (Go builds it once)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m s3server -k "not any_name and not many_names" -rs --durations 10 $(S3_TESTS)

images: $(VENV)/.dev  ## the images, built without a daemon and run (root; apt-get install buildah debootstrap)
	$(BIN)/python -m pytest -m image -s -rs --durations 10 --junitxml=build/images.xml tests/images
	@if grep -q 'skipped="0"' build/images.xml; then $(MAKE) -s images-digest >images/built.sha256; \
		else echo "not all was tried, so images/built.sha256 is as it was"; fi

# Of all that images are made of but the code.
images-digest:
	@cat $(IMAGE_PARTS) | sha256sum | cut -c1-64

lock: $(VENV)/.dev  ## images/locked.txt, after a change of setup.cfg or constraints.txt (asks the package index)
	$(BIN)/python -m pip install -q uv && $(BIN)/python images/lock.py $(BIN)/uv

lint: $(VENV)/.dev  ## ruff
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.dev  ## mypy
	$(BIN)/mypy

release: $(VENV)/.bench .venvs/mosaicml/.done  ## what docs/results.md shows, 100 minutes of it: make release RAW=data
	$(BIN)/python -m benchmarks.release --raw $(RAW)

# Carried along with a checkout to a machine without a network; `benchmarks.gpu` reads it.
gpu-bundle: build/gpu/tate/_manifest.json  ## what benchmarks.gpu takes to a GPU, in build/gpu: five packages for CPython 3.12, sharded Tate
	$(BIN)/python -m pip install -q --no-deps --no-compile --upgrade --target build/gpu/packages -c constraints.txt \
		--only-binary=:all: --implementation cp --python-version 3.12 --platform manylinux_2_28_x86_64 \
		--platform manylinux_2_17_x86_64 -r benchmarks/gpu/bundle.txt
	@du -sh build/gpu

build/gpu/tate/_manifest.json: $(VENV)/.demo
	$(BIN)/extremis shard examples/tate build/gpu/tate --propensity 0.55,1.5

# An environment as on such a machine, for a test: 5.7 GB.
.venvs/gpu/.done: benchmarks/gpu/machine.txt
	$(PYTHON312) -m venv .venvs/gpu
	.venvs/gpu/bin/python -m pip install -q -r $<
	.venvs/gpu/bin/python -m pip uninstall -q -y -r benchmarks/gpu/bundle.txt
	@touch $@

docs: $(VENV)/.dev  ## the documentation as a site, in build/site
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]' && $(BIN)/python -m zensical build --strict --clean

audit: $(VENV)/.dev  ## known vulnerabilities and licences of what is pinned (asks a database over the network)
	$(BIN)/python -m pip install -q pip-audit pip-licenses
	$(BIN)/pip-audit -r constraints.txt --no-deps --disable-pip
	$(BIN)/pip-licenses --from=mixed --order=license

manifests: $(VENV)/.dev  ## examples/kubernetes against the schemas of Kubernetes (a package of 110 MB)
	$(BIN)/python -m pip install -q kubernetes-validate==1.37.0
	for version in 1.29 1.37; do $(BIN)/kubernetes-validate --strict -k $$version examples/kubernetes/*.yaml || exit 1; done

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.python $(PINNED)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[pipelines,trainer,report]'
	@touch $@

$(VENV)/.dev: $(VENV)/.python $(PINNED)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.demo

$(VENV)/.bench: $(VENV)/.dev
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench]'
	@touch $@

# Its NumPy and its transformers are older than ours. Where it cannot be had, benchmarks.stream says so and goes on.
.venvs/mosaicml/.done: benchmarks/mosaicml.txt
	$(PYTHON) -m venv .venvs/mosaicml
	-.venvs/mosaicml/bin/python -m pip install -q -r $<
	@touch $@

clean:           ## remove the virtual environment, the demo and caches
	rm -rf $(VENV) .venvs demo build *.egg-info .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis
