/* Inside of a rank, shared by the files of this folder.
 * Threads: the driver; the planes and `adam` are used by the threads of the route and of the
 * updates as well. Blocks: never. */
#ifndef SLIDE_TRAIN_RANK_H
#define SLIDE_TRAIN_RANK_H

#include "base/pool.h"
#include "pipe/pipe.h"
#include "train/train.h"
#include "train/updates.h"

#define SLIDE_PLAN_MAX 64

/* Pieces of the segment that are registered with the device. */
struct slide_pins {
    struct {
        void *at;
        size_t bytes;
    } *piece;
    int pieces;
    size_t bytes;
};

struct slide_train {
    struct slide_train_spec spec;
    struct slide_model model;
    struct slide_layout layout;
    struct slide_host host;
    struct slide_device *device;
    bool shard, on_device; /* the routes: delivery, reduction */
    struct slide_comm comm;
    struct slide_shard *deliver; /* NULL: full delivery */
    struct slide_reduce *reduce;
    struct slide_pipe *pipe;
    struct slide_updates *updates; /* NULL: each gradient is applied as soon as it is reduced */
    struct slide_pool *pool;       /* sums, updates; loading and saving, while there is neither */
    struct slide_pins pins;
    uint8_t *activations; /* [units] */
    enum slide_isa isa;
    int threads;
    bool layout_ready, host_ready;
    bool loaded;
    _Atomic bool failed;        /* abort may come from any thread */
    uint64_t step;              /* updates done */
    struct slide_adamw adam[2]; /* by decay, of the step under way; without `updates` alone */
    struct slide_plan_item plan[SLIDE_PLAN_MAX];
    int plan_items;
    char device_name[128], blas[256];
};

/* pins.c: registers the `hi` planes and this rank's staging with the device. */
int slide_pins_open(struct slide_train *train, struct slide_err *err);
void slide_pins_close(struct slide_train *train);

/* Until the updates of all steps are done on all ranks. */
int slide_train_wait(struct slide_train *train, struct slide_err *err);

/* AdamW on elements [first, first + n) of a unit, all of this rank's slice. */
void slide_train_update(struct slide_train *train, const struct slide_adamw adam[2], int unit,
                        uint64_t first, const float *grad, uint64_t n);

/* A failed call's way out: the machine's first error becomes this one's unless it was ours; the
 * others are told; the object refuses further steps when `broken`. Returns -1. */
int slide_train_fail(struct slide_train *train, bool broken, struct slide_err *err);

#endif
