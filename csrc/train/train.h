/* A rank of a training: device, share of the host state, schedule. What py/ wraps, and what C tests
 * drive directly; W ranks may be threads of one process.
 *
 *     struct slide_train *t = NULL;
 *     struct slide_train_spec spec = SLIDE_TRAIN_SPEC_INIT;
 *     spec.config = config;
 *     if (slide_train_open(&t, &spec, &err) || slide_train_load(t, parts, n, NULL, NULL, &err) ||
 *         slide_train_step(t, batches, 1, 1e-5, &out, &err))
 *         report(&err);
 *     slide_train_close(t);
 *
 * After a call that failed in the middle of a step the object answers SLIDE_ESTATE: masters of
 * different steps would be mixed. A call that fails on its arguments changes nothing.
 * Updates may still be under way when a step returns: whatever reads the state waits for what it
 * needs. Threads: one caller at a time; slide_train_abort from any thread. Blocks: open, load,
 * store, step, flush, evaluate, logits, gather, tensor: until the work is done on all ranks
 * concerned; they answer `poll` about every 50 ms. */
#ifndef SLIDE_TRAIN_TRAIN_H
#define SLIDE_TRAIN_TRAIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/err.h"
#include "model/model.h"
#include "optim/adamw.h"
#include "route/route.h"

struct slide_train;

/* SLIDE_PIN_AUTO: where pinning fails, training goes on without, after one warning. */
enum slide_pinning { SLIDE_PIN_AUTO, SLIDE_PIN_ALWAYS, SLIDE_PIN_NEVER };

struct slide_train_spec {
    struct slide_config config;
    int rank, world;
    const char *rendezvous; /* world > 1: name of the abstract socket */
    const char *agreement;  /* "key=value\n" lines that must be equal on all ranks */
    const char *device;     /* backend's name: "cpu", "cuda" */
    int device_index;
    bool bf16;                       /* hi/lo masters, BF16 compute; else FP32 throughout */
    enum slide_dtype gradient_dtype; /* on the way to the host: F32 or BF16 */
    enum slide_delivery delivery;    /* with one rank all are the same */
    enum slide_reduction reduction;
    int threads;        /* 0: CPUs of this process / world */
    const char *blas;   /* NULL or "": search */
    const char *nvidia; /* folder of pip's nvidia packages; likewise */
    int64_t max_tokens; /* of a micro-batch, B * T */
    int32_t max_seq;
    int micro_batches; /* a step */
    enum slide_activations activations;
    const uint8_t *block_activations; /* [layers], each block's own instead; NULL: none */
    uint64_t device_budget;           /* bytes of device memory, 0: what is free */
    int slots;                        /* weight slots for blocks, >= 2 */
    uint64_t chunk_bytes;             /* of gradient on the way out */
    int32_t head_rows;                /* rows of logits at a time */
    bool overlap;
    bool keep_gradients;
    bool defer;           /* updates that backward didn't hide run on under the next forward */
    bool skip_nonfinite;  /* a step with an Inf or NaN in a gradient changes nothing */
    double max_grad_norm; /* > 0: gradients are scaled down to this norm, and skip_nonfinite */
    bool debug_nonfinite; /* name the op that makes the first Inf or NaN; slow */
    enum slide_pinning pinning; /* of the host memory that the device copies from and to */
    double timeout;             /* seconds that a wait for another rank may last */
    double beta1, beta2, epsilon, weight_decay;
    int (*poll)(void *arg, struct slide_err *err); /* NULL: none */
    void *poll_arg;
};

#define SLIDE_TRAIN_SPEC_INIT                                                                      \
    ((struct slide_train_spec){.world = 1,                                                         \
                               .device = "cpu",                                                    \
                               .bf16 = true,                                                       \
                               .gradient_dtype = SLIDE_BF16,                                       \
                               .max_tokens = 1024,                                                 \
                               .max_seq = 1024,                                                    \
                               .micro_batches = 1,                                                 \
                               .slots = 2,                                                         \
                               .chunk_bytes = 4 << 20,                                             \
                               .head_rows = 256,                                                   \
                               .overlap = true,                                                    \
                               .defer = true,                                                      \
                               .timeout = 1800,                                                    \
                               .beta1 = 0.9,                                                       \
                               .beta2 = 0.999,                                                     \
                               .epsilon = 1e-8})

/* A tensor's bytes in a file. */
struct slide_part {
    const char *name; /* without "model." */
    const char *path;
    uint64_t offset; /* of its first byte */
    uint64_t count;  /* elements */
    enum slide_dtype dtype;
};

/* One micro-batch; all arrays int32 [rows, seq], borrowed for the call. */
struct slide_batch {
    int32_t rows, seq;
    const int32_t *ids;
    const int32_t *labels;    /* shifted already, negative: none; NULL: none at all */
    const int32_t *positions; /* NULL: 0, 1, 2, ... in each row */
    const int32_t *first;     /* first index that a token may attend to; NULL: 0 */
};

struct slide_step_out {
    double loss, grad_norm;   /* the norm before clipping */
    uint64_t targets, tokens; /* of all ranks */
    bool skipped;             /* nothing was updated: no target anywhere, or nonfinite */
    uint64_t nonfinite;       /* gradients that were Inf or NaN, all ranks */
    int nonfinite_unit;       /* highest unit concerned (backward's first), -1: none */
    double seconds, exposed;  /* of the step; of it, waiting for updates */
    uint64_t step;            /* updates done so far */
};

typedef int slide_progress_fn(void *arg, uint64_t done, uint64_t total, struct slide_err *err);

int slide_train_open(struct slide_train **train, const struct slide_train_spec *spec,
                     struct slide_err *err);
void slide_train_close(struct slide_train *train);
/* Reads this rank's slices; every tensor of the model must be covered exactly once. Collective. */
int slide_train_load(struct slide_train *train, const struct slide_part *part, int parts,
                     slide_progress_fn *progress, void *arg, struct slide_err *err);
/* Writes this rank's slices into existing files of full size. Collective. When it fails on a rank
 * it fails on all, and the state is as before: it may be tried again. */
int slide_train_store(struct slide_train *train, const struct slide_part *part, int parts,
                      slide_progress_fn *progress, void *arg, struct slide_err *err);
/* Matrices from N(0, std), gains 1, biases 0; a value depends on seed and place only. Collective.
 */
int slide_train_init(struct slide_train *train, uint64_t seed, double std, struct slide_err *err);
/* One optimizer step over this rank's micro-batches. Collective. `count` may be 0 on some ranks. */
int slide_train_step(struct slide_train *train, const struct slide_batch *batch, int count,
                     double lr, struct slide_step_out *out, struct slide_err *err);
/* Until the updates of all steps are done, on all ranks. */
int slide_train_flush(struct slide_train *train, struct slide_err *err);
/* Sum of the loss over this rank's valid targets, and their number. Not collective. */
int slide_train_evaluate(struct slide_train *train, const struct slide_batch *batch, int count,
                         double *loss, uint64_t *targets, struct slide_err *err);
/* logits: FP32 [rows, seq, vocab]. Not collective. */
int slide_train_logits(struct slide_train *train, const struct slide_batch *batch, float *logits,
                       struct slide_err *err);
/* what: "master", "exp_avg", "exp_avg_sq", "grad". out has place.count elements (find it first). */
struct slide_place;
int slide_train_find(struct slide_train *train, const char *name, struct slide_place *place,
                     struct slide_err *err);
int slide_train_tensor(struct slide_train *train, const char *name, const char *what, float *out,
                       struct slide_err *err);
/* The i-th checkpoint tensor; 0 past the last. */
int slide_train_name(struct slide_train *train, int i, char *name, size_t size,
                     struct slide_place *place);
/* count <= 16 values a rank -> all[world * count]. Collective, and so a barrier. `kind` names what
 * the ranks meet for, and must be the same on all. */
int slide_train_gather(struct slide_train *train, const char *kind, const double *values, int count,
                       double *all, struct slide_err *err);
void slide_train_abort(struct slide_train *train, const char *message);

/* What was planned, for trainer.plan: name and value pairs; text is NULL for numbers. */
struct slide_plan_item {
    const char *name;
    double value;
    const char *text;
};
const struct slide_plan_item *slide_train_plan(struct slide_train *train, int *count);

/* For tests: calls of the device that can fail, and allocations, since it was opened; and the n-th
 * call from now on fails (0: none). */
void slide_train_device_counts(struct slide_train *train, uint64_t *calls, uint64_t *allocs);
void slide_train_device_fail_at(struct slide_train *train, uint64_t n);

/* Backends by name (backends.c). NULL and an error that lists what there is. */
struct slide_backend;
const struct slide_backend *slide_backend_find(const char *name, struct slide_err *err);
const struct slide_backend *const *slide_backend_list(void); /* NULL-terminated */
/* What the backend runs on, for people: its libraries and where they were found. `blas`, `nvidia`:
 * as in slide_train_spec. */
int slide_backend_text(const char *name, const char *blas, const char *nvidia, char *text,
                       size_t size, struct slide_err *err);

#endif
