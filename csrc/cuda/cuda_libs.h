/* NVIDIA's libraries, opened by dlopen once a process; pointer types come from the vendors'
 * headers, so the compiler checks every call. A library is looked for in this order: the path that
 * the environment names (SLIDE_CUDA_DRIVER, SLIDE_CUBLASLT, SLIDE_CUDNN), already in the process,
 * pip's nvidia folders, plain soname, $CUDA_HOME/lib64. Threads: any. Blocks: while a library
 * loads. */
#ifndef SLIDE_CUDA_CUDA_LIBS_H
#define SLIDE_CUDA_CUDA_LIBS_H

#include <cublasLt.h>
#include <cuda.h>

#include "base/dl.h"
#include "base/err.h"

/* Functions by their header names: cuMemAlloc is a macro for cuMemAlloc_v2, in the member's name,
 * its type and the symbol alike. */
struct slide_cuda_driver {
#define X(name) __typeof__(name) *name;
#include "cuda/driver.def"
#undef X
};

struct slide_cublaslt {
#define X(name) __typeof__(name) *name;
#include "cuda/cublaslt.def"
#undef X
};

/* The tables; NULL and an error that lists what was tried. cuInit has been called. */
const struct slide_cuda_driver *slide_cuda_driver_get(struct slide_err *err);
const struct slide_cublaslt *slide_cublaslt_get(struct slide_err *err);

/* Where pip's nvidia packages lie; counts if no library has been looked for yet. */
void slide_cuda_folder_set(const char *nvidia);

/* Opens `soname` (e.g. "libcudnn.so.9") in the order above; `env` names the variable (NULL: none),
 * `folders` are pip's, relative to nvidia, separated by ':' ("cudnn/lib:cu13/lib"). `found`: its
 * path. The handle stays open. */
void *slide_cuda_lib_open(const char *env, const char *folders, const char *soname,
                          const struct slide_dl_symbol *symbols, int count, char *found,
                          size_t found_size, struct slide_err *err);
/* Where the two tables came from; "" before they are opened. */
const char *slide_cuda_driver_path(void);
const char *slide_cublaslt_path(void);

#endif
