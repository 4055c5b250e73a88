/* A rank's life and its step: opens model, layout, host state, device, route and pipeline in that
 * order; a step counts targets with the other ranks, runs the pass, waits for the updates and adds
 * up the results. Called by py/ and by C tests. */
#include "train/train.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/env.h"
#include "base/fault.h"
#include "base/log.h"
#include "base/mem.h"
#include "train/rank.h"

int slide_train_fail(struct slide_train *train, bool broken, struct slide_err *err)
{
    if (broken)
        train->failed = true;
    if (train->host_ready) {
        slide_host_post(&train->host, err);
        slide_host_first_error(&train->host, err);
    }
    return -1;
}

void slide_train_update(struct slide_train *train, const struct slide_adamw numbers[2], int unit,
                        uint64_t first, const float *grad, uint64_t n)
{
    const struct slide_unit *u = &train->layout.unit[unit];
    uint64_t end = first + n;
    /* At most two pieces: before and after the border of weight decay. */
    for (uint64_t at = first; at < end;) {
        int decay = at < u->decay_end;
        uint64_t stop = decay && u->decay_end < end ? u->decay_end : end;
        const struct slide_adamw *adam = &numbers[decay];
        float *m = (float *)slide_host_at(&train->host, u->plane[SLIDE_PLANE_M]) + at;
        float *v = (float *)slide_host_at(&train->host, u->plane[SLIDE_PLANE_V]) + at;
        void *hi = slide_host_at(&train->host, u->plane[SLIDE_PLANE_HI]);
        const float *g = grad + (at - first);
        if (train->layout.split) {
            int16_t *lo = (int16_t *)slide_host_at(&train->host, u->plane[SLIDE_PLANE_LO]) + at;
            slide_adamw_split(train->isa, adam, (uint16_t *)hi + at, lo, m, v, g, stop - at);
        } else {
            slide_adamw_f32(train->isa, adam, (float *)hi + at, m, v, g, stop - at);
        }
        at = stop;
    }
}

/* A piece of gradient that waits for nothing. Pool threads. */
static void apply(void *ctx, int unit, uint64_t first, const float *sum, uint64_t n)
{
    struct slide_train *train = ctx;
    slide_train_update(train, train->adam, unit, first, sum, n);
}

/* All of this rank's slice of a unit is reduced. The route's collector. */
static int reduced(void *ctx, int unit, struct slide_err *err)
{
    struct slide_train *train = ctx;
    if (train->updates) {
        slide_updates_add(train->updates, unit);
        return 0;
    }
    if (slide_fault("update", train->spec.rank, err))
        return -1;
    slide_word_add(&train->host.header->applied[unit], 1);
    return 0;
}

/* Steps that may yet be scaled or dropped when all their gradients are there. */
static bool gated(const struct slide_train_spec *spec)
{
    return spec->max_grad_norm > 0 || spec->skip_nonfinite;
}

/* Bytes of an element of the gradient plane. Sums of several ranks are FP32; one rank's gradient
 * stays as it came. */
static int gradient_bytes(const struct slide_train_spec *spec)
{
    if (!spec->defer && !gated(spec) && !spec->keep_gradients)
        return 0;
    return spec->world > 1 ? 4 : (int)slide_dtype_size(spec->gradient_dtype);
}

/* Each unit's policy, from the one for all or the blocks' own. */
static int choose_activations(struct slide_train *train, struct slide_err *err)
{
    const struct slide_train_spec *spec = &train->spec;
    train->activations = slide_mem_array((uint64_t)train->model.units, 1, err);
    if (!train->activations)
        return -1;
    for (int u = 1; u < train->model.units - 1; u++) {
        int policy =
            spec->block_activations ? spec->block_activations[u - 1] : (int)spec->activations;
        if (policy < 0 || policy >= SLIDE_ACT_COUNT)
            return slide_err_set(err, SLIDE_EINVAL, "activations of block %d: %d", u - 1, policy);
        train->activations[u] = (uint8_t)policy;
    }
    train->spec.block_activations = NULL; /* the caller's */
    return 0;
}

static int check_spec(const struct slide_train_spec *s, struct slide_err *err)
{
    if (s->world < 1 || s->world > SLIDE_RANKS_MAX || s->rank < 0 || s->rank >= s->world)
        return slide_err_set(err, SLIDE_EINVAL, "rank %d of world %d (at most %d ranks)", s->rank,
                             s->world, SLIDE_RANKS_MAX);
    if (s->world > 1 && (!s->rendezvous || !*s->rendezvous))
        return slide_err_set(err, SLIDE_EINVAL, "world is %d but there is no rendezvous name",
                             s->world);
    if (s->max_tokens < 1 || s->max_tokens > INT32_MAX || s->max_seq < 1 ||
        s->max_seq > s->max_tokens)
        return slide_err_set(err, SLIDE_EINVAL, "max_tokens %lld, max_seq %d",
                             (long long)s->max_tokens, s->max_seq);
    if (s->micro_batches < 1 || s->slots < 2 || s->head_rows < 1 || s->chunk_bytes < 256 ||
        s->chunk_bytes > (1u << 30) || s->threads < 0)
        return slide_err_set(err, SLIDE_EINVAL,
                             "micro_batches %d (>= 1), slots %d (>= 2), head_rows %d (>= 1), "
                             "chunk_bytes %llu (256 to 2^30), threads %d (>= 0)",
                             s->micro_batches, s->slots, s->head_rows,
                             (unsigned long long)s->chunk_bytes, s->threads);
    if (s->gradient_dtype != SLIDE_F32 && (s->gradient_dtype != SLIDE_BF16 || !s->bf16))
        return slide_err_set(err, SLIDE_EINVAL,
                             "gradients travel as FP32, or as BF16 where bf16 is on");
    if (!(s->beta1 >= 0 && s->beta1 < 1) || !(s->beta2 >= 0 && s->beta2 < 1) || !(s->epsilon > 0) ||
        !(s->weight_decay >= 0) || !(s->max_grad_norm >= 0))
        return slide_err_set(err, SLIDE_EINVAL,
                             "AdamW: beta1 %g and beta2 %g (0 to 1), epsilon %g (> 0), decay %g, "
                             "max_grad_norm %g (>= 0)",
                             s->beta1, s->beta2, s->epsilon, s->weight_decay, s->max_grad_norm);
    return 0;
}

static size_t sums_bytes(const struct slide_train *train)
{
    return train->on_device ? slide_reduce_sums(train->spec.chunk_bytes) : 0;
}

/* With one rank all routes are the same: its device gets the whole unit, and there is nothing to
 * sum. Left to us, the CPU does what it can: with devices that are host memory nothing is saved by
 * another way. Lays the areas of the segment. */
static int choose_routes(struct slide_train *train, struct slide_err *err)
{
    const struct slide_train_spec *spec = &train->spec;
    const struct slide_backend *backend = slide_backend_find(spec->device, err);
    if (!backend)
        return -1;
    train->shard = spec->world > 1 && spec->delivery == SLIDE_DELIVER_SHARD;
    train->on_device = spec->world > 1 && spec->reduction == SLIDE_REDUCE_GPU;
    bool shared = train->shard || train->on_device;
    if (shared && !backend->host_memory)
        return slide_err_set(err, SLIDE_EINVAL,
                             "weight_delivery='shard' and gradient_reduction='gpu' with %d ranks "
                             "work on device='cpu' so far, not on '%s'",
                             spec->world, backend->name);
    slide_layout_areas(&train->layout, slide_reduce_staging(spec->chunk_bytes),
                       shared ? slide_pipe_slots_bytes(&train->layout, spec->gradient_dtype,
                                                       spec->slots, sums_bytes(train))
                              : 0);
    return 0;
}

/* This rank's part of the CPUs of the process: never from OMP_NUM_THREADS, which torchrun sets. */
static int thread_budget(const struct slide_train_spec *spec)
{
    if (spec->threads > 0)
        return spec->threads;
    int mask = slide_pool_cpus(NULL, 0), share = mask / spec->world > 0 ? mask / spec->world : 1;
    int online = (int)sysconf(_SC_NPROCESSORS_ONLN) / spec->world;
    if (share <= 2 && online > share)
        slide_log(spec->rank, SLIDE_LOG_WARN,
                  "%d of %d online CPUs are allowed to this process: %d thread%s for the updates",
                  mask, online * spec->world, share, share > 1 ? "s" : "");
    return share;
}

/* ---- the plan, for people ---- */

static void plan_add(struct slide_train *train, const char *name, double value, const char *text)
{
    if (train->plan_items < SLIDE_PLAN_MAX)
        train->plan[train->plan_items++] = (struct slide_plan_item){name, value, text};
}

static void plan_fill(struct slide_train *train)
{
    static const char *const plane_name[SLIDE_PLANES] = {"host hi", "host lo", "host exp_avg",
                                                         "host exp_avg_sq", "host gradient"};
    static const char *const policy_name[SLIDE_ACT_COUNT] = {"blocks recompute", "blocks selective",
                                                             "blocks keep", "blocks offload"};
    const struct slide_layout *layout = &train->layout;
    train->plan_items = 0;
    plan_add(train, "device", 0, train->device_name);
    plan_add(train, "libraries", 0, train->blas);
    plan_add(train, "isa", 0, slide_isa_name(train->isa));
    plan_add(train, "weights", 0, layout->split ? "bfloat16" : "float32");
    plan_add(train, "gradients", 0,
             train->spec.gradient_dtype == SLIDE_F32 ? "float32" : "bfloat16");
    for (int p = 0; p < SLIDE_ACT_COUNT; p++) {
        int blocks = 0;
        for (int u = 1; u < layout->units - 1; u++)
            blocks += train->activations[u] == p;
        if (blocks)
            plan_add(train, policy_name[p], blocks, NULL);
    }
    plan_add(train, "weight delivery", 0, train->shard ? "shard" : "full");
    plan_add(train, "gradient reduction", 0, train->on_device ? "gpu" : "cpu");
    plan_add(train, "world", train->spec.world, NULL);
    plan_add(train, "vocab", train->model.config.vocab, NULL);
    plan_add(train, "parameters", (double)layout->params, NULL);
    plan_add(train, "units", layout->units, NULL);
    plan_add(train, "threads", train->threads, NULL);
    plan_add(train, "slots", train->spec.slots, NULL);
    plan_add(train, "chunk_bytes", (double)train->spec.chunk_bytes, NULL);
    for (int p = 0; p < SLIDE_PLANES; p++) {
        size_t size = slide_layout_plane_size(layout, (enum slide_plane)p);
        if (size)
            plan_add(train, plane_name[p], (double)(layout->count * size), NULL);
    }
    plan_add(train, "host staging", (double)layout->staging_bytes * layout->world, NULL);
    if (layout->slots_bytes)
        plan_add(train, "host slots", (double)layout->slots_bytes * layout->world, NULL);
    plan_add(train, "host_bytes", (double)layout->resident, NULL);
    plan_add(train, "host pinned", (double)train->pins.bytes, NULL);
    const struct slide_memory *memory = slide_pipe_memory(train->pipe);
    for (int i = 0; i < memory->areas; i++)
        plan_add(train, memory->area[i].name, (double)memory->area[i].bytes, NULL);
    plan_add(train, "device_bytes", (double)memory->bytes, NULL);
    plan_add(train, "host activations", (double)memory->saved_bytes, NULL);
}

const struct slide_plan_item *slide_train_plan(struct slide_train *train, int *count)
{
    plan_fill(train);
    *count = train->plan_items;
    return train->plan;
}

/* ---- open and close ---- */

static int open_device(struct slide_train *train, struct slide_err *err)
{
    const struct slide_train_spec *spec = &train->spec;
    const struct slide_backend *backend = slide_backend_find(spec->device, err);
    const char *blas = spec->blas && *spec->blas ? spec->blas : NULL;
    const char *nvidia = spec->nvidia && *spec->nvidia ? spec->nvidia : NULL;
    struct slide_device_options o = {.index = spec->device_index,
                                     .rank = spec->rank,
                                     .threads = train->threads,
                                     .blas = blas,
                                     .nvidia = nvidia};
    struct slide_device_info info;
    if (!backend || slide_device_open(&train->device, backend, &o, err) ||
        slide_device_info(train->device, &info, err) ||
        slide_backend_text(spec->device, blas, nvidia, train->blas, sizeof train->blas, err))
        return -1;
    snprintf(train->device_name, sizeof train->device_name, "%s", info.name);
    return 0;
}

static int open_rest(struct slide_train *train, struct slide_err *err)
{
    const struct slide_train_spec *spec = &train->spec;
    bool shared = train->shard || train->on_device;
    if (slide_pins_open(train, err))
        return -1;
    train->pool = slide_pool_new(train->threads, NULL, 0, err);
    if (!train->pool)
        return -1;
    if (train->layout.grad_bytes && slide_updates_open(&train->updates, train, gated(spec), err))
        return -1;
    struct slide_pipe_options pipe = {
        .host = &train->host,
        .device = train->device,
        .wire = spec->gradient_dtype,
        .slots = spec->slots,
        .activations = train->activations,
        .budget = spec->device_budget,
        .overlap = spec->overlap,
        .debug = spec->debug_nonfinite,
        .head_rows = spec->head_rows,
        .micro_batches = spec->micro_batches,
        .tokens = spec->max_tokens,
        .seq = spec->max_seq,
        .sums_bytes = sums_bytes(train),
        .slots_at = shared ? slide_host_slots(&train->host, spec->rank) : NULL};
    if (slide_pipe_open(&train->pipe, &pipe, err))
        return -1;
    if (shared)
        slide_comm_shm(&train->comm, &train->host);
    struct slide_reduce_options reduce = {.host = &train->host,
                                          .device = train->device,
                                          .wire = spec->gradient_dtype,
                                          .chunk_bytes = spec->chunk_bytes,
                                          .comm = train->on_device ? &train->comm : NULL,
                                          .sums = slide_pipe_memory(train->pipe)->sums,
                                          .pool = train->pool,
                                          .apply = apply,
                                          .done = reduced,
                                          .ctx = train};
    if ((train->shard && slide_shard_open(&train->deliver, train->device, &train->comm, err)) ||
        slide_reduce_open(&train->reduce, &reduce, err))
        return -1;
    slide_pipe_connect(train->pipe, train->deliver, train->reduce);
    return 0;
}

int slide_train_open(struct slide_train **out, const struct slide_train_spec *spec,
                     struct slide_err *err)
{
    *out = NULL;
    if (check_spec(spec, err))
        return -1;
    struct slide_train *train = slide_mem_new(sizeof *train, err);
    if (!train)
        return -1;
    train->spec = *spec;
    /* Texts are the caller's; nothing reads them after this call. */
    train->isa = slide_isa_get();
    train->threads = thread_budget(spec);
    if (slide_model_init(&train->model, &spec->config, err))
        goto fail;
    train->spec.config = train->model.config;
    if (choose_activations(train, err))
        goto fail;
    if (slide_layout_init(&train->layout, &train->model, spec->world, spec->bf16,
                          gradient_bytes(spec), err))
        goto fail;
    train->layout_ready = true;
    if (choose_routes(train, err))
        goto fail;
    if (open_device(train, err) ||
        slide_host_open(&train->host, &train->layout, spec->rank, spec->rendezvous, spec->agreement,
                        spec->timeout, spec->poll, spec->poll_arg, err))
        goto fail;
    train->host_ready = true;
    if (open_rest(train, err)) {
        slide_train_fail(train, true, err);
        goto fail;
    }
    *out = train;
    return 0;
fail:
    slide_train_close(train);
    return -1;
}

void slide_train_close(struct slide_train *train)
{
    if (!train)
        return;
    if (train->failed)
        slide_device_abandon(train->device);
    else if (train->updates) /* of the last step: the other ranks count on them */
        slide_updates_drain(train->updates, NULL);
    slide_shard_close(train->deliver);
    slide_reduce_close(train->reduce);
    slide_updates_close(train->updates);
    slide_pipe_close(train->pipe);
    slide_pool_free(train->pool);
    slide_pins_close(train);
    if (train->host_ready)
        slide_host_close(&train->host);
    slide_device_close(train->device);
    if (train->layout_ready)
        slide_layout_fini(&train->layout);
    slide_model_fini(&train->model);
    slide_mem_free(train->activations);
    slide_mem_free(train);
}

void slide_train_abort(struct slide_train *train, const char *message)
{
    struct slide_err err = SLIDE_ERR_INIT;
    slide_err_set(&err, SLIDE_EPEER, "%s", message);
    slide_train_fail(train, true, &err);
}

int slide_train_gather(struct slide_train *train, const char *kind, const double *values, int count,
                       double *all, struct slide_err *err)
{
    if (slide_host_gather(&train->host, kind, values, count, all, err))
        return slide_train_fail(train, true, err);
    return 0;
}

void slide_train_device_counts(struct slide_train *train, uint64_t *calls, uint64_t *allocs)
{
    *calls = slide_device_calls(train->device);
    *allocs = slide_device_allocs(train->device);
}

void slide_train_device_fail_at(struct slide_train *train, uint64_t n)
{
    slide_device_fail_at(train->device, n);
}

/* ---- passes ---- */

static int check_ready(const struct slide_train *train, struct slide_err *err)
{
    if (train->failed)
        return slide_err_set(err, SLIDE_ESTATE,
                             "this trainer failed before and its state may mix two steps; "
                             "close it and open a new one");
    if (!train->loaded)
        return slide_err_set(err, SLIDE_ESTATE, "no weights have been loaded");
    return 0;
}

static int check_batch(const struct slide_train *train, const struct slide_batch *batch, int m,
                       struct slide_err *err)
{
    int32_t vocab = train->model.config.vocab;
    int64_t n = (int64_t)batch->rows * batch->seq;
    if (batch->rows < 1 || batch->seq < 1 || n > INT32_MAX || !batch->ids)
        return slide_err_set(err, SLIDE_EINVAL, "micro-batch %d has the shape [%d, %d]", m,
                             batch->rows, batch->seq);
    for (int64_t i = 0; i < n; i++) {
        int row = (int)(i / batch->seq), at = (int)(i % batch->seq);
        if (batch->ids[i] < 0 || batch->ids[i] >= vocab)
            return slide_err_set(err, SLIDE_EINVAL,
                                 "micro-batch %d, row %d, column %d: token id %d is outside the "
                                 "vocabulary of %d",
                                 m, row, at, batch->ids[i], vocab);
        if (batch->labels && batch->labels[i] >= vocab)
            return slide_err_set(err, SLIDE_EINVAL,
                                 "micro-batch %d, row %d, column %d: label %d is outside the "
                                 "vocabulary of %d",
                                 m, row, at, batch->labels[i], vocab);
        if (batch->first && (batch->first[i] < 0 || batch->first[i] > at))
            return slide_err_set(err, SLIDE_EINVAL,
                                 "micro-batch %d, row %d, column %d: first is %d, must be 0 to %d",
                                 m, row, at, batch->first[i], at);
        if (batch->positions && batch->positions[i] < 0)
            return slide_err_set(err, SLIDE_EINVAL,
                                 "micro-batch %d, row %d, column %d: position %d is negative", m,
                                 row, at, batch->positions[i]);
    }
    return 0;
}

/* Checks, counts targets and tokens, makes room. */
static int prepare(struct slide_train *train, const struct slide_batch *batch, int count,
                   struct slide_pipe_batch **out, uint64_t *targets, uint64_t *tokens,
                   struct slide_err *err)
{
    *targets = *tokens = 0;
    *out = NULL;
    int64_t most = 1;
    int32_t seq = 1;
    if (check_ready(train, err))
        return -1;
    for (int m = 0; m < count; m++) {
        if (check_batch(train, &batch[m], m, err))
            return -1;
        int64_t n = (int64_t)batch[m].rows * batch[m].seq;
        *tokens += (uint64_t)n;
        for (int64_t i = 0; batch[m].labels && i < n; i++)
            *targets += batch[m].labels[i] >= 0;
        most = n > most ? n : most;
        seq = batch[m].seq > seq ? batch[m].seq : seq;
    }
    if (slide_pipe_reserve(train->pipe, count > 0 ? count : 1, most, seq, err))
        return slide_train_fail(train, true, err); /* the old memory is gone */
    *out = slide_mem_array((uint64_t)count, sizeof **out, err);
    if (!*out)
        return slide_train_fail(train, true, err); /* the others wait for us by now */
    for (int m = 0; m < count; m++)
        (*out)[m] = (struct slide_pipe_batch){batch[m].rows,   batch[m].seq,       batch[m].ids,
                                              batch[m].labels, batch[m].positions, batch[m].first};
    return 0;
}

/* What the ranks tell each other before and after a pass. */
enum { BEFORE_TARGETS, BEFORE_TOKENS, BEFORE_LR, BEFORE_COUNT };
enum { AFTER_LOSS, AFTER_SQUARES, AFTER_BAD, AFTER_BAD_UNIT, AFTER_COUNT };

static int meet_before(struct slide_train *train, uint64_t targets, uint64_t tokens, double lr,
                       struct slide_step_out *out, struct slide_err *err)
{
    double own[BEFORE_COUNT] = {(double)targets, (double)tokens, lr};
    double all[SLIDE_RANKS_MAX * BEFORE_COUNT];
    if (slide_host_gather(&train->host, "train_step", own, BEFORE_COUNT, all, err))
        return -1;
    for (int r = 0; r < train->spec.world; r++) {
        const double *rank = all + (size_t)r * BEFORE_COUNT;
        out->targets += (uint64_t)rank[BEFORE_TARGETS];
        out->tokens += (uint64_t)rank[BEFORE_TOKENS];
        if (rank[BEFORE_LR] != all[BEFORE_LR])
            return slide_err_set(err, SLIDE_EPEER,
                                 "ranks disagree on the learning rate of step %llu: rank %d has "
                                 "%.17g, rank 0 has %.17g",
                                 (unsigned long long)train->step + 1, r, rank[BEFORE_LR],
                                 all[BEFORE_LR]);
    }
    return 0;
}

static int meet_after(struct slide_train *train, double loss,
                      const struct slide_reduce_totals *totals, struct slide_step_out *out,
                      struct slide_err *err)
{
    double own[AFTER_COUNT] = {loss, totals->squares, (double)totals->nonfinite,
                               (double)totals->nonfinite_unit};
    double all[SLIDE_RANKS_MAX * AFTER_COUNT];
    double squares = 0;
    if (slide_host_gather(&train->host, "the end of train_step", own, AFTER_COUNT, all, err))
        return -1;
    for (int r = 0; r < train->spec.world; r++) {
        const double *rank = all + (size_t)r * AFTER_COUNT;
        out->loss += rank[AFTER_LOSS];
        squares += rank[AFTER_SQUARES];
        out->nonfinite += (uint64_t)rank[AFTER_BAD];
        if (out->nonfinite_unit < (int)rank[AFTER_BAD_UNIT])
            out->nonfinite_unit = (int)rank[AFTER_BAD_UNIT];
    }
    out->loss /= (double)out->targets;
    out->grad_norm = sqrt(squares);
    return 0;
}

/* The numbers of this step's updates, for whoever applies them. */
static void begin_updates(struct slide_train *train, double lr)
{
    const struct slide_train_spec *spec = &train->spec;
    struct slide_adamw_hyper hyper = {
        lr, spec->beta1, spec->beta2, spec->epsilon, spec->weight_decay, train->step + 1};
    struct slide_adamw adam[2];
    for (int decay = 0; decay < 2; decay++)
        adam[decay] = slide_adamw_prepare(&hyper, decay);
    if (train->updates)
        slide_updates_begin(train->updates, adam);
    else
        memcpy(train->adam, adam, sizeof adam);
}

/* What becomes of a step whose gradients are all there. As torch.nn.utils.clip_grad_norm_: the
 * factor is max_grad_norm / (norm + 1e-6), at most 1. */
static int end_updates(struct slide_train *train, struct slide_step_out *out, struct slide_err *err)
{
    const struct slide_train_spec *spec = &train->spec;
    if (gated(spec) && out->nonfinite) {
        slide_updates_drop(train->updates);
        out->skipped = true;
        return 0;
    }
    double scale = spec->max_grad_norm > 0 ? spec->max_grad_norm / (out->grad_norm + 1e-6) : 1;
    if (train->updates)
        slide_updates_release(train->updates, (float)fmin(scale, 1));
    train->step++;
    return spec->defer ? 0 : slide_train_wait(train, err);
}

int slide_train_step(struct slide_train *train, const struct slide_batch *batch, int count,
                     double lr, struct slide_step_out *out, struct slide_err *err)
{
    struct slide_pipe_batch *micro = NULL;
    uint64_t targets, tokens;
    double start = slide_time(), waited = slide_pipe_waited(train->pipe);
    *out = (struct slide_step_out){.nonfinite_unit = -1, .step = train->step};
    if (!(lr >= 0) || lr > FLT_MAX)
        return slide_err_set(err, SLIDE_EINVAL, "learning rate %g", lr);
    if (prepare(train, batch, count, &micro, &targets, &tokens, err))
        return -1;
    if (meet_before(train, targets, tokens, lr, out, err))
        goto fail;
    if (out->targets == 0) {
        out->skipped = true;
        out->seconds = slide_time() - start;
        slide_mem_free(micro);
        return 0;
    }
    begin_updates(train, lr);
    struct slide_pass pass = {.kind = SLIDE_PASS_TRAIN,
                              .batch = micro,
                              .count = count,
                              .updates = (uint32_t)train->step,
                              .scale = (float)(1.0 / (double)out->targets)};
    struct slide_reduce_totals totals;
    if (slide_pipe_run(train->pipe, &pass, err))
        goto fail;
    double computed = slide_time();
    if (slide_reduce_flush(train->reduce, &totals, err))
        goto fail;
    double reduced_at = slide_time();
    if (meet_after(train, pass.loss, &totals, out, err) || end_updates(train, out, err))
        goto fail;
    out->step = train->step;
    out->exposed = reduced_at - computed + slide_pipe_waited(train->pipe) - waited;
    out->seconds = slide_time() - start;
    slide_mem_free(micro);
    return 0;
fail:
    slide_mem_free(micro);
    return slide_train_fail(train, true, err);
}

int slide_train_wait(struct slide_train *train, struct slide_err *err)
{
    for (int unit = 0; unit < train->layout.units; unit++)
        if (slide_host_wait_updates(&train->host, unit, (uint32_t)train->step, &train->host.peers,
                                    err))
            return -1;
    return 0;
}

int slide_train_flush(struct slide_train *train, struct slide_err *err)
{
    if (check_ready(train, err))
        return -1;
    return slide_train_wait(train, err) ? slide_train_fail(train, true, err) : 0;
}

static int run_forward(struct slide_train *train, struct slide_pass *pass,
                       const struct slide_batch *batch, int count, uint64_t *targets,
                       struct slide_err *err)
{
    struct slide_pipe_batch *micro = NULL;
    uint64_t tokens;
    if (prepare(train, batch, count, &micro, targets, &tokens, err))
        return -1;
    pass->batch = micro;
    pass->count = count;
    pass->updates = (uint32_t)train->step;
    int failed = slide_pipe_run(train->pipe, pass, err);
    slide_mem_free(micro);
    return failed ? slide_train_fail(train, true, err) : 0;
}

int slide_train_evaluate(struct slide_train *train, const struct slide_batch *batch, int count,
                         double *loss, uint64_t *targets, struct slide_err *err)
{
    struct slide_pass pass = {.kind = SLIDE_PASS_LOSS};
    *loss = 0;
    *targets = 0;
    if (count == 0)
        return check_ready(train, err);
    if (run_forward(train, &pass, batch, count, targets, err))
        return -1;
    *loss = pass.loss;
    return 0;
}

int slide_train_logits(struct slide_train *train, const struct slide_batch *batch, float *logits,
                       struct slide_err *err)
{
    struct slide_pass pass = {.kind = SLIDE_PASS_LOGITS, .logits = logits};
    uint64_t targets;
    return run_forward(train, &pass, batch, 1, &targets, err);
}
