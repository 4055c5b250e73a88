/* Executes a schedule.
 *
 * DESIGN. The driver walks the stage list once and enqueues; lanes and events keep the order that
 * the list's dependencies ask for. It blocks in three places only: for a unit that another rank has
 * not finished updating (slide_deliver_full) or not delivered its slice of (slide_shard_wait), for
 * a gradient slot whose last gradient has not been copied out yet, and at the end for the results.
 * A lane that is full makes it wait as well, where nothing is looked at, so signals and the abort
 * word are also looked at before each micro-batch.
 *
 *   h2d lane       inputs, then weights: waits for slot.free, records slot.ready (with sharded
 *                  delivery the route's own lanes do that in training passes)
 *   compute lane   waits for slot.ready, runs the unit on every micro-batch, records slot.free and
 *                  grad.ready
 *   reduction      waits for grad.ready, copies out (route/)
 *   save lane      unit outputs that wait in host memory: out after their forward; the h2d lane
 *                  brings them back as soon as the backward has left their place in the ring
 *
 * Layer-major: every micro-batch passes a unit before the next unit starts, so weights and
 * gradients cross the bus once a pass however many micro-batches there are. overlap = 0 waits after
 * each stage; the bits are the same. */
#include <string.h>

#include "base/fault.h"
#include "base/mem.h"
#include "pipe/pipe.h"
#include "pipe/program.h"

#define GRADS 2 /* gradient slots for blocks */

struct slot {
    struct slide_event *ready, *free; /* fetched; used for the last time */
    uint32_t ticket;                  /* of the last sharded fetch */
};

struct grad {
    struct slide_event *ready;
    uint32_t ticket; /* of the last gradient that left from here */
    bool used;
};

struct ring { /* a place of outputs that wait in host memory */
    struct slide_event *made, *saved, *used, *restored;
};

struct slide_pipe {
    struct slide_pipe_options o;
    const struct slide_layout *layout;
    struct slide_memory memory;
    struct slide_schedule train, forward;
    struct slide_lane *compute, *h2d, *save; /* save: NULL where nothing is offloaded */
    struct ring ring[SLIDE_RING];
    struct slot *slot; /* [slots + 2] */
    struct grad *grad; /* [GRADS + 2] */
    struct slide_event *inputs;
    double looked;             /* time of the last check_stop */
    struct slide_shard *shard; /* NULL: full delivery */
    struct slide_reduce *reduce;
    double waited; /* full delivery: for updates */
};

/* More than there are blocks would stay empty. */
static int clamp_slots(const struct slide_model *model, int slots)
{
    int blocks = model->units - 2 > 1 ? model->units - 2 : 1;
    return slots < blocks ? slots : blocks;
}

size_t slide_pipe_slots_bytes(const struct slide_layout *layout, enum slide_dtype wire, int slots,
                              size_t sums_bytes)
{
    struct slide_memory_options o = {.layout = layout,
                                     .wire = wire,
                                     .slots = clamp_slots(layout->model, slots),
                                     .grads = GRADS,
                                     .sums_bytes = sums_bytes};
    return slide_memory_slots_bytes(&o);
}

/* `slots`: what the plan before had taken for its slots, or NULL. */
static int plan_memory(struct slide_pipe *pipe, void *slots, struct slide_err *err)
{
    struct slide_memory_options o = {.layout = pipe->layout,
                                     .device = pipe->o.device,
                                     .wire = pipe->o.wire,
                                     .slots = pipe->o.slots,
                                     .grads = GRADS,
                                     .micro_batches = pipe->o.micro_batches,
                                     .tokens = pipe->o.tokens,
                                     .seq = pipe->o.seq,
                                     .head_rows = pipe->o.head_rows,
                                     .activations = pipe->o.activations,
                                     .debug = pipe->o.debug,
                                     .budget = pipe->o.budget,
                                     .sums_bytes = pipe->o.sums_bytes,
                                     .slots_at = slots ? slots : pipe->o.slots_at,
                                     .slots_given = slots};
    if (slide_memory_init(&pipe->memory, &o, err))
        return -1;
    slide_model_rope(pipe->layout->model, (float *)pipe->memory.host_base);
    size_t bytes = (size_t)pipe->layout->model->config.head_dim / 2 * 4;
    /* Padding between tensors must be zero on its way out; no op ever writes it again. */
    for (int i = 0; i < GRADS + 2; i++)
        if (slide_zero(pipe->compute, pipe->memory.grad[i], pipe->memory.grad_count[i] * 4, err))
            return -1;
    return slide_copy(pipe->compute, pipe->memory.inv_freq, pipe->memory.host_base, bytes,
                      SLIDE_COPY_H2D, err) ||
                   slide_lane_sync(pipe->compute, &pipe->o.host->local, err)
               ? -1
               : 0;
}

static int open_ring(struct slide_pipe *pipe, struct slide_err *err)
{
    struct slide_device *device = pipe->o.device;
    pipe->save = slide_lane_open(device, SLIDE_LANE_D2H, err);
    if (!pipe->save)
        return -1;
    for (int i = 0; i < SLIDE_RING; i++) {
        struct ring *r = &pipe->ring[i];
        if (!(r->made = slide_event_new(device, err)) ||
            !(r->saved = slide_event_new(device, err)) ||
            !(r->used = slide_event_new(device, err)) ||
            !(r->restored = slide_event_new(device, err)))
            return -1;
    }
    return 0;
}

int slide_pipe_open(struct slide_pipe **out, const struct slide_pipe_options *options,
                    struct slide_err *err)
{
    struct slide_pipe *pipe = slide_mem_new(sizeof *pipe, err);
    *out = pipe;
    if (!pipe)
        return -1;
    pipe->o = *options;
    pipe->layout = options->host->layout;
    const struct slide_model *model = pipe->layout->model;
    bool tied = model->config.tied;
    pipe->o.slots = clamp_slots(model, pipe->o.slots);
    int slots = pipe->o.slots + 2;
    pipe->slot = slide_mem_array((uint64_t)slots, sizeof *pipe->slot, err);
    pipe->grad = slide_mem_array(GRADS + 2, sizeof *pipe->grad, err);
    if (!pipe->slot || !pipe->grad)
        goto fail;
    pipe->compute = slide_lane_open(pipe->o.device, SLIDE_LANE_COMPUTE, err);
    pipe->h2d = pipe->compute ? slide_lane_open(pipe->o.device, SLIDE_LANE_H2D, err) : NULL;
    pipe->inputs = pipe->h2d ? slide_event_new(pipe->o.device, err) : NULL;
    if (!pipe->inputs)
        goto fail;
    for (int i = 0; i < slots; i++)
        if (!(pipe->slot[i].ready = slide_event_new(pipe->o.device, err)) ||
            !(pipe->slot[i].free = slide_event_new(pipe->o.device, err)))
            goto fail;
    for (int i = 0; i < GRADS + 2; i++)
        if (!(pipe->grad[i].ready = slide_event_new(pipe->o.device, err)))
            goto fail;
    if (plan_memory(pipe, NULL, err) || (pipe->memory.saved_bytes && open_ring(pipe, err)))
        goto fail;
    struct slide_schedule_options schedule = {.units = model->units,
                                              .slots = pipe->o.slots,
                                              .grads = GRADS,
                                              .tied = tied,
                                              .offload = pipe->memory.offload,
                                              .ring = SLIDE_RING};
    if (slide_schedule_init(&pipe->forward, &schedule, err))
        goto fail;
    schedule.train = true;
    if (slide_schedule_init(&pipe->train, &schedule, err))
        goto fail;
    return 0;
fail:
    slide_pipe_close(pipe);
    *out = NULL;
    return -1;
}

void slide_pipe_close(struct slide_pipe *pipe)
{
    if (!pipe)
        return;
    slide_lane_close(pipe->save);
    slide_lane_close(pipe->h2d);
    slide_lane_close(pipe->compute);
    slide_memory_fini(&pipe->memory);
    slide_schedule_fini(&pipe->forward);
    slide_schedule_fini(&pipe->train);
    for (int i = 0; pipe->grad && i < GRADS + 2; i++)
        slide_event_free(pipe->grad[i].ready);
    for (int i = 0; pipe->slot && i < pipe->o.slots + 2; i++) {
        slide_event_free(pipe->slot[i].free);
        slide_event_free(pipe->slot[i].ready);
    }
    for (int i = 0; i < SLIDE_RING; i++) {
        slide_event_free(pipe->ring[i].restored);
        slide_event_free(pipe->ring[i].used);
        slide_event_free(pipe->ring[i].saved);
        slide_event_free(pipe->ring[i].made);
    }
    slide_event_free(pipe->inputs);
    slide_mem_free(pipe->grad);
    slide_mem_free(pipe->slot);
    slide_mem_free(pipe);
}

const struct slide_memory *slide_pipe_memory(const struct slide_pipe *pipe)
{
    return &pipe->memory;
}

int slide_pipe_reserve(struct slide_pipe *pipe, int micro_batches, int64_t tokens, int32_t seq,
                       struct slide_err *err)
{
    struct slide_pipe_options *o = &pipe->o;
    if (micro_batches <= o->micro_batches && tokens <= o->tokens && seq <= o->seq)
        return 0;
    o->micro_batches = micro_batches > o->micro_batches ? micro_batches : o->micro_batches;
    o->tokens = tokens > o->tokens ? tokens : o->tokens;
    o->seq = seq > o->seq ? seq : o->seq;
    /* Slots stay: other ranks may know where they are. */
    void *slots = pipe->memory.slots_own ? pipe->memory.slots_base : NULL;
    pipe->memory.slots_own = false;
    slide_memory_fini(&pipe->memory);
    return plan_memory(pipe, slots, err);
}

void slide_pipe_connect(struct slide_pipe *pipe, struct slide_shard *shard,
                        struct slide_reduce *reduce)
{
    pipe->shard = shard;
    pipe->reduce = reduce;
}

double slide_pipe_waited(const struct slide_pipe *pipe)
{
    return pipe->waited + (pipe->shard ? slide_shard_waited(pipe->shard) : 0);
}

/* ---- inputs ---- */

/* Fills the host mirror of a micro-batch and enqueues its copy. */
static int stage_inputs(struct slide_pipe *pipe, int m, const struct slide_pipe_batch *batch,
                        struct slide_err *err)
{
    struct slide_micro *micro = &pipe->memory.micro[m];
    size_t stride = (size_t)pipe->o.tokens;
    int32_t *ids = micro->host, *labels = ids + stride, *positions = labels + stride;
    int32_t *first = positions + stride, *window = first + stride;
    int32_t w = pipe->layout->model->config.sliding_window;
    micro->rows = batch->rows;
    micro->seq = batch->seq;
    micro->n = (int64_t)batch->rows * batch->seq;
    micro->documents = false;
    size_t bytes = (size_t)micro->n * 4;
    memcpy(ids, batch->ids, bytes);
    for (int64_t i = 0; i < micro->n; i++) {
        int32_t t = (int32_t)(i % batch->seq);
        int32_t edge = w > 0 && t - w + 1 > 0 ? t - w + 1 : 0;
        labels[i] = batch->labels ? batch->labels[i] : -1;
        positions[i] = batch->positions ? batch->positions[i] : t;
        first[i] = batch->first ? batch->first[i] : 0;
        micro->documents |= first[i] != 0;
        window[i] = first[i] > edge ? first[i] : edge;
    }
    int32_t *to[] = {micro->ids, micro->labels, micro->positions, micro->first[0], micro->first[1]};
    for (int i = 0; i < 5; i++)
        if (slide_copy(pipe->h2d, to[i], micro->host + (size_t)i * stride, bytes, SLIDE_COPY_H2D,
                       err))
            return -1;
    return 0;
}

static int start_inputs(struct slide_pipe *pipe, const struct slide_pass *pass,
                        struct slide_err *err)
{
    for (int m = 0; m < pass->count; m++)
        if (stage_inputs(pipe, m, &pass->batch[m], err))
            return -1;
    if (slide_event_record(pipe->inputs, pipe->h2d, err) ||
        slide_event_wait(pipe->inputs, pipe->compute, err))
        return -1;
    for (int m = 0; m < pass->count; m++) {
        struct slide_micro *micro = &pipe->memory.micro[m];
        struct slide_rope_table_args a = {.positions = micro->positions,
                                          .inv_freq = pipe->memory.inv_freq,
                                          .cos = micro->cos,
                                          .sin = micro->sin,
                                          .n = micro->n,
                                          .half = pipe->layout->model->config.head_dim / 2,
                                          .factor = 1};
        if (slide_launch_rope_table(pipe->compute, slide_layout_weight_type(pipe->layout), &a, err))
            return -1;
    }
    return 0;
}

/* ---- stages ---- */

static struct slide_program program_of(struct slide_pipe *pipe, const struct slide_stage *stage,
                                       int m)
{
    return (struct slide_program){.layout = pipe->layout,
                                  .memory = &pipe->memory,
                                  .lane = pipe->compute,
                                  .unit = stage->unit,
                                  .micro = m,
                                  .weights =
                                      stage->slot < 0 ? NULL : pipe->memory.weights[stage->slot],
                                  .grad = stage->grad < 0 ? NULL : pipe->memory.grad[stage->grad],
                                  .fresh = m == 0};
}

static int check_stop(struct slide_pipe *pipe, struct slide_err *err)
{
    const struct slide_waiter *local = &pipe->o.host->local;
    if (slide_word_get(local->abort))
        return slide_err_set(err, SLIDE_EPEER, "another rank has failed");
    double now = slide_time();
    if (!local->poll || now - pipe->looked < 0.05)
        return 0;
    pipe->looked = now;
    return local->poll(local->arg, err);
}

static int run_fetch(struct slide_pipe *pipe, const struct slide_stage *stage,
                     const struct slide_pass *pass, struct slide_err *err)
{
    struct slot *slot = &pipe->slot[stage->slot];
    void *to = pipe->memory.weights[stage->slot];
    if (pipe->shard && pass->kind == SLIDE_PASS_TRAIN) {
        struct slide_shard_slot place = {to, slot->free, slot->ready};
        return slide_shard_fetch(pipe->shard, stage->unit, pass->updates, &place, &slot->ticket,
                                 err);
    }
    if (slide_event_wait(slot->free, pipe->h2d, err) ||
        slide_deliver_full(pipe->o.host, stage->unit, pass->updates, to, pipe->h2d, &pipe->waited,
                           err))
        return -1;
    return slide_event_record(slot->ready, pipe->h2d, err);
}

/* The compute lane goes on when the slot's weights are there. */
static int await_slot(struct slide_pipe *pipe, int index, struct slide_err *err)
{
    struct slot *slot = &pipe->slot[index];
    if (pipe->shard && slide_shard_wait(pipe->shard, slot->ticket, err))
        return -1;
    return slide_event_wait(slot->ready, pipe->compute, err);
}

/* The tail of a unit (norm gains, biases) only ever gets added to; matrices are written by the
 * first micro-batch. Embedding and untied head share a slot, so all of it is zeroed for them, as it
 * is on a rank without micro-batches. */
static int clear_grad(struct slide_pipe *pipe, const struct slide_stage *stage,
                      const struct slide_pass *pass, struct slide_err *err)
{
    const struct slide_unit *unit = &pipe->layout->unit[stage->unit];
    struct grad *grad = &pipe->grad[stage->grad];
    if (grad->used && slide_reduce_wait(pipe->reduce, grad->ticket, err))
        return -1;
    uint64_t from = unit->kind == SLIDE_UNIT_BLOCK && pass->count ? unit->decay_end : 0;
    return slide_zero(pipe->compute, pipe->memory.grad[stage->grad] + from,
                      (unit->count - from) * 4, err);
}

/* The place of a unit's output in the ring; -1: it stays on the device. */
static int ring_place(const struct slide_pipe *pipe, int unit)
{
    int number = 0;
    if (!pipe->memory.offload[unit])
        return -1;
    for (int u = 0; u < unit; u++)
        number += pipe->memory.offload[u];
    return number % SLIDE_RING;
}

static size_t output_bytes(const struct slide_pipe *pipe, int m)
{
    return (size_t)pipe->memory.micro[m].n * (size_t)pipe->layout->model->config.hidden *
           slide_dtype_size(slide_layout_weight_type(pipe->layout));
}

static int run_save(struct slide_pipe *pipe, const struct slide_stage *stage,
                    const struct slide_pass *pass, struct slide_err *err)
{
    struct ring *ring = &pipe->ring[stage->slot];
    if (slide_event_record(ring->made, pipe->compute, err) ||
        slide_event_wait(ring->made, pipe->save, err))
        return -1;
    for (int m = 0; m < pass->count; m++) {
        struct slide_micro *micro = &pipe->memory.micro[m];
        if (slide_copy(pipe->save, micro->saved[stage->unit], micro->boundary[stage->unit],
                       output_bytes(pipe, m), SLIDE_COPY_D2H, err))
            return slide_err_note(err, "while unit %d's output goes to host memory", stage->unit);
    }
    return slide_event_record(ring->saved, pipe->save, err);
}

/* Stands right after the backward that read the place, so a record here is after it. */
static int run_restore(struct slide_pipe *pipe, const struct slide_stage *stage,
                       const struct slide_pass *pass, struct slide_err *err)
{
    struct ring *ring = &pipe->ring[stage->slot];
    if (slide_event_record(ring->used, pipe->compute, err) ||
        slide_event_wait(ring->used, pipe->h2d, err) ||
        slide_event_wait(ring->saved, pipe->h2d, err))
        return -1;
    for (int m = 0; m < pass->count; m++) {
        struct slide_micro *micro = &pipe->memory.micro[m];
        if (slide_copy(pipe->h2d, micro->boundary[stage->unit], micro->saved[stage->unit],
                       output_bytes(pipe, m), SLIDE_COPY_H2D, err))
            return slide_err_note(err, "while unit %d's output comes back", stage->unit);
    }
    return slide_event_record(ring->restored, pipe->h2d, err);
}

static int run_forward(struct slide_pipe *pipe, const struct slide_stage *stage,
                       const struct slide_pass *pass, struct slide_err *err)
{
    int place = ring_place(pipe, stage->unit);
    if (await_slot(pipe, stage->slot, err) ||
        (place >= 0 && slide_event_wait(pipe->ring[place].saved, pipe->compute, err)) ||
        slide_fault("forward", pipe->o.host->rank, err))
        return -1;
    for (int m = 0; m < pass->count; m++) {
        struct slide_program program = program_of(pipe, stage, m);
        if (check_stop(pipe, err) || slide_program_forward(&program, err))
            return -1;
    }
    return slide_event_record(pipe->slot[stage->slot].free, pipe->compute, err);
}

static int run_head(struct slide_pipe *pipe, const struct slide_stage *stage,
                    const struct slide_pass *pass, struct slide_err *err)
{
    const struct slide_layout *layout = pipe->layout;
    bool train = pass->kind == SLIDE_PASS_TRAIN, tied = stage->table >= 0;
    int slot = tied ? stage->table : stage->slot;
    int grad = tied ? pipe->train.grads : stage->grad; /* tied: the embedding's gradient slot */
    const struct slide_unit *unit = &layout->unit[tied ? 0 : stage->unit];
    int loss = slide_model_table(layout->model, stage->unit)->op[1].w;
    uint64_t offset = unit->tensor[tied ? 0 : loss].offset;
    struct slide_head head = {.mode = train                           ? SLIDE_HEAD_TRAIN
                                      : pass->kind == SLIDE_PASS_LOSS ? SLIDE_HEAD_LOSS
                                                                      : SLIDE_HEAD_LOGITS,
                              .table = pipe->memory.weights[slot] +
                                       offset * slide_dtype_size(slide_layout_weight_type(layout)),
                              .table_grad = train ? pipe->memory.grad[grad] + offset : NULL,
                              .scale = pass->scale,
                              .logits = pass->logits};
    if (await_slot(pipe, stage->slot, err) || await_slot(pipe, slot, err))
        return -1;
    if (train) {
        struct slide_stage table = {.unit = 0, .grad = grad};
        if (clear_grad(pipe, stage, pass, err) || (tied && clear_grad(pipe, &table, pass, err)))
            return -1;
    }
    for (int m = 0; m < pass->count; m++) {
        struct slide_program program = program_of(pipe, stage, m);
        if (check_stop(pipe, err) || slide_program_head(&program, &head, err))
            return -1;
    }
    if (tied && slide_event_record(pipe->slot[slot].free, pipe->compute, err))
        return -1;
    return slide_event_record(pipe->slot[stage->slot].free, pipe->compute, err);
}

static int run_backward(struct slide_pipe *pipe, const struct slide_stage *stage,
                        const struct slide_pass *pass, struct slide_err *err)
{
    const struct slide_model *model = pipe->layout->model;
    bool block = stage->unit > 0;
    int place = block ? ring_place(pipe, stage->unit - 1) : -1;
    if ((block && await_slot(pipe, stage->slot, err)) ||
        (place >= 0 && slide_event_wait(pipe->ring[place].restored, pipe->compute, err)))
        return -1;
    /* A tied embedding's slot has the head's contribution in it already. */
    if ((block || !model->config.tied) && clear_grad(pipe, stage, pass, err))
        return -1;
    if (slide_fault("backward", pipe->o.host->rank, err))
        return -1;
    for (int m = 0; m < pass->count; m++) {
        struct slide_program program = program_of(pipe, stage, m);
        if (check_stop(pipe, err) || (block && slide_program_recompute(&program, err)) ||
            slide_program_backward(&program, err))
            return -1;
    }
    return block ? slide_event_record(pipe->slot[stage->slot].free, pipe->compute, err) : 0;
}

static int run_grad_out(struct slide_pipe *pipe, const struct slide_stage *stage,
                        struct slide_err *err)
{
    struct grad *grad = &pipe->grad[stage->grad];
    const struct slide_unit *unit = &pipe->layout->unit[stage->unit];
    if (pipe->o.wire != SLIDE_F32) {
        struct slide_cast_args a = {.in = pipe->memory.grad[stage->grad],
                                    .out = pipe->memory.wire[stage->grad],
                                    .n = (int64_t)unit->count,
                                    .from = SLIDE_F32,
                                    .to = pipe->o.wire};
        if (slide_launch_cast(pipe->compute, SLIDE_F32, &a, err))
            return -1;
    }
    if (slide_event_record(grad->ready, pipe->compute, err) ||
        slide_reduce_submit(pipe->reduce, stage->unit, pipe->memory.wire[stage->grad], grad->ready,
                            &grad->ticket, err))
        return -1;
    grad->used = true;
    return 0;
}

static int run_stage(struct slide_pipe *pipe, const struct slide_stage *stage,
                     const struct slide_pass *pass, struct slide_err *err)
{
    switch (stage->kind) {
    case SLIDE_STAGE_FETCH:
        return run_fetch(pipe, stage, pass, err);
    case SLIDE_STAGE_FORWARD:
        return run_forward(pipe, stage, pass, err);
    case SLIDE_STAGE_HEAD:
        return run_head(pipe, stage, pass, err);
    case SLIDE_STAGE_BACKWARD:
        return run_backward(pipe, stage, pass, err);
    case SLIDE_STAGE_GRAD_OUT:
        return run_grad_out(pipe, stage, err);
    case SLIDE_STAGE_SAVE:
        return run_save(pipe, stage, pass, err);
    case SLIDE_STAGE_RESTORE:
        return run_restore(pipe, stage, pass, err);
    }
    return slide_err_set(err, SLIDE_ESTATE, "stage kind %d", (int)stage->kind);
}

static int wait_stage(struct slide_pipe *pipe, const struct slide_stage *stage,
                      struct slide_err *err)
{
    const struct slide_waiter *local = &pipe->o.host->local;
    if (pipe->shard && stage->kind == SLIDE_STAGE_FETCH &&
        slide_shard_wait(pipe->shard, pipe->slot[stage->slot].ticket, err))
        return -1;
    if (slide_lane_sync(pipe->h2d, local, err) || slide_lane_sync(pipe->compute, local, err) ||
        (pipe->save && slide_lane_sync(pipe->save, local, err)))
        return -1;
    return stage->kind == SLIDE_STAGE_GRAD_OUT ? slide_reduce_drain(pipe->reduce, err) : 0;
}

static int finish_loss(struct slide_pipe *pipe, struct slide_pass *pass, struct slide_err *err)
{
    for (int m = 0; pass->kind != SLIDE_PASS_LOGITS && m < pass->count; m++) {
        struct slide_micro *micro = &pipe->memory.micro[m];
        if (slide_copy(pipe->compute, micro->host_loss, micro->loss, (size_t)micro->n * 4,
                       SLIDE_COPY_D2H, err))
            return -1;
    }
    if (slide_lane_sync(pipe->h2d, &pipe->o.host->local, err) ||
        slide_lane_sync(pipe->compute, &pipe->o.host->local, err) ||
        (pipe->save && slide_lane_sync(pipe->save, &pipe->o.host->local, err)))
        return -1;
    pass->loss = 0;
    for (int m = 0; pass->kind != SLIDE_PASS_LOGITS && m < pass->count; m++)
        for (int64_t i = 0; i < pipe->memory.micro[m].n; i++)
            pass->loss += (double)pipe->memory.micro[m].host_loss[i];
    return 0;
}

int slide_pipe_run(struct slide_pipe *pipe, struct slide_pass *pass, struct slide_err *err)
{
    const struct slide_schedule *schedule =
        pass->kind == SLIDE_PASS_TRAIN ? &pipe->train : &pipe->forward;
    if (start_inputs(pipe, pass, err))
        return -1;
    for (int i = 0; i < schedule->stages; i++) {
        const struct slide_stage *stage = &schedule->stage[i];
        if (run_stage(pipe, stage, pass, err) || (!pipe->o.overlap && wait_stage(pipe, stage, err)))
            return -1;
    }
    return finish_loss(pipe, pass, err);
}
