/* Device memory of a rank: every buffer is planned by name, then all of it is taken in one piece.
 * Threads: the driver. Blocks: while the device allocates. */
#ifndef SLIDE_PIPE_MEMORY_H
#define SLIDE_PIPE_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"
#include "state/layout.h"

#define SLIDE_AREAS_MAX 16
#define SLIDE_RING 2 /* outputs on the device on their way to host memory or back */

struct slide_memory_options {
    const struct slide_layout *layout;
    struct slide_device *device;
    enum slide_dtype wire; /* of gradients on the way out */
    int slots, grads;      /* for blocks */
    int micro_batches;
    int64_t tokens; /* of the largest micro-batch */
    int32_t seq;    /* its longest row */
    int32_t head_rows;
    const uint8_t *activations; /* [units] enum slide_activations; borrowed */
    bool debug;                 /* every value is looked through for Inf and NaN */
    uint64_t budget;            /* bytes of the device that may be taken, 0: what is free */
    size_t sums_bytes;          /* of the route's sums on the device, beside the slots */
    /* Memory for the slots, slide_memory_slots_bytes() of it; NULL: from the device. */
    void *slots_at;
    bool slots_given; /* slots_at was taken from the device before, and is this plan's now */
};

/* What a micro-batch owns. Arrays of [tokens] unless said otherwise. */
struct slide_micro {
    int32_t rows, seq; /* of this pass */
    int64_t n;         /* rows * seq */
    int32_t *ids, *labels, *positions;
    int32_t *first[2]; /* documents alone; documents and sliding window */
    bool documents;    /* first[0] is not 0 everywhere */
    int32_t *host;     /* the five above, on the host, side by side at the strides of `tokens` */
    float *cos, *sin;  /* [tokens, head_dim / 2] */
    float *loss, *host_loss;
    /* [units - 1]: the output of each unit but the head, act [tokens, hidden]. Those that wait in
     * host memory share the places of the ring; `saved` is where they wait, NULL for all others. */
    void **boundary, **saved;
    void *dx; /* gradient of the residual stream, act [tokens, hidden] */
};

/* Inner values of a unit: act [tokens, width] by value, FP32 [tokens, aux] by op. */
struct slide_values {
    void *value[SLIDE_VALUES_MAX];
    float *aux[16];
};

struct slide_memory {
    struct slide_memory_options o;
    void *base;
    size_t bytes;              /* with the slots */
    unsigned char *slots_base; /* weights, gradients, sums: what other ranks may read */
    size_t slots_bytes;
    bool slots_own; /* fini frees them */
    float *sums;
    struct {
        const char *name;
        size_t bytes;
    } area[SLIDE_AREAS_MAX];
    int areas;
    unsigned char **weights; /* [slots + 2] */
    float **grad;            /* [grads + 2], FP32 sums over the micro-batches */
    void **wire;             /* [grads + 2]: where they leave from (== grad when wire is F32) */
    size_t *grad_count;      /* [grads + 2] elements */
    struct slide_micro *micro;
    struct slide_values *values;      /* [blocks][micro_batches]; what doesn't stay is shared */
    void *gradient[SLIDE_VALUES_MAX]; /* of a block's values; boundary values: NULL (micro.dx) */
    int gradient_root[SLIDE_VALUES_MAX];
    float *inv_freq;             /* [head_dim / 2] */
    void *logits, *head, *dhead; /* [head_rows, vocab], [head_rows, hidden] twice */
    float *head_rstd, *logits_f32;
    float *norm_scratch;
    void *attn_workspace, *gemm_workspace;
    size_t attn_bytes, gemm_bytes;
    int32_t *found, *host_found; /* debug: of slide_launch_nonfinite */
    void *host_base;             /* pinned */
    size_t host_bytes;
    bool host_pinned;
    uint8_t *offload; /* [units]: the output waits in host memory */
    void *saved_base; /* that memory, pinned */
    size_t saved_bytes;
    bool saved_pinned;
};

/* Bytes of all slots and the route's sums; the same on all ranks. */
size_t slide_memory_slots_bytes(const struct slide_memory_options *options);
int slide_memory_init(struct slide_memory *memory, const struct slide_memory_options *options,
                      struct slide_err *err);
void slide_memory_fini(struct slide_memory *memory);
struct slide_values *slide_memory_values(struct slide_memory *memory, int unit, int micro);

#endif
