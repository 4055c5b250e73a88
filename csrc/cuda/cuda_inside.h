/* Inside of the CUDA backend, shared by the files of this folder.
 * Threads: as device.h. Blocks: never, but for what cuda_device.c says. */
#ifndef SLIDE_CUDA_CUDA_INSIDE_H
#define SLIDE_CUDA_CUDA_INSIDE_H

#include <stdbool.h>

#include "cuda/cuda.h"
#include "cuda/cuda_libs.h"

enum slide_cuda_entry {
#define X(symbol, args) SLIDE_ENTRY_##symbol,
#include "cuda/entries.def"
#undef X
    SLIDE_ENTRY_COUNT
};

enum {
#define X(name) SLIDE_IMAGE_##name,
#include "cuda/images.def"
#undef X
    SLIDE_CUDA_IMAGES
};

struct slide_cuda_gemm; /* cuda_gemm.c: handle, workspace, algorithms found */
struct slide_cuda_attn; /* cuda_attn.c: which way for which shape, cuDNN's plans */

struct slide_device {
    struct slide_device_head head;
    struct slide_device_options options;
    const struct slide_cuda_driver *driver; /* the library's functions */
    CUdevice device;
    CUcontext context; /* the device's primary one, so that other libraries share it */
    CUmodule module[SLIDE_CUDA_IMAGES];
    CUfunction entry[SLIDE_ENTRY_COUNT];
    int sms, capability; /* multiprocessors; 90 for 9.0 */
    size_t shared_max;   /* bytes of shared memory that a block may ask for */
    struct slide_cuda_gemm *gemm;
    struct slide_cuda_attn *attn;
};

struct slide_lane {
    struct slide_device *device; /* first: device.c relies on it */
    enum slide_lane_kind kind;
    CUstream stream;
};

/* 0, or -1 with the driver's name and text of the error: "cuMemAlloc: out of memory (...)". */
int slide_cuda_check(struct slide_device *device, CUresult result, const char *what,
                     struct slide_err *err);

struct slide_cuda_grid {
    unsigned x, y, z; /* blocks */
    unsigned threads; /* a block */
    unsigned shared;  /* bytes of dynamic shared memory */
};

/* Starts an entry on the lane; `args` is its POD, copied before this returns. */
int slide_cuda_start(struct slide_lane *lane, enum slide_cuda_entry entry,
                     const struct slide_cuda_grid *grid, const void *args, struct slide_err *err);

/* cuda_launch.c: the small kernels. */
int slide_cuda_launch(struct slide_lane *lane, enum slide_kernel kernel, enum slide_dtype act,
                      const void *args, size_t bytes, struct slide_err *err);

/* cuda_gemm.c, over cuBLASLt. */
int slide_cuda_gemm_open(struct slide_device *device, struct slide_err *err);
void slide_cuda_gemm_close(struct slide_device *device);
size_t slide_cuda_gemm_workspace(struct slide_device *device);
int slide_cuda_gemm(struct slide_lane *lane, const struct slide_gemm *gemm, struct slide_err *err);

/* cuda_attn.c chooses between cuda_cudnn.c and our own kernels (cuda_flash.c). */
int slide_cuda_attn_open(struct slide_device *device, struct slide_err *err);
void slide_cuda_attn_close(struct slide_device *device);
size_t slide_cuda_attn_workspace(struct slide_device *device, const struct slide_attn *attn);
int slide_cuda_attn_fwd(struct slide_lane *lane, const struct slide_attn *attn,
                        struct slide_err *err);
int slide_cuda_attn_bwd(struct slide_lane *lane, const struct slide_attn *attn,
                        struct slide_err *err);

/* cuda_flash.c: our own kernels, for every shape up to head size 512. */
size_t slide_cuda_flash_workspace(struct slide_device *device, const struct slide_attn *attn);
int slide_cuda_flash_fwd(struct slide_lane *lane, const struct slide_attn *attn,
                         struct slide_err *err);
int slide_cuda_flash_bwd(struct slide_lane *lane, const struct slide_attn *attn,
                         struct slide_err *err);

/* cuda_cudnn.c: attention through cuDNN's graphs. `open` gives NULL and fills `err` where cuDNN
 * can't be had. `supports`: whether this shape goes through it, forward and backward; builds and
 * keeps the plans. */
struct slide_cuda_cudnn;
struct slide_cuda_cudnn *slide_cuda_cudnn_open(struct slide_device *device, struct slide_err *err);
void slide_cuda_cudnn_close(struct slide_cuda_cudnn *cudnn);
bool slide_cuda_cudnn_supports(struct slide_cuda_cudnn *cudnn, const struct slide_attn *attn,
                               struct slide_err *err);
size_t slide_cuda_cudnn_workspace(struct slide_cuda_cudnn *cudnn, const struct slide_attn *attn);
int slide_cuda_cudnn_fwd(struct slide_cuda_cudnn *cudnn, struct slide_lane *lane,
                         const struct slide_attn *attn, struct slide_err *err);
int slide_cuda_cudnn_bwd(struct slide_cuda_cudnn *cudnn, struct slide_lane *lane,
                         const struct slide_attn *attn, struct slide_err *err);

#endif
