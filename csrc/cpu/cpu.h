/* The CPU backend: the reference that runs everywhere. A lane is a thread that runs a ring of
 * commands in order, an event is a counter, GEMM is a BLAS called tile by tile (cut by shape only,
 * so the number of threads changes no bit), the small kernels are plain C built once an
 * instruction set. Device memory is host memory.
 * Threads: as device.h. Blocks: as device.h. */
#ifndef SLIDE_CPU_CPU_H
#define SLIDE_CPU_CPU_H

#include "device/device.h"

extern const struct slide_backend slide_cpu_backend;

/* Which BLAS was found, e.g. "OpenBLAS 0.3.31 SkylakeX from /.../libscipy_openblas.so"; opens it if
 * need be. There is one a process, so only the first call's `path` counts. SLIDE_BLAS alone when it
 * is set; else `path` (NULL: none), beside the extension's site-packages (scipy_openblas32), then
 * libopenblas.so.0 and libblas.so.3, each if it has OpenBLAS's symbols. */
int slide_cpu_blas(const char *path, char *text, size_t size, struct slide_err *err);

#endif
