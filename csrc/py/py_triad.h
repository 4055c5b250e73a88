/* The STREAM triad, a = b + 3 c, that memory-bound loops are measured against: one loop, compiled
 * once an instruction set, with ordinary stores (a line of `a` is read before it is written).
 * Threads: any, on disjoint ranges. Blocks: never. */
#ifndef SLIDE_PY_PY_TRIAD_H
#define SLIDE_PY_PY_TRIAD_H

#include <stdint.h>

typedef void slide_py_triad_loop(float *restrict a, const float *restrict b,
                                 const float *restrict c, uint64_t n);

slide_py_triad_loop slide_py_triad_base, slide_py_triad_avx2, slide_py_triad_avx512;

#endif
