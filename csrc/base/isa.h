/* The instruction sets that hot loops are built for. One body, several objects: optim/ and cpu/ are
 * compiled once a set, with -ffp-contract=off, and give the same bits from each.
 * Threads: any. Blocks: never. */
#ifndef SLIDE_BASE_ISA_H
#define SLIDE_BASE_ISA_H

#include "err.h"

enum slide_isa { SLIDE_ISA_BASE, SLIDE_ISA_AVX2, SLIDE_ISA_AVX512, SLIDE_ISA_COUNT };

/* The best one that CPU and system support, or a lower one that SLIDE_ISA names
 * (base | avx2 | avx512); read once a process. On other CPUs than x86-64: base. */
enum slide_isa slide_isa_get(void);
enum slide_isa slide_isa_best(void); /* without the environment */
const char *slide_isa_name(enum slide_isa isa);
int slide_isa_parse(const char *name, enum slide_isa *isa, struct slide_err *err);

#endif
