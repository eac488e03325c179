# Every target sets up what it needs (tools/setup-env): system headers, .venv, torch, the built package. A second run is quick.

DIR ?= $(CURDIR)
ARGS ?=
VERSIONS ?=
CHECKOUT ?=
MARKS ?=
export PYTHON TORCH MARKS

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
CXX_FILES := $(wildcard aio/*.cpp aio/*.h)
ENGINE_TESTS = $(wildcard $(addprefix $(CURDIR)/tests/,unit/test_engine*.py property faults))

.PHONY: help sweep compare test test-slow test-gpu test-portable test-all test-deepspeed test-deepspeed-own parity parity-models outside build wheel docs lint format asan tsan clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' Makefile

sweep: ## tune the drive under DIR (default: this directory); more options of nvme-sweep in ARGS
	@python=$$(tools/setup-env) && exec "$$(dirname "$$python")/nvme-sweep" "$(DIR)" $(ARGS)

compare: ## measure the engine beside its peers on the drive under DIR; more options of sweeps.compare in ARGS
	@python=$$(tools/setup-env benchmarks) && tools/compare-peers "$$python" && exec "$$python" -m sweeps.compare "$(DIR)" $(ARGS)

# A worker that dies ends the run, which then says in which test: xdist may wait without end for one that it started again.
test: ## run the tests, four files of them at once; more options of pytest in ARGS
	@python=$$(tools/setup-env test) && tools/deepspeed-ops "$$python" && exec "$$python" -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

test-slow: ## run those that make test leaves out: they compile, start launchers, or train for long
	@$(MAKE) --no-print-directory test ARGS="-m slow $(ARGS)"

test-gpu: ## run the tests that need a GPU, in eight processes on it; more options of pytest in ARGS
	@python=$$(tools/setup-env test) && exec "$$python" -m pytest --numprocesses 8 --dist load --max-worker-restart 0 tests/gpu $(ARGS)

test-portable: ## run tests as other machines would: one core, AVX2, no rights, no headers, fio, browser or home; -m processor in ARGS
	@tools/portable-tests $(ARGS)

test-all: ## run all that CI runs: test, test-slow, and as another machine would what depends on the processor
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-slow
	@$(MAKE) --no-print-directory test-portable ARGS="-m 'processor and not slow'"

test-deepspeed: ## run the tests of ZeRO-3 on other releases of DeepSpeed, side by side: VERSIONS="0.16.9 0.18.9", by default all that were tried
	@python=$$(tools/setup-env test) && exec tools/test-deepspeed "$$python" $(VERSIONS)

test-deepspeed-own: ## run DeepSpeed's own tests of ZeRO-3 and offload, on DeepSpeed as it is and on this package: CHECKOUT=DIRECTORY of its sources
	@python=$$(tools/setup-env test) && exec "$$python" tools/deepspeed_own_tests.py "$(CHECKOUT)" $(ARGS)

parity: ## train many combinations with DeepSpeed on a drive and on its device "cpu", and compare the bits; --combinations N in ARGS
	@python=$$(tools/setup-env test) && exec "$$python" tests/zero3/parity.py $(ARGS)

parity-models: ## the same for programs of others, models and loops of transformers, PEFT and Accelerate: writes reports/parity-models.md; --only in ARGS
	@python=$$(tools/setup-env test) && exec "$$python" tests/zero3/parity_models.py --output reports/parity-models.md $(ARGS)

outside: ## run training programs of other projects and their plain runs, on the drive under DIR: writes reports/outside-programs.md; --only in ARGS
	@python=$$(tools/setup-env test) && tools/deepspeed-ops "$$python" && exec "$$python" -m sweeps.outside "$(DIR)" --output reports/outside-programs $(ARGS)

build: ## build the package into .venv
	@tools/setup-env >/dev/null

wheel: ## build the source distribution and a portable wheel for each Python from 3.10 to 3.13 that is here, or in ARGS, into dist/
	@python=$$(tools/setup-env wheel) && exec "$$python" tools/build_wheels.py $(ARGS)

docs: ## build the pages of docs/ and the API reference, as a site, into build/docs
	@python=$$(tools/setup-env docs) && exec "$$python" tools/build_docs.py build/docs

lint: ## ruff, mypy, clang-format, and a compile where every warning is an error
	@python=$$(tools/setup-env test) && bin=$$(dirname "$$python") && \
	$$bin/ruff check . && $$bin/ruff format --check . && $$bin/mypy && \
	$$bin/clang-format --dry-run -Werror $(CXX_FILES) && \
	NVME_OFFLOAD_WERROR=1 $$bin/pip --disable-pip-version-check wheel -q --no-deps -w build/lint . && echo "lint: all clean"

format: ## rewrite the sources as ruff and clang-format want them
	@python=$$(tools/setup-env test) && bin=$$(dirname "$$python") && \
	$$bin/ruff check --fix . ; $$bin/ruff format . && $$bin/clang-format -i $(CXX_FILES)

asan: ## run the engine tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@tools/sanitized-tests address,undefined $(ENGINE_TESTS) $(ARGS)

tsan: ## run the engine tests under ThreadSanitizer
	@tools/sanitized-tests thread $(ENGINE_TESTS) $(ARGS)

clean: ## remove .venv and everything that was built
	rm -rf .venv build dist *.egg-info nvme_offload/_aio.*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
