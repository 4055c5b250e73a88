/* The triad's loop. Compiled once an instruction set, like those of optim/ and cpu/, so that what
 * AdamW is held against is as fast as this compiler makes it. No Python here.
 * Called through the table of py_loops.c. */
#include "py/py_triad.h"

#include "optim/loop_isa.h"

void SLIDE_ISA_NAME(slide_py_triad)(float *restrict a, const float *restrict b,
                                    const float *restrict c, uint64_t n)
{
    uint64_t i = 0;
    for (; n - i >= BLOCK; i += BLOCK) {
        prefetch(b + i, 4 * BLOCK);
        prefetch(c + i, 4 * BLOCK);
        for (int k = 0; k < BLOCK; k++)
            a[i + (uint64_t)k] = b[i + (uint64_t)k] + 3.0f * c[i + (uint64_t)k];
    }
    for (; i < n; i++)
        a[i] = b[i] + 3.0f * c[i];
}
