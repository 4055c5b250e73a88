/* The CUDA backend: the driver API by dlopen, kernels from a fatbin inside this library, GEMM by
 * cuBLASLt, attention by cuDNN or kernels of our own. Built without the toolkit, the same names
 * answer what is missing (cuda_stub.c).
 * Threads: as device.h. Blocks: as device.h. */
#ifndef SLIDE_CUDA_CUDA_H
#define SLIDE_CUDA_CUDA_H

#include "device/device.h"

extern const struct slide_backend slide_cuda_backend;

/* Driver, GPU and libraries, their versions and where they were found, for people. `nvidia`: the
 * folder of pip's nvidia packages, NULL: beside this library; only a process's first call counts.
 */
int slide_cuda_text(const char *nvidia, char *text, size_t size, struct slide_err *err);

#endif
