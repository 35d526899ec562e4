# Every target sets up what it needs, and only that; a second run reuses it. `make help` lists the targets.
#
# Stages, each a stamp in .venv: run (native build, daemon), dev (tests, lint), hf (torch, transformers, model).
# Package lists come from pyproject.toml, versions from constraints.txt. Builds and installs hold build/lock, so
# that two makes at once do not trip over each other.

PYTHON ?= $(firstword $(wildcard $(shell command -v python3.11)) python3)
JOBS ?= 2
export JOBS
# Some machines forbid it; every process that a test starts would compile what it imports.
export PYTHONDONTWRITEBYTECODE =
VENV := .venv
PY := $(VENV)/bin/python
LOCK := mkdir -p build && flock build/lock
PROTOS := $(wildcard proto/kvstored/v1/*.proto)
CMAKE := $(VENV)/bin/cmake

.DEFAULT_GOAL := help
.PHONY: help build demo serve site page model test test-all releases soak soak-serving bench bench-serving bench-kernels bench-reuse triton engines wheels wheels-test containers lint format asan asan-capi fuzz clean native native-tests cuda cuda-release gpu gpu-sanitize demo-hosts cluster
.DELETE_ON_ERROR:

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

# --- set-up ---------------------------------------------------------------------------------------------------------

$(VENV)/.python: | .ci/system
	@PYTHON="$(PYTHON)" .ci/system
	@$(LOCK) sh -ec 'test -x $(PY) || "$(PYTHON)" -m venv $(VENV)'
	@echo "$(CURDIR)" > $$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvstored-checkout.pth
	@for program in kvstored:kvstored.cli.main kvclient-serve:kvclient.serve.__main__; do file=$(VENV)/bin/$${program%%:*}; \
		printf '#!%s\nimport sys\n\nfrom %s import main\n\nsys.exit(main())\n' "$(CURDIR)/$(PY)" "$${program##*:}" > $$file && chmod +x $$file || exit 1; \
	done
	@touch $@

# $(call install,LISTS): pip install of the named lists of pyproject.toml at the versions of constraints.txt
define LISTS
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
lists = {"build": project["build-system"]["requires"], "run": project["project"]["dependencies"]}
lists.update(project["project"]["optional-dependencies"])
lists.update(project["dependency-groups"])
print(*sum((lists[name] for name in sys.argv[1:]), []), sep="\n")
endef
export LISTS
install = $(LOCK) sh -ec '$(PY) -c "$$LISTS" $(1) > $@.txt; $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $@.txt'

$(VENV)/.run: $(VENV)/.python pyproject.toml constraints.txt
	@echo "installing what the build and the daemon need"
	@$(call install,build run) && $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt cmake ninja
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing what the tests and lint need"
	@$(call install,dev deploy)
	@touch $@

$(VENV)/.hf: $(VENV)/.run
	@echo "installing torch, transformers and what the server needs"
	@$(call install,hf model serve client)
	@touch $@

$(VENV)/.clients: $(VENV)/.hf
	@echo "installing public clients of the server"
	@$(call install,clients)
	@touch $@

$(VENV)/.plots: $(VENV)/.run
	@echo "installing matplotlib"
	@$(call install,plots)
	@touch $@

$(VENV)/.browser: $(VENV)/.run
	@echo "installing playwright"
	@$(call install,browser)
	@touch $@

$(VENV)/.fuzz: $(VENV)/.run
	@echo "installing atheris"
	@$(call install,fuzz)
	@touch $@

# Generated beside its package, as an installed wheel has it; not committed.
build/.proto: $(VENV)/.run $(PROTOS)
	@$(LOCK) $(PY) -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)
	@touch $@

# --- build ----------------------------------------------------------------------------------------------------------

build: build/.proto native ## build the native part and the protocol code into this checkout

native: $(VENV)/.run
	@$(LOCK) .ci/native

native-tests: native ## and the C++ tests, with the emulations and what `make bench` runs
	@$(LOCK) .ci/native all

KV_CUDA_ARCHS ?= 90a-real
cuda: $(VENV)/.run ## build the CUDA kernels for KV_CUDA_ARCHS=90a-real into this checkout; needs nvcc, no GPU
	@$(LOCK) .ci/cuda build/cuda "$(KV_CUDA_ARCHS)"

cuda-release: $(VENV)/.run ## the same for every architecture (many minutes)
	@$(LOCK) .ci/cuda build/cuda-release "75-real;80-real;86-real;89-real;90-real;90a-real;90-virtual"

clean: ## remove everything that was built, the virtual environment included
	rm -rf build $(VENV) kvstored/_core*.so kvclient/_core*.so kvstored/v1 .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find kvstored kvclient tests bench examples docs -name __pycache__ -type d -prune -exec rm -rf {} +

# --- run ------------------------------------------------------------------------------------------------------------

model: build $(VENV)/.hf ## fetch the example model into the user's cache (93 MB, once)
	@$(PY) examples/model.py

demo: model ## one daemon, several processes, a real model: the first computes, the others hit
	@$(PY) examples/demo.py

demo-hosts: model ## three daemons as if on three hosts: one killed, one frozen; then a pool with etcd and Mooncake
	@.ci/cluster || echo "etcd and Mooncake cannot be had here: it goes on without a pool"
	@$(PY) examples/demo_hosts.py

PORT ?= 8000
serve: model ## a daemon, a server and its page on the example model, on loopback (PORT=8000), until Ctrl-C
	@$(PY) examples/serve.py --port $(PORT)

page: model $(VENV)/.dev $(VENV)/.browser ## every control of the chat page in a real browser (Debian: apt install chromium); writes build/page
	@mkdir -p build/page && PAGE_SHOTS=build/page $(PY) -m pytest -q tests/serve/test_page.py

# Files side by side, four more than JOBS: tests of deaths and deadlines wait more than they compute. What is marked
# `alone` waits for the others (tests/turns.py); what takes long comes first (tests/order.py); the processes are
# forked behind their imports (tests/workers.py). Plugins that packages bring along are seconds of imports each;
# without hypothesis's the first of its tests would read every module and be called too slow.
BESIDE = -n $$(($(JOBS) + 4)) --dist loadfile --no-loadscope-reorder \
	--disable-plugin-autoload -p xdist -p timeout -p hypothesispytest -p tests.workers

test: model $(VENV)/.dev native-tests ## build and pass the tests
	@.ci/tests $(BESIDE)

test-all: model $(VENV)/.dev native-tests $(VENV)/.clients ## also the slow tests and other releases of transformers
	@$(VENV)/bin/ctest --test-dir build/dev -j $$((2 * $(JOBS))) --output-on-failure
	@$(PY) -m pytest -q $(BESIDE) --whole

RELEASES = tests/hf/attachment/test_releases.py
releases: model $(VENV)/.dev ## kvclient.hf under the oldest and the newest transformers 5 (downloads 246 MB each, once)
	@$(PY) -m pytest -q -n $(JOBS) -m engines $(RELEASES) $(if $(AGAIN),|| { [ $$? -eq 1 ] && echo "once more: what failed" && \
		$(PY) -m pytest -q --last-failed --last-failed-no-failures none -m engines $(RELEASES); })

engines: build $(VENV)/.dev $(VENV)/.hf ## vLLM, SGLang and LMCache on the store (installs 2.7 GB beside the checkout, once)
	@PYTHON="$(PYTHON)" .ci/engines
	@$(PY) -m pytest -q -n $(JOBS) --dist loadfile -m engines tests/engines tests/serve/test_clients.py

cluster: build $(VENV)/.dev ## a pool across machines: etcd and Mooncake in network namespaces (downloads 60 MB beside the checkout, once)
	@.ci/cluster
	@$(PY) -m pytest -q -m engines tests/hosts/cluster

CONTENDERS ?= ours hf vllm llama
MINUTES ?= 5
soak: model $(VENV)/.dev ## clients, daemon, disk, hosts, a pool across machines and a server broken at random, each for MINUTES=5
	@$(PY) -m tests.soak --minutes $(MINUTES)
	@$(PY) -m tests.soak --clients 64 --minutes $(MINUTES)
	@$(PY) -m tests.soak.hosts --minutes $(MINUTES)
	@.ci/cluster
	@SOAK_MINUTES=$(MINUTES) $(PY) -m pytest -q -s -m engines tests/hosts/cluster/test_chaos.py -k 0
	@$(MAKE) --no-print-directory soak-serving

soak-serving: model $(VENV)/.dev ## 200 clients on one server for MINUTES=5, its daemon killed under it; every answer is checked
	@SOAK_MINUTES=$(MINUTES) $(PY) -m pytest -q -s tests/serve/test_soak.py

bench: model $(VENV)/.dev native-tests ## measure, side by side with other stores; writes bench/out
	@$(PY) -m bench

bench-serving: model $(VENV)/.dev $(VENV)/.plots ## OpenAI-compatible servers side by side (those that CONTENDERS names; installs them: vLLM 2.5 GB, once); writes bench/out/serving.json
	@$(PY) -m bench.serving --contenders $(CONTENDERS) --own servers disk split at-once hang-up

bench-kernels: model $(VENV)/.dev ## measure the CPU kernels beside torch, and the warm TTFT in place; writes bench/out
	@mkdir -p bench/out && $(PY) -m bench.attention --json bench/out/attention.json
	@$(PY) -m bench.attention --threads $$(nproc) --json bench/out/attention_all.json
	@$(PY) -m bench.in_place_ttft --json bench/out/in_place_ttft.json

gpu: ## on a machine with a GPU: build the kernels for it, test them (pytest -m gpu), measure them; writes bench/out/gpu.json
	@.ci/gpu tests bench

gpu-sanitize: ## the GPU tests under compute-sanitizer: memcheck, and racecheck where threads share memory
	@.ci/gpu sanitize

bench-reuse: model $(VENV)/.dev ## measure reuse inside prompts: TTFT and KL beside plain generate() and KVBoost, with SmolLM2 (an hour)
	@mkdir -p bench/out && $(PY) -m bench.reuse_inside --kvboost --json bench/out/reuse.json
	@$(PY) -m bench.reuse_inside --kvboost --quick --dtype bfloat16 --json bench/out/reuse_bf16.json

triton: model $(VENV)/.dev ## the Triton kernels on a CPU, interpreted, and compiled for GPUs (downloads 1 GB unpacked, once)
	@$(PY) -c "import triton" 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt triton
	@$(PY) -m pytest -q tests/kernels/cuda/test_triton.py

site: $(VENV)/.dev ## build the documentation site into build/site
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build -f deploy/site/mkdocs.yml

wheels: ## an sdist, and from it a manylinux wheel for PYTHON, in build/wheels
	@mkdir -p build && PYTHON="$(PYTHON)" .ci/wheels build/wheels

wheels-test: build $(VENV)/.dev ## install what `make wheels` made in a fresh environment without a compiler, and use it
	@WHEELS=build/wheels $(PY) -m pytest -q tests/unit/house/test_wheels.py

containers: ## build the images of deploy/containers with podman or docker, rootless
	@.ci/containers

# What the store's lock guards: looked at again when something below native/core has changed.
build/.locks: .ci/locks $(wildcard native/core/*/*.h native/core/*/*.cc)
	@.ci/locks
	@mkdir -p build && touch $@

lint: $(VENV)/.dev build/.locks ## ruff, clang-format, import contracts, what the store's lock guards, tidy test
	@$(VENV)/bin/ruff check .
	@git ls-files -z 'native/*.cc' 'native/*.h' 'native/*.cu' 'native/*.hpp' 'examples/cpp/*.cc' | xargs -0 $(VENV)/bin/clang-format --dry-run -Werror
	@$(VENV)/bin/lint-imports
	@$(PY) -m pytest -q tests/unit/house/test_tidy.py tests/unit/docstrings

format: $(VENV)/.dev ## sort imports, wrap C++ lines
	@$(VENV)/bin/ruff check --quiet --select I --fix .
	@git ls-files -z 'native/*.cc' 'native/*.h' 'native/*.cu' 'native/*.hpp' 'examples/cpp/*.cc' | xargs -0 $(VENV)/bin/clang-format -i

fuzz: build $(VENV)/.fuzz ## fuzz what decodes foreign bytes, FUZZ_SECONDS=30 each
	@mkdir -p build && flock build/fuzz.lock .ci/fuzz

asan: $(VENV)/.run ## the C++ tests under ASan/UBSan and under TSan
	@mkdir -p build && flock build/asan.lock .ci/sanitize address build/asan
	@mkdir -p build && flock build/asan.lock .ci/sanitize thread build/tsan
	@$(MAKE) --no-print-directory asan-capi

asan-capi: build $(VENV)/.dev ## the C library under ASan/UBSan and under TSan: its own test, and from Python conformance and regions
	@mkdir -p build && flock build/asan.lock .ci/capi address build/asan
	@mkdir -p build && flock build/asan.lock .ci/capi thread build/tsan
