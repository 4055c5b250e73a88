/* Inside of the CPU backend, shared by the files of this folder.
 * Threads: as device.h. Blocks: slide_cpu_enqueue, while the lane's ring is full. */
#ifndef SLIDE_CPU_CPU_INSIDE_H
#define SLIDE_CPU_CPU_INSIDE_H

#include <stdbool.h>

#include "base/isa.h"
#include "base/pool.h"
#include "cpu/cpu.h"

/* A command on a lane: a function and a copy of its arguments. */
#define SLIDE_CPU_ARGS 256
struct slide_cpu_command {
    int (*run)(struct slide_lane *lane, const void *args, struct slide_err *err);
    bool always; /* events: runs after an error too, so that nobody waits for ever */
    char args[SLIDE_CPU_ARGS] __attribute__((aligned(8)));
};

typedef void slide_cpu_sgemm_fn(int order, int trans_a, int trans_b, int m, int n, int k,
                                float alpha, const float *a, int lda, const float *b, int ldb,
                                float beta, float *c, int ldc);

struct slide_cpu_scratch { /* a worker's, grown on demand, kept */
    float *memory;
    size_t floats;
};

struct slide_device {
    struct slide_device_head head;
    struct slide_device_options options;
    enum slide_isa isa;
    struct slide_lane *compute; /* the one that runs kernels; NULL: not open */
    struct slide_pool *pool;    /* its threads */
    slide_cpu_sgemm_fn *sgemm;
    struct slide_cpu_scratch *scratch; /* [threads + 1]: the last is shared, see cpu_gemm.c */
};

struct slide_lane {
    struct slide_device *device;
    struct slide_cpu_lane_inside *inside;
};

typedef int slide_cpu_run_fn(struct slide_lane *lane, const void *args, struct slide_err *err);
int slide_cpu_enqueue(struct slide_lane *lane, bool always, slide_cpu_run_fn *run, const void *args,
                      size_t bytes, struct slide_err *err);

/* `floats` of the worker's scratch memory; NULL when there is none. Worker `threads` is what all
 * share: it is taken before a loop begins. */
float *slide_cpu_scratch(struct slide_device *device, int worker, size_t floats);

/* cpu_blas.c: the one library of the process. */
slide_cpu_sgemm_fn *slide_cpu_sgemm_get(const char *path, struct slide_err *err);

/* cpu_gemm.c, cpu_attn.c, cpu_kernels.c: what runs on the compute lane. */
slide_cpu_run_fn slide_cpu_gemm_run, slide_cpu_attn_fwd_run, slide_cpu_attn_bwd_run;
size_t slide_cpu_attn_workspace(struct slide_device *device, const struct slide_attn *attn);
/* The kernel as a command; NULL for an unknown one. */
slide_cpu_run_fn *slide_cpu_kernel_run(enum slide_kernel kernel);

/* What a kernel's command carries: act and the kernel's own arguments. */
struct slide_cpu_launch {
    enum slide_dtype act;
    char args[SLIDE_CPU_ARGS - 8] __attribute__((aligned(8)));
};

#endif
