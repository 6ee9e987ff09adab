# `make` prints the targets. Every target prepares .venv by itself, from nothing but Python, git
# and make. Paths are relative, so that the folder's name may hold spaces.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help demo test proof mutants check lint format bench lock clean

PY := .venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start the program some thousand times: where no bytecode is kept, it is compiled each time.
export PYTHONDONTWRITEBYTECODE :=

help: ## Print this help
	@echo 'usage: make TARGET'
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)$$/  \1\t\2/p' Makefile | expand -t 12

demo: .venv/.installed ## Start Tenuto with example agents and tasks, and show where to look
	.venv/bin/orchestrate up --demo

# Two processes for each core: many tests wait for processes of their own.
test: check ## Check, then run every test; CI runs this
	$(PY) -m pytest -n $$(( $$(nproc) < 4 ? $$(nproc) * 2 : 8 )) --dist loadgroup

# An area is a file of tests/proof/long. Its tests run in their order: each leaves its cluster to the next.
proof: .venv/failover/.installed ## Run the long tests, or those of one AREA=name; CI runs this, too
	$(PY) -m pytest -v -s -p no:randomly tests/proof/long/$(or $(AREA),*).py

# An area is a file of tests/mutants/areas.
mutants: .venv/.installed-dev ## Plant known faults one by one, all or those of one AREA=name, and run the tests for each
	$(PY) -m tests.mutants $(AREA)

check: lint ## Lint, formatting, types and import rules
	$(PY) -m mypy
	.venv/bin/lint-imports --no-logo

lint: .venv/.installed-dev ## Lint and formatting only
	$(PY) -m ruff check
	$(PY) -m ruff format --check

format: .venv/.installed-dev ## Format the code and repair what the linter can
	$(PY) -m ruff check --fix-only
	$(PY) -m ruff format

bench: .venv/.installed ## Measure throughput and latency on this machine
	.venv/bin/orchestrate bench

# With the oldest Python that is supported, for Linux. Names neither an index nor a host.
LOCK := CUSTOM_COMPILE_COMMAND='make lock' .venv-lock/bin/python -m piptools compile --quiet \
	--upgrade --generate-hashes --strip-extras --no-emit-index-url --no-emit-trusted-host \
	--no-emit-find-links --no-emit-options --annotation-style line

lock: | $(PY) ## Lock the newest versions of what the image installs, with their hashes
	$(PY) -m venv --clear --without-pip .venv-lock
	$(PY) -m pip --python .venv-lock/bin/python install --quiet pip pip-tools
	$(LOCK) --output-file deploy/requirements.lock pyproject.toml
	$(LOCK) --only-build-deps --build-deps-for wheel --output-file deploy/build.lock pyproject.toml
	rm -rf .venv-lock

clean: ## Remove .venv, caches and build output
	rm -rf .venv .venv-lock dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests bench -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

.venv/.installed: pyproject.toml | $(PY)
	@echo 'Installing Tenuto into .venv'
	@$(PY) -m pip install --quiet --editable .
	@touch $@

.venv/.installed-dev: pyproject.toml | $(PY)
	@echo 'Installing Tenuto and its development tools into .venv'
	@$(PY) -m pip install --quiet --editable '.[dev]'
	@touch .venv/.installed $@

.venv/failover/.installed: tests/proof/failover/requirements.txt | .venv/.installed-dev
	@echo 'Installing Patroni and etcd into .venv/failover'
	@rm -rf .venv/failover
	@$(PY) -m pip install --quiet --target .venv/failover --requirement $<
	@touch $@

# The newest Python of those named. Debian's may come without ensurepip; then a pip that is
# already there installs itself into .venv.
$(PY):
	@best=; newest=0; \
	for name in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	  minor=$$($$name -c 'import sys; print(sys.version_info[1] * (sys.version_info[0] == 3))' \
	    2>/dev/null) || continue; \
	  if [ "$$minor" -ge 11 ] && [ "$$minor" -gt "$$newest" ]; then best=$$name; newest=$$minor; fi; \
	done; \
	if [ -z "$$best" ]; then \
	  echo 'Tenuto needs Python 3.11 or newer; install it, or name it: make PYTHON=/path/to/python' >&2; \
	  exit 1; \
	fi; \
	echo "Creating .venv with $$best"; \
	$$best -m venv --clear .venv >/dev/null 2>&1 || { \
	  $$best -m venv --clear --without-pip .venv && \
	  $$best -m pip --python .venv/bin/python install --quiet pip; } >/dev/null 2>&1 || { \
	  rm -rf .venv; \
	  echo "$$best cannot create .venv; install the package python3-venv and run make again" >&2; \
	  exit 1; \
	}
