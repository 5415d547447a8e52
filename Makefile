# make setup | serve | lint | format | tidy | docs | unit | test | test-avx2 | test-native | test-wheel | test-tiles
#      test-asan test-tsan | test-vm | test-aarch64 | fuzz | coverage | bench-check | native | lock | clean
# Python 3.10 or newer, a C++ compiler and make are all that must be there; the rest goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 2
PORT ?= 8080
MODEL ?= smollm2
WERROR ?= OFF
# Levels of instructions to build: best (this CPU's best one), native (its own and the baseline, which tests need) or
# all. `make serve` takes those that are built.
BUILT := $(shell sed -n 's/^CKDIST_LEVELS:STRING=//p' build/native/CMakeCache.txt 2>/dev/null)
LEVELS ?= $(if $(filter serve,$(MAKECMDGOALS)),$(or $(BUILT),best),native)
JOBS ?= $(shell getconf _NPROCESSORS_ONLN)
# The wheel is built in the same folder (`make test-wheel`), and its settings would put the library elsewhere.
CMAKE = $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	-U 'SKBUILD*'
CONFIGURE = $(CMAKE) -S . -B build/native -DCKDIST_WERROR=$(WERROR) -DCKDIST_LEVELS=$(LEVELS)

INSTALL = $(BIN)/python -m pip install --quiet --constraint constraints.txt

export PATH := $(CURDIR)/$(BIN):$(PATH)
# mpirun refuses to run as root unless told, and containers usually are root; it counts no more ranks than cores, and
# binds two ranks to one core each, unless told: ckdist divides the cores itself.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy := none
# Tests start Python some thousand times: without files of bytecode each start would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

LIBRARY := ckdist/native/libckdist.so
SOURCES := CMakeLists.txt cmake/declarations.py $(shell find ckdist/native -name '*.cpp' -o -name '*.h')

.PHONY: setup serve lint format tidy docs lock unit test test-avx2 test-native test-wheel test-asan test-tsan test-vm
.PHONY: test-tiles test-aarch64 fuzz coverage bench-check native more-levels clean

# For contributors; `make serve` needs less.
setup: $(VENV)/.ready $(LIBRARY)

# The compiler needs no other packages.
$(VENV)/.build: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "ckdist needs Python 3.10 or newer, and $(PYTHON) is not: PYTHON=... chooses another"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module: install it (Debian and Ubuntu: apt-get install python3-venv)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing cmake and ninja into $(VENV)"
	@$(INSTALL) cffi cmake ninja
	@touch $@

# The package itself is installed as a link to this checkout, without its library: that is built below, once.
$(VENV)/.serve: $(VENV)/.build
	@echo "installing the packages that serving needs into $(VENV), 285 MB"
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(INSTALL) --editable '.[build,mpi]'
	@touch $@

$(VENV)/.ready: $(VENV)/.serve
	@echo "installing the packages of tests and training into $(VENV)"
	@$(INSTALL) --editable '.[build,mpi,test,train]'
	@touch $@

native: $(LIBRARY)

$(LIBRARY): $(SOURCES) $(if $(filter best-native best-all native-all,$(BUILT)-$(LEVELS)),more-levels) | $(VENV)/.build
	@echo "compiling the native library for this CPU; LEVELS=all builds it for every CPU"
	@rm -f $@  # so that a build that is interrupted goes on, with its levels
	@$(CONFIGURE) >/dev/null
	@$(BIN)/cmake --build build/native --parallel $(JOBS)
	@touch $@

# Packages are fetched while the library is compiled. A model that cannot be fetched now (code 1) leaves the bundled
# one; any other mistake ends here.
serve:
	@$(MAKE) --no-print-directory -j2 LEVELS=$(LEVELS) $(VENV)/.serve $(LIBRARY)
	@ckdist pull $(MODEL); code=$$?; model="-m $(MODEL)"; \
	test $$code -le 1 || exit $$code; \
	test $$code -eq 0 || { model=; echo "serving the bundled model instead: a toy, whose text loops"; }; \
	exec launch/drained mpirun -n $(RANKS) ckdist serve --port $(PORT) $$model

# The linters, formatters, the type checker, and the documentation's generator, in .venv too.
$(VENV)/.lint: $(VENV)/.ready
	$(INSTALL) --editable '.[docs,lint]'
	@touch $@

# Counts findings and holds them against the record: none may rise.
lint: $(VENV)/.lint
	$(BIN)/python tests/habits.py --check

format: $(VENV)/.lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	git ls-files '*.cpp' '*.h' | xargs $(BIN)/clang-format -i

# clang-tidy over the native code without the kernels, which are compiled once for every level; takes minutes.
tidy: $(VENV)/.lint
	@$(CMAKE) -S . -B build/tidy -DCMAKE_EXPORT_COMPILE_COMMANDS=ON >/dev/null
	git ls-files 'ckdist/native/*.cpp' | grep -v kernels/isa | \
	  xargs -P $(JOBS) -n 4 $(BIN)/clang-tidy -p build/tidy --quiet

# Tests wait on processes and for each other's ranks, so there are three workers for each core; what measures time runs
# alone.
WORKERS ?= $(shell expr 3 \* $(JOBS))
# They start thousands of short processes: bytecode that is kept is a third of what a start costs.
unexport PYTHONDONTWRITEBYTECODE
PARALLEL = -n $(WORKERS) --dist worksteal
ALONE = $(shell grep -rl --include='test_*.py' 'pytest.mark.alone' tests)
# What one process computes, in under a minute on two cores: pure Python, and kernels against numpy and gguf.
UNIT_TESTS := tests/unit $(addprefix tests/kernels/test_,attention.py elementwise.py fold.py level_bits.py levels.py \
	linear.py optimizer.py pack.py quantize.py sampler.py)
unit: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not alone" $(UNIT_TESTS)

test: setup test-native
	$(BIN)/python -m pytest $(PARALLEL) -m "not alone"
	$(BIN)/python -m pytest -m alone $(ALONE)

# Numbers of kernels, models and plans as on a CPU with AVX2 alone: the level and numpy's BLAS are pinned. BEST_LEVEL
# are those that `make test` computes with this CPU's best level alone, and not with each level: CI adds them.
BEST_LEVEL := $(addprefix tests/unit/test_,autodiff.py vjp.py cross_attention.py embedding.py engine_sampling.py \
	layout_choice.py papers.py predict.py step_cost.py) \
	$(addprefix tests/models/test_,cache_types.py gptoss_files.py latent_files.py minilm.py published_formats.py \
	safetensors.py stacks.py states.py) tests/kernels/test_expert_training.py
CPU_TESTS := tests/unit tests/models tests/kernels
AS_AVX2 = CKDIST_ISA=avx2 OPENBLAS_CORETYPE=Haswell
test-avx2: LEVELS = all
test-avx2: setup
	@$(CONFIGURE) >/dev/null
	@$(BIN)/cmake --build build/native --parallel $(JOBS)
	$(AS_AVX2) $(BIN)/python -m pytest $(PARALLEL) -m "not alone" $(CPU_TESTS)

# Numbers as on a CPU with AMX, whose tiles are a model in C++ (12 GFLOP/s) on another CPU with AVX-512. The library is
# a target of the build that shares all other objects.
TILE_TESTS := tests/kernels tests/models tests/ranks/test_token.py tests/ranks/test_dispatch.py \
	tests/ranks/test_stages.py tests/ranks/test_replay.py tests/ranks/test_column_parts.py
test-tiles: setup
	@$(CONFIGURE) >/dev/null
	@why=$$($(BIN)/python -m tests.support.tile_library) && if [ -n "$$why" ]; then echo "skipped: $$why"; else \
	CKDIST_ISA=amx CKDIST_LIBRARY=$(CURDIR)/build/native/libckdist_tiles.so \
		$(BIN)/python -m pytest $(PARALLEL) -m "not alone" -o timeout=1200 $(TILE_TESTS); fi

# Lines that the tests execute, of Python and of C++ (a build of its own), by room.
coverage: setup
	@test -x $(BIN)/gcovr || $(INSTALL) --editable '.[coverage]'
	@$(CMAKE) -S . -B build/coverage -DCKDIST_COVERAGE=ON \
	  -DCKDIST_UNIT_TESTS=$(if $(wildcard /usr/include/doctest),ON,OFF) >/dev/null
	@$(BIN)/cmake --build build/coverage --parallel $(JOBS)
	$(BIN)/python tests/coverage_by_room.py $(TESTS)

# C++ unit tests of the native library; doctest (Debian and Ubuntu: doctest-dev) is one header.
test-native: setup
	@if echo '#include <doctest/doctest.h>' | $(CXX) -E -x c++ - >/dev/null 2>&1; then \
	  $(CONFIGURE) -DCKDIST_UNIT_TESTS=ON >/dev/null && \
	  $(BIN)/cmake --build build/native --parallel $(JOBS) && $(BIN)/ctest --test-dir build/native --output-on-failure; \
	else echo "C++ unit tests skipped: there is no doctest (Debian and Ubuntu: apt-get install doctest-dev)"; fi

# The wheel as `pip install .` makes it, in an environment and a folder of its own. The build folder is the checkout's,
# which keeps its own levels.
test-wheel: setup
	$(BIN)/python tests/check_wheel.py build/wheel
	@$(CONFIGURE) >/dev/null

# The native code under AddressSanitizer and UndefinedBehaviorSanitizer. Memory that Python keeps to its end is no leak
# of ours.
ASAN_TESTS := tests/fuzz/test_native_fuzz.py tests/models/test_gguf.py tests/models/test_loader.py \
	tests/kernels/test_linear.py tests/kernels/test_attention.py tests/kernels/test_elementwise.py \
	tests/kernels/test_sampler.py tests/kernels/test_sampler_steps.py tests/unit/test_engine_sampling.py \
	tests/ranks/test_replay.py tests/kernels/test_stream_copy.py tests/kernels/test_pack.py \
	tests/kernels/test_quantize.py \
	tests/ranks/test_repack.py tests/ranks/test_token.py \
	tests/kernels/test_native_training.py tests/kernels/test_expert_training.py tests/kernels/test_optimizer.py \
	tests/kernels/test_fold.py tests/unit/test_cross_attention.py tests/models/test_states.py \
	tests/models/test_latent_reuse.py tests/ranks/test_dispatch.py tests/ranks/test_stages.py
test-asan: setup
	@$(CMAKE) -S . -B build/asan -DCKDIST_SANITIZE=address,undefined >/dev/null
	@$(BIN)/cmake --build build/asan --parallel $(JOBS)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
		CKDIST_LIBRARY=$(CURDIR)/build/asan/libckdist.so CKDIST_TEST_CXXFLAGS=-fsanitize=address,undefined \
		$(BIN)/python -m pytest $(ASAN_TESTS)

# How ranks and threads meet, under ThreadSanitizer.
test-tsan: setup
	$(MAKE) -f tests/native/tsan.mk PYTHON=$(BIN)/python

# Damaged sessions for what ranks and agents send each other, the native parser under sanitizers.
FUZZ_SECONDS ?= 60
fuzz: setup
	CKDIST_FUZZ_SECONDS=$(FUZZ_SECONDS) CKDIST_FUZZ_EXAMPLES=1000 \
		$(BIN)/python -m pytest -q tests/fuzz/test_frame_fuzz.py tests/fuzz/test_start_up_frames.py

# RDMA devices and two NUMA nodes in an emulated machine; as root it fetches what it needs.
test-vm: setup
	$(BIN)/python -m tests.vm.machine
	@$(CONFIGURE) >/dev/null
	@$(BIN)/cmake --build build/native --parallel $(JOBS)
	$(BIN)/python -m pytest -q -rs -p no:cacheprovider tests/vm/suite.py

# Kernels on emulated 64-bit Arm CPUs; as root it fetches what it needs.
test-aarch64: setup
	$(BIN)/python -m tests.aarch64.emulation

# Instructions per token against those on record; needs valgrind. A change meant to be is kept with
# benchmarks/instructions.py --update.
bench-check: setup
	$(BIN)/python benchmarks/instructions.py

# The documentation as a site in build/site; a warning is an error.
docs: setup $(VENV)/.lint
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "build/site/index.html"

# One working set of versions for every Python that is supported, which pip reads as constraints.
EXTRAS := build coverage dagster docs lint mpi ray remote test train
lock: $(VENV)/.lint
	$(BIN)/uv --no-config pip compile --quiet --universal --python-version 3.10 --strip-extras --no-annotate --no-header \
		--no-emit-find-links $(EXTRAS:%=--extra %) --upgrade pyproject.toml -o constraints.txt

clean:
	rm -rf $(VENV) build $(LIBRARY)
