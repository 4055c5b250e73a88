/* Runs the op table of a unit on one micro-batch: forward, recompute, backward. The one place that
 * turns op kinds into device calls; a new kind of op is a case in each direction here.
 * Threads: the driver. Blocks: never; all work is enqueued on the lane. */
#ifndef SLIDE_PIPE_PROGRAM_H
#define SLIDE_PIPE_PROGRAM_H

#include "pipe/memory.h"

struct slide_program {
    const struct slide_layout *layout;
    struct slide_memory *memory;
    struct slide_lane *lane;
    int unit, micro;
    const unsigned char *weights; /* the unit's slot */
    float *grad;                  /* the unit's gradient sums */
    bool fresh;                   /* first contribution to matrices: written, not added */
};

/* All ops of a block or the embedding. */
int slide_program_forward(const struct slide_program *program, struct slide_err *err);
/* Those of a block whose outputs didn't stay and are needed. */
int slide_program_recompute(const struct slide_program *program, struct slide_err *err);
/* From micro.dx, gradient of the unit's output, to micro.dx, gradient of its input, and grad. */
int slide_program_backward(const struct slide_program *program, struct slide_err *err);

enum slide_head_mode { SLIDE_HEAD_TRAIN, SLIDE_HEAD_LOSS, SLIDE_HEAD_LOGITS };
struct slide_head {
    enum slide_head_mode mode;
    const unsigned char *table; /* [vocab, hidden] act: the head's matrix or the embedding */
    float *table_grad;          /* its gradient sums */
    float scale;                /* of the loss's gradient: 1 / valid targets */
    float *logits;              /* LOGITS: host FP32 [n, vocab] */
};
/* Final norm, logits and loss in chunks of rows; in training their backward, into micro.dx. */
int slide_program_head(const struct slide_program *program, const struct slide_head *head,
                       struct slide_err *err);

#endif
