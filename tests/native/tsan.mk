# Ranks and their threads under ThreadSanitizer: make -f tests/native/tsan.mk PYTHON=.venv/bin/python
#
# The library is built in its own folder with a copy of the package, only for the baseline ISA. Ranks are threads of one
# process.

PYTHON ?= python3
SIDE := build/tsan
NATIVE := ckdist/native
FLAGS := -std=c++17 -O1 -g -fPIC -fsanitize=thread -ffp-contract=off -I$(NATIVE) \
	-DCKDIST_HAVE_BASELINE -DCKDIST_ISA=baseline -DCKDIST_VECTORS=baseline
SOURCES := $(wildcard $(NATIVE)/*/*.cpp $(NATIVE)/*/*/*.cpp)
OBJECTS := $(SOURCES:%.cpp=$(SIDE)/%.o)
RUN := LD_PRELOAD=$(shell realpath $$($(CXX) -print-file-name=libtsan.so)) \
	TSAN_OPTIONS="exitcode=66 suppressions=tests/native/tsan.supp" \
	PYTHONPATH=$(SIDE)/root:. OPENBLAS_NUM_THREADS=1

.PHONY: test
test: $(SIDE)/libckdist.so
	@mkdir -p $(SIDE)/root && rm -rf $(SIDE)/root/ckdist && cp -r ckdist $(SIDE)/root/ && cp $< $(SIDE)/root/$(NATIVE)/
	$(RUN) $(PYTHON) tests/support/programs/thread_ranks.py 1 3
	$(RUN) $(PYTHON) tests/support/programs/thread_ranks.py 1 20
	$(RUN) $(PYTHON) tests/support/programs/thread_ranks.py 3 2
	$(RUN) $(PYTHON) tests/support/programs/thread_ranks.py 7 1
	$(RUN) $(PYTHON) tests/support/programs/thread_pieces.py 2 3
	$(RUN) $(PYTHON) tests/support/programs/thread_pieces.py 4 2
	$(RUN) $(PYTHON) tests/support/programs/thread_pieces.py 6 1
	$(RUN) $(PYTHON) tests/support/programs/thread_weights.py 1 3
	$(RUN) $(PYTHON) tests/support/programs/thread_weights.py 3 2
	$(RUN) $(PYTHON) tests/support/programs/thread_models.py 2
	$(RUN) $(PYTHON) tests/support/programs/thread_communicator.py 2
	$(RUN) $(PYTHON) tests/support/programs/thread_communicator.py 3
	$(RUN) $(PYTHON) tests/support/programs/thread_communicator.py 5

$(SIDE)/libckdist.so: $(OBJECTS)
	$(CXX) -shared -fsanitize=thread $^ -o $@ -pthread -ldl -lrt

$(OBJECTS): $(SIDE)/%.o: %.cpp $(wildcard $(NATIVE)/*/*.h $(NATIVE)/*/*/*.h)
	@mkdir -p $(@D)
	$(CXX) $(FLAGS) -c $< -o $@
