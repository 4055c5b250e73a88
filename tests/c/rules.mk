# The C tests: every tests/c/test_*.c, linked with the C sources of csrc/ but for py/ and with the
# stub of cuda/, plain and under the sanitizers. Included by the top Makefile, or alone:
#   make -f tests/c/rules.mk ctest
# Some cases of one test: make -f tests/c/rules.mk ctest-build && build/c/plain/test_base pool

CBUILD ?= build/c
# The CPU backend needs a BLAS; pip puts one into the virtual environment.
ifeq ($(strip $(SLIDE_BLAS)),)
SLIDE_BLAS := $(abspath $(firstword $(wildcard \
    .venv/lib/python3*/site-packages/scipy_openblas32/lib/libscipy_openblas.so)))
endif
export SLIDE_BLAS
# Tests with threads, run under ThreadSanitizer.
CTEST_THREADED ?= base shm train cpu

# Compiler flags come from csrc/isa.flags, which setup.py reads as well.
cflags_of = $(shell sed -n 's/^$(1): *//p' csrc/isa.flags)
C_COMMON := $(call cflags_of,common) -Icsrc -g
C_HOT := $(call cflags_of,hot)
C_ISAS := $(call cflags_of,isa)
ifeq ($(filter x86_64 amd64,$(shell uname -m)),)
C_ISAS := base
endif
$(foreach i,$(C_ISAS),$(eval C_ISA_$(i) := $(call cflags_of,$(i))))

C_FOLDERS := base optim model device cpu state plan route pipe train
C_FILES := $(wildcard $(C_FOLDERS:%=csrc/%/*.c)) csrc/cuda/cuda_stub.c
C_HOT_FILES := $(filter %_isa.c,$(C_FILES))
C_COLD_FILES := $(filter-out %_isa.c,$(C_FILES))
C_TESTS := $(patsubst tests/c/%.c,%,$(wildcard tests/c/test_*.c))

# Last on the command line, so that it wins over -O3.
C_FLAVOUR_plain :=
C_FLAVOUR_asan := -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all
C_FLAVOUR_tsan := -O1 -fno-omit-frame-pointer -fsanitize=thread

# $(1) flavour
define c_flavour
$(CBUILD)/$(1)/%.o: csrc/%.c csrc/isa.flags
	@mkdir -p $$(@D)
	$$(CC) $$(C_COMMON) -O2 $$(C_FLAVOUR_$(1)) -MMD -MP -c $$< -o $$@
$(CBUILD)/$(1)/tests/%.o: tests/c/%.c csrc/isa.flags
	@mkdir -p $$(@D)
	$$(CC) $$(C_COMMON) -Itests/c -O2 $$(C_FLAVOUR_$(1)) -MMD -MP -c $$< -o $$@
$(foreach i,$(C_ISAS),$(call c_isa,$(1),$(i)))
C_OBJECTS_$(1) := $(C_COLD_FILES:csrc/%.c=$(CBUILD)/$(1)/%.o) \
    $(foreach i,$(C_ISAS),$(C_HOT_FILES:csrc/%.c=$(CBUILD)/$(1)/%.$(i).o))
# q and not r: files of the same name in two folders must both be in.
$(CBUILD)/$(1)/libslide.a: $$(C_OBJECTS_$(1))
	@rm -f $$@
	@$$(AR) qcs $$@ $$^
$(CBUILD)/$(1)/test_%: $(CBUILD)/$(1)/tests/test_%.o $(CBUILD)/$(1)/libslide.a
	$$(CC) $$(C_FLAVOUR_$(1)) $$^ -o $$@ -lm -lpthread -ldl
-include $(C_FILES:csrc/%.c=$(CBUILD)/$(1)/%.d) $(C_TESTS:%=$(CBUILD)/$(1)/tests/%.d) \
    $(foreach i,$(C_ISAS),$(C_HOT_FILES:csrc/%.c=$(CBUILD)/$(1)/%.$(i).d))
endef
# $(1) flavour, $(2) instruction set
define c_isa
$(CBUILD)/$(1)/%.$(2).o: csrc/%.c csrc/isa.flags
	@mkdir -p $$(@D)
	$$(CC) $$(C_COMMON) $$(C_HOT) $$(C_ISA_$(2)) -DSLIDE_ISA_SUFFIX=$(2) $$(C_FLAVOUR_$(1)) \
	    -MMD -MP -c $$< -o $$@

endef
$(foreach f,plain asan tsan,$(eval $(call c_flavour,$(f))))

.SECONDARY:
.PHONY: ctest asan tsan ctest-build

# Each test says what it does; the first that fails ends the run.
c_run = @set -e; for t in $(1); do $(2) $$t; done

ctest-build: $(C_TESTS:%=$(CBUILD)/plain/%)

ctest: ctest-build
	$(call c_run,$(C_TESTS:%=$(CBUILD)/plain/%),)

asan: $(C_TESTS:%=$(CBUILD)/asan/%)
	$(call c_run,$^,ASAN_OPTIONS=detect_leaks=1)

tsan: $(CTEST_THREADED:%=$(CBUILD)/tsan/test_%)
	$(call c_run,$^,TSAN_OPTIONS=die_after_fork=0)
