/* Attention as graphs of cuDNN's backend interface: cudnn_graph.c describes them, cudnn_plan.c
 * opens the library, makes plans of graphs, keeps them on disk and runs them. A target is a handle
 * or, without a GPU, the properties of one; all code is the same for both. Threads: an object
 * belongs to one thread at a time. Blocks: while a library loads and while a plan is made (a tenth
 * of a second; a second where nothing is cached). */
#ifndef SLIDE_CUDA_CUDNN_GRAPH_H
#define SLIDE_CUDA_CUDNN_GRAPH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cudnn.h>

#include "base/err.h"

struct slide_cudnn {
#define X(name) __typeof__(name) *name;
#include "cuda/cudnn.def"
#undef X
};

struct slide_cudnn_target {
    struct slide_cudnn api;
    cudnnHandle_t handle;                 /* NULL: plans are made but can't run */
    cudnnBackendDescriptor_t device_prop; /* then what they are made for; else NULL */
    char gpu[64];                         /* its name, for the disk cache; "": no cache */
};

/* What a plan is made for. No padding: compared and hashed as bytes. Strides: elements a token;
 * those of the gradients are 0 in a forward plan. The scale is an argument of the run. */
struct slide_cudnn_shape {
    int64_t q_stride, kv_stride, o_stride, dq_stride, dkv_stride;
    int32_t rows, seq, heads, kv_heads, head_dim;
    int32_t window; /* 0: none, else less than seq */
    int32_t backward;
    int32_t zero;
};

/* Tensors and scalars that a run is given; a pointer of each that the graph has. */
enum slide_cudnn_id {
    SLIDE_CUDNN_Q,
    SLIDE_CUDNN_K,
    SLIDE_CUDNN_V,
    SLIDE_CUDNN_O,
    SLIDE_CUDNN_STATS,
    SLIDE_CUDNN_D_O,
    SLIDE_CUDNN_DQ,
    SLIDE_CUDNN_DK,
    SLIDE_CUDNN_DV,
    SLIDE_CUDNN_DELTA, /* scratch of the backward, FP32 [rows, heads, seq] */
    SLIDE_CUDNN_SCALE, /* FP32 scalars in host memory from here on */
    SLIDE_CUDNN_MINUS_INF,
    SLIDE_CUDNN_ONE,
    SLIDE_CUDNN_WINDOW,
    SLIDE_CUDNN_IDS
};

/* 0, or -1 with the call, the status and cuDNN's own last words. */
int slide_cudnn_check(const struct slide_cudnn *api, cudnnStatus_t status, const char *what,
                      struct slide_err *err);

/* ---- cudnn_graph.c ---- */

/* Every descriptor that a graph is made of, freed together. */
#define SLIDE_CUDNN_DESCRIPTORS 192
struct slide_cudnn_graph {
    const struct slide_cudnn *api;
    struct slide_err *err;
    bool failed;
    cudnnBackendDescriptor_t descriptor[SLIDE_CUDNN_DESCRIPTORS];
    cudnnBackendDescriptor_t node[48], graph;
    int descriptors, nodes;
    int64_t virtual_id;
    bool has[SLIDE_CUDNN_IDS];
};

int slide_cudnn_graph_init(struct slide_cudnn_graph *graph, const struct slide_cudnn_target *target,
                           const struct slide_cudnn_shape *shape, struct slide_err *err);
void slide_cudnn_graph_fini(struct slide_cudnn_graph *graph);
/* The ids that a shape's graph has; returns how many. */
int slide_cudnn_graph_ids(const struct slide_cudnn_shape *shape, int64_t *id);

/* ---- cudnn_plan.c ---- */

struct slide_cudnn_plan {
    struct slide_cudnn_shape shape;
    const struct slide_cudnn_target *target;
    cudnnBackendDescriptor_t plan;
    size_t workspace;
    int64_t engine; /* its number among cuDNN's; -1: of the disk cache, not known */
    int64_t id[SLIDE_CUDNN_IDS];
    int ids;
    bool refused;
    struct slide_err why; /* then */
};

/* Opens cuDNN and what it loads by itself: cuBLASLt and NVRTC. */
int slide_cudnn_open(struct slide_cudnn *api, struct slide_err *err);

/* NULL only where there is no memory: a shape that cuDNN refuses is a plan with the reason. */
struct slide_cudnn_plan *slide_cudnn_plan_new(const struct slide_cudnn_target *target,
                                              const struct slide_cudnn_shape *shape,
                                              struct slide_err *err);
/* Where it is kept on disk; -1: it isn't. */
int slide_cudnn_plan_path(const struct slide_cudnn_plan *plan, char *path, size_t size);
void slide_cudnn_plan_free(struct slide_cudnn_plan *plan);
/* `pointer` is indexed by slide_cudnn_id; those that the graph doesn't have are not looked at.
 * `workspace`: plan->workspace bytes. */
int slide_cudnn_plan_run(const struct slide_cudnn_plan *plan, void *const *pointer, void *workspace,
                         cudaStream_t stream, struct slide_err *err);

#endif
