/* The pipeline of a rank: executes the schedule of a pass over micro-batches on one device.
 * Threads: the driver. Blocks: slide_pipe_run, until the pass's results are on the host; gradients
 * may still be on their way to the owners then (slide_reduce_flush waits for those). */
#ifndef SLIDE_PIPE_PIPE_H
#define SLIDE_PIPE_PIPE_H

#include "pipe/memory.h"
#include "pipe/schedule.h"
#include "route/route.h"

struct slide_pipe;

struct slide_pipe_options {
    struct slide_host *host;
    struct slide_device *device;
    enum slide_dtype wire;
    int slots;
    const uint8_t *activations; /* [units] enum slide_activations; borrowed */
    uint64_t budget;            /* bytes of device memory, 0: what is free */
    bool overlap, debug;
    int32_t head_rows;
    int micro_batches;
    int64_t tokens;
    int32_t seq;
    size_t sums_bytes; /* device memory for the route's sums */
    void *slots_at;    /* memory for the slots; NULL: from the device */
};

/* One micro-batch as the caller has it, host int32 [rows, seq]; NULL where slide_batch allows it.
 */
struct slide_pipe_batch {
    int32_t rows, seq;
    const int32_t *ids, *labels, *positions, *first;
};

enum slide_pass_kind { SLIDE_PASS_TRAIN, SLIDE_PASS_LOSS, SLIDE_PASS_LOGITS };

struct slide_pass {
    enum slide_pass_kind kind;
    const struct slide_pipe_batch *batch;
    int count;        /* 0: a rank without data; its gradients are zeros */
    uint32_t updates; /* that the weights must have had */
    float scale;      /* TRAIN: 1 / valid targets of all ranks */
    float *logits;    /* LOGITS: [rows, seq, vocab] of the one micro-batch */
    double loss;      /* out: sum over valid targets */
};

/* Bytes of the slots and the route's sums: the same on all ranks. */
size_t slide_pipe_slots_bytes(const struct slide_layout *layout, enum slide_dtype wire, int slots,
                              size_t sums_bytes);
int slide_pipe_open(struct slide_pipe **pipe, const struct slide_pipe_options *options,
                    struct slide_err *err);
/* The routes, before the first pass; shard NULL: full delivery. They may hold places in the slots.
 */
void slide_pipe_connect(struct slide_pipe *pipe, struct slide_shard *shard,
                        struct slide_reduce *reduce);
void slide_pipe_close(struct slide_pipe *pipe);
/* Makes room for larger passes: plans and takes the device memory anew. */
int slide_pipe_reserve(struct slide_pipe *pipe, int micro_batches, int64_t tokens, int32_t seq,
                       struct slide_err *err);
int slide_pipe_run(struct slide_pipe *pipe, struct slide_pass *pass, struct slide_err *err);
const struct slide_memory *slide_pipe_memory(const struct slide_pipe *pipe);
/* Seconds that weights have waited for their updates so far. */
double slide_pipe_waited(const struct slide_pipe *pipe);

#endif
