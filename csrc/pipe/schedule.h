/* A pass over the model as data: a list of stage records with dependencies. run.c executes it; the
 * planner and the trace read the same list.
 * Threads: read-only after slide_schedule_init. Blocks: never. */
#ifndef SLIDE_PIPE_SCHEDULE_H
#define SLIDE_PIPE_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

enum slide_stage_kind {
    SLIDE_STAGE_FETCH,    /* weights of unit -> slot; after: the stage that used the slot last */
    SLIDE_STAGE_FORWARD,  /* of all micro-batches */
    SLIDE_STAGE_HEAD,     /* final norm, logits, loss; in training their backward too */
    SLIDE_STAGE_BACKWARD, /* recompute and backward of all micro-batches */
    SLIDE_STAGE_GRAD_OUT, /* gradient of unit leaves; after: the stage that made it */
    SLIDE_STAGE_SAVE,     /* unit's output -> host memory; after: its forward */
    SLIDE_STAGE_RESTORE   /* and back; after: the backward that read the place last */
};

struct slide_stage {
    enum slide_stage_kind kind;
    int unit;
    int slot;  /* weight slot; SAVE and RESTORE: place in the ring; -1: none */
    int table; /* HEAD of a tied model: the slot of the embedding, else -1 */
    int grad;  /* gradient slot, -1: none */
    int after; /* index of a stage, -1: none */
};

/* Slots come in three classes: `slots` for blocks, then one for the embedding and an untied head,
 * then, tied only, one for the head (the final norm). Gradient slots likewise. */
struct slide_schedule_options {
    int units;
    int slots, grads; /* for blocks */
    bool tied, train;
    /* [units], 1: the unit's output waits for the backward in host memory. On the device these
     * outputs share `ring` places, in turn. NULL: none. */
    const uint8_t *offload;
    int ring;
};

struct slide_schedule {
    struct slide_stage *stage;
    int stages;
    int units, slots, grads; /* of blocks */
    bool tied, train;
};

static inline int slide_schedule_edge(const struct slide_schedule *s)
{
    return s->slots;
}

int slide_schedule_init(struct slide_schedule *schedule,
                        const struct slide_schedule_options *options, struct slide_err *err);
void slide_schedule_fini(struct slide_schedule *schedule);

#endif
