# make setup | serve | test | native

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RANKS ?= 2
PORT ?= 8080
# mpirun refuses to run as root unless told; containers usually are root.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PATH := $(CURDIR)/$(BIN):$(PATH)

NATIVE := $(shell find ckdist/native -name '*.cpp' -o -name '*.h' 2>/dev/null) CMakeLists.txt

.PHONY: setup serve test native clean

setup: $(VENV)/.ready ckdist/native/libckdist.so

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "ckdist needs Python 3.10 or newer; PYTHON=... chooses another"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no venv module: install it (Debian and Ubuntu: apt-get install python3-venv)"; rm -rf $(VENV); exit 2; }
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet cmake ninja
	$(BIN)/python -m pip install --quiet --editable '.[mpi,test]'
	@touch $@

ckdist/native/libckdist.so: $(NATIVE) | $(VENV)/.ready
	@$(BIN)/cmake -S . -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja >/dev/null
	@$(BIN)/cmake --build build/native
	@touch $@

native: ckdist/native/libckdist.so

serve: setup
	mpirun -n $(RANKS) ckdist serve --port $(PORT)

test: setup
	$(BIN)/python -m pytest -q

clean:
	rm -rf $(VENV) build ckdist/native/libckdist.so

# RDMA devices and two NUMA nodes in an emulated machine; as root it fetches what it needs.
.PHONY: test-vm
test-vm: setup
	$(BIN)/python -m pytest -q -rs -p no:cacheprovider tests/vm/suite.py
