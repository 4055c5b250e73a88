/* The CPU backend's queues and memory.
 *
 * DESIGN. A lane is a thread and a ring of commands. One thread feeds it (device.h), so the ring
 * needs two counters and no lock: `head` counts what was enqueued, `tail` what has run. An event
 * has two counters as well: `recorded`, the number of records enqueued, and `done`, of those that
 * the lanes have passed; a wait carries the number of records made before it was enqueued.
 * After an error on a lane, or when the device is abandoned, commands are dropped but for events'
 * records: whoever waits goes on, gets the error with the event, and its lane drops the rest too.
 * Kernels share the device's pool and scratch memory, so they run on one lane, the compute lane;
 * copies, zeroing and `accumulate`, which needs no scratch memory, run on any, with the pool on the
 * compute lane and without on the others. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/mem.h"
#include "base/thread.h"
#include "cpu/cpu_inside.h"

#define RING 1024u

struct slide_cpu_lane_inside {
    slide_word head, tail, stop;
    struct slide_pool *pool; /* the device's on the compute lane, else NULL */
    struct slide_thread thread;
    pthread_mutex_t lock; /* guards err */
    struct slide_err err;
    slide_word failed;
    struct slide_cpu_command ring[RING];
};

struct slide_event {
    struct slide_device *device;
    slide_word recorded, done;
    slide_word failed;    /* a lane had failed when it passed a record: err says how */
    struct slide_err err; /* written once, before `failed` */
};

static bool dropping(const struct slide_lane *lane)
{
    return slide_word_get(&lane->inside->failed) || atomic_load(&lane->device->head.abandoned);
}

static void *lane_main(void *arg)
{
    struct slide_lane *lane = arg;
    struct slide_cpu_lane_inside *in = lane->inside;
    int rank = lane->device->options.rank;
    for (uint32_t next = 0;; next++) {
        if (slide_wait_reach(&in->head, next + 1, &(struct slide_waiter){0}, "work", NULL) ||
            (slide_word_get(&in->stop) && slide_word_get(&in->head) == next + 1))
            break; /* the last entry is the one that stop added */
        struct slide_cpu_command *command = &in->ring[next % RING];
        struct slide_err err = SLIDE_ERR_INIT;
        if (command->always || !dropping(lane)) {
            int failed = slide_fault("lane", rank, &err);
            if (!failed || command->always)
                failed |= command->run(lane, command->args, &err);
            if (failed) {
                pthread_mutex_lock(&in->lock);
                if (!in->err.code)
                    in->err = err;
                pthread_mutex_unlock(&in->lock);
                slide_word_set(&in->failed, 1);
            }
        }
        slide_word_set(&in->tail, next + 1);
    }
    return NULL;
}

/* Waits of the feeding thread for its own lane: the lane never blocks for ever, so no deadline. */
static const struct slide_waiter forever;

int slide_cpu_enqueue(struct slide_lane *lane, bool always, slide_cpu_run_fn *run, const void *args,
                      size_t bytes, struct slide_err *err)
{
    struct slide_cpu_lane_inside *in = lane->inside;
    uint32_t head = atomic_load_explicit(&in->head, memory_order_relaxed);
    if (bytes > SLIDE_CPU_ARGS)
        return slide_err_set(err, SLIDE_ESTATE, "a command's arguments take %zu bytes", bytes);
    if (slide_wait_reach(&in->tail, head + 1 - RING, &forever, "room in a queue", err))
        return -1;
    struct slide_cpu_command *command = &in->ring[head % RING];
    command->run = run;
    command->always = always;
    if (bytes)
        memcpy(command->args, args, bytes);
    slide_word_set(&in->head, head + 1);
    return 0;
}

/* ---- lanes ---- */

static struct slide_lane *lane_open(struct slide_device *device, enum slide_lane_kind kind,
                                    struct slide_err *err)
{
    if (kind == SLIDE_LANE_COMPUTE && device->compute) {
        slide_err_set(err, SLIDE_ESTATE, "the CPU backend has one compute lane a device");
        return NULL;
    }
    struct slide_lane *lane = slide_mem_new(sizeof *lane, err);
    struct slide_cpu_lane_inside *in = lane ? slide_mem_new(sizeof *in, err) : NULL;
    if (!in)
        goto fail;
    lane->device = device;
    lane->inside = in;
    in->pool = kind == SLIDE_LANE_COMPUTE ? device->pool : NULL;
    in->err = SLIDE_ERR_INIT;
    pthread_mutex_init(&in->lock, NULL);
    if (!slide_thread_start(&in->thread, lane_main, lane, "a queue's thread", err)) {
        if (kind == SLIDE_LANE_COMPUTE)
            device->compute = lane;
        return lane;
    }
    pthread_mutex_destroy(&in->lock);
fail:
    slide_mem_free(in);
    slide_mem_free(lane);
    return NULL;
}

static void lane_close(struct slide_lane *lane)
{
    struct slide_cpu_lane_inside *in = lane->inside;
    uint32_t head = atomic_load_explicit(&in->head, memory_order_relaxed);
    slide_wait_reach(&in->tail, head, &forever, "a queue", NULL);
    slide_word_set(&in->stop, 1);
    slide_word_set(&in->head, head + 1);
    slide_thread_join(&in->thread);
    if (lane->device->compute == lane)
        lane->device->compute = NULL;
    pthread_mutex_destroy(&in->lock);
    slide_mem_free(in);
    slide_mem_free(lane);
}

static int lane_error(struct slide_lane *lane, struct slide_err *err)
{
    struct slide_cpu_lane_inside *in = lane->inside;
    if (!slide_word_get(&in->failed))
        return 0;
    pthread_mutex_lock(&in->lock);
    if (err && !err->code)
        *err = in->err;
    pthread_mutex_unlock(&in->lock);
    return -1;
}

static int lane_sync(struct slide_lane *lane, const struct slide_waiter *waiter,
                     struct slide_err *err)
{
    uint32_t head = atomic_load_explicit(&lane->inside->head, memory_order_relaxed);
    if (slide_wait_reach(&lane->inside->tail, head, waiter, "the device", err))
        return -1;
    return lane_error(lane, err);
}

/* ---- events ---- */

struct event_args {
    struct slide_event *event;
    uint32_t number;
};

static struct slide_event *event_new(struct slide_device *device, struct slide_err *err)
{
    struct slide_event *event = slide_mem_new(sizeof *event, err);
    if (!event)
        return NULL;
    event->device = device;
    event->err = SLIDE_ERR_INIT;
    return event;
}

static void event_free(struct slide_event *event)
{
    slide_mem_free(event);
}

static int run_record(struct slide_lane *lane, const void *args, struct slide_err *err)
{
    (void)err;
    const struct event_args *a = args;
    struct slide_event *event = a->event;
    /* The record before may be on another lane. */
    slide_wait_reach(&event->done, a->number - 1, &forever, "an event", NULL);
    if (!slide_word_get(&event->failed) && lane_error(lane, &event->err))
        slide_word_set(&event->failed, 1);
    slide_word_set(&event->done, a->number);
    return 0;
}

static int event_record(struct slide_event *event, struct slide_lane *lane, struct slide_err *err)
{
    struct event_args args = {event, slide_word_get(&event->recorded) + 1};
    if (slide_cpu_enqueue(lane, true, run_record, &args, sizeof args, err))
        return -1;
    slide_word_set(&event->recorded, args.number);
    return 0;
}

static int event_error(struct slide_event *event, struct slide_err *err)
{
    if (!slide_word_get(&event->failed))
        return 0;
    if (err && !err->code)
        *err = event->err;
    return -1;
}

static int run_wait(struct slide_lane *lane, const void *args, struct slide_err *err)
{
    (void)lane;
    const struct event_args *a = args;
    /* Bounded by the other lane's work; an abandoned device empties all lanes quickly. */
    if (slide_wait_reach(&a->event->done, a->number, &forever, "an event", err))
        return -1;
    return event_error(a->event, err);
}

static int event_wait(struct slide_event *event, struct slide_lane *lane, struct slide_err *err)
{
    struct event_args args = {event, slide_word_get(&event->recorded)};
    return slide_cpu_enqueue(lane, false, run_wait, &args, sizeof args, err);
}

static int event_host_wait(struct slide_event *event, const struct slide_waiter *waiter,
                           struct slide_err *err)
{
    if (slide_wait_reach(&event->done, slide_word_get(&event->recorded), waiter, "the device", err))
        return -1;
    return event_error(event, err);
}

/* ---- memory ---- */

struct copy_args {
    void *to;
    const void *from;
    size_t bytes;
};

#define PIECE (1u << 20)

/* A piece of a copy, or of zeroing when there is no `from`. */
static void fill(void *ctx, int64_t i, int worker)
{
    (void)worker;
    const struct copy_args *a = ctx;
    size_t at = (size_t)i * PIECE, bytes = a->bytes - at < PIECE ? a->bytes - at : PIECE;
    if (a->from)
        memcpy((char *)a->to + at, (const char *)a->from + at, bytes);
    else
        memset((char *)a->to + at, 0, bytes);
}

static int run_fill(struct slide_lane *lane, const void *args, struct slide_err *err)
{
    (void)err;
    struct copy_args a = *(const struct copy_args *)args;
    int64_t pieces = (int64_t)((a.bytes + PIECE - 1) / PIECE);
    if (lane->inside->pool)
        slide_pool_for(lane->inside->pool, pieces, fill, &a);
    else
        for (int64_t i = 0; i < pieces; i++)
            fill(&a, i, 0);
    return 0;
}

static int copy(struct slide_lane *lane, void *to, const void *from, size_t bytes,
                enum slide_copy_kind kind, struct slide_err *err)
{
    (void)kind;
    struct copy_args args = {to, from, bytes};
    return slide_cpu_enqueue(lane, false, run_fill, &args, sizeof args, err);
}

static int zero(struct slide_lane *lane, void *memory, size_t bytes, struct slide_err *err)
{
    struct copy_args args = {memory, NULL, bytes};
    return slide_cpu_enqueue(lane, false, run_fill, &args, sizeof args, err);
}

/* Device memory is mapped, not from the heap: pages that a plan takes and a run never touches cost
 * nothing, and the size is kept in front for free. */
#define FRONT 4096u

static void *device_alloc(struct slide_device *device, size_t bytes, struct slide_err *err)
{
    (void)device;
    size_t all = bytes + FRONT;
    unsigned char *base = MAP_FAILED;
    if (all > bytes)
        base = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) {
        slide_err_set(err, SLIDE_EMEM, "host: no %zu bytes for the CPU backend's workspace", bytes);
        return NULL;
    }
    madvise(base, all, MADV_HUGEPAGE);
    memcpy(base, &all, sizeof all);
    return base + FRONT;
}

static void device_free(struct slide_device *device, void *memory)
{
    (void)device;
    unsigned char *base = (unsigned char *)memory - FRONT;
    size_t all;
    memcpy(&all, base, sizeof all);
    munmap(base, all);
}

static int pin(struct slide_device *device, void *host, size_t bytes, struct slide_err *err)
{
    (void)device;
    (void)host;
    (void)bytes;
    (void)err;
    return 0; /* host memory is device memory */
}

static void unpin(struct slide_device *device, void *host, size_t bytes)
{
    (void)device;
    (void)host;
    (void)bytes;
}

float *slide_cpu_scratch(struct slide_device *device, int worker, size_t floats)
{
    struct slide_cpu_scratch *s = &device->scratch[worker];
    if (s->floats < floats) {
        slide_mem_free(s->memory);
        s->memory = slide_mem_array(floats, sizeof(float), NULL);
        s->floats = s->memory ? floats : 0;
    }
    return s->memory;
}

/* ---- compute ---- */

static int compute(struct slide_lane *lane, slide_cpu_run_fn *run, const void *args, size_t bytes,
                   struct slide_err *err)
{
    if (lane != lane->device->compute)
        return slide_err_set(err, SLIDE_ESTATE,
                             "the CPU backend computes on its compute lane only");
    return slide_cpu_enqueue(lane, false, run, args, bytes, err);
}

static int gemm(struct slide_lane *lane, const struct slide_gemm *g, struct slide_err *err)
{
    return compute(lane, slide_cpu_gemm_run, g, sizeof *g, err);
}

static size_t gemm_workspace(struct slide_device *device)
{
    (void)device;
    return 0; /* the workers have scratch memory of their own */
}

static int attn_fwd(struct slide_lane *lane, const struct slide_attn *a, struct slide_err *err)
{
    return compute(lane, slide_cpu_attn_fwd_run, a, sizeof *a, err);
}

static int attn_bwd(struct slide_lane *lane, const struct slide_attn *a, struct slide_err *err)
{
    return compute(lane, slide_cpu_attn_bwd_run, a, sizeof *a, err);
}

static int launch(struct slide_lane *lane, enum slide_kernel kernel, enum slide_dtype act,
                  const void *args, size_t bytes, struct slide_err *err)
{
    struct slide_cpu_launch l = {.act = act};
    slide_cpu_run_fn *run = slide_cpu_kernel_run(kernel);
    if (!run || bytes > sizeof l.args)
        return slide_err_set(err, SLIDE_ESTATE, "kernel %d on the CPU", (int)kernel);
    memcpy(l.args, args, bytes);
    if (kernel == SLIDE_KERNEL_accumulate)
        return slide_cpu_enqueue(lane, false, run, &l, sizeof l, err);
    return compute(lane, run, &l, sizeof l, err);
}

/* ---- device ---- */

static int available(struct slide_err *err)
{
    return slide_cpu_sgemm_get(NULL, err) ? 0 : -1;
}

static int count(void)
{
    return 1;
}

static void device_close(struct slide_device *device)
{
    for (int i = 0; device->scratch && i <= device->options.threads; i++)
        slide_mem_free(device->scratch[i].memory);
    slide_mem_free(device->scratch);
    slide_pool_free(device->pool);
    slide_mem_free(device);
}

static int device_open(struct slide_device **out, const struct slide_device_options *options,
                       struct slide_err *err)
{
    struct slide_device *device = slide_mem_new(sizeof *device, err);
    if (!device)
        return -1;
    device->options = *options;
    device->options.threads = options->threads > 0 ? options->threads : 1;
    device->options.blas = NULL; /* the caller's text */
    device->isa = slide_isa_get();
    device->sgemm = slide_cpu_sgemm_get(options->blas, err);
    if (!device->sgemm)
        goto fail;
    device->scratch =
        slide_mem_array((uint64_t)device->options.threads + 1, sizeof *device->scratch, err);
    device->pool = slide_pool_new(device->options.threads, NULL, 0, err);
    if (!device->scratch || !device->pool)
        goto fail;
    *out = device;
    return 0;
fail:
    device_close(device);
    return -1;
}

static int info(struct slide_device *device, struct slide_device_info *out, struct slide_err *err)
{
    (void)err;
    *out = (struct slide_device_info){.numa_node = -1};
    snprintf(out->name, sizeof out->name, "CPU, %s, %d thread%s", slide_isa_name(device->isa),
             device->options.threads, device->options.threads > 1 ? "s" : "");
    long page = sysconf(_SC_PAGESIZE);
    out->memory_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)page;
    out->free_bytes = UINT64_MAX; /* pages of a plan are taken when they are touched, if ever */
    return 0;
}

const struct slide_backend slide_cpu_backend = {
    .name = "cpu",
    .host_memory = true,
    .available = available,
    .count = count,
    .open = device_open,
    .close = device_close,
    .info = info,
    .alloc = device_alloc,
    .free = device_free,
    .pin = pin,
    .unpin = unpin,
    .lane_open = lane_open,
    .lane_close = lane_close,
    .lane_sync = lane_sync,
    .event_new = event_new,
    .event_free = event_free,
    .event_record = event_record,
    .event_wait = event_wait,
    .event_host_wait = event_host_wait,
    .copy = copy,
    .zero = zero,
    .gemm = gemm,
    .gemm_workspace = gemm_workspace,
    .attn_workspace = slide_cpu_attn_workspace,
    .attn_fwd = attn_fwd,
    .attn_bwd = attn_bwd,
    .launch = launch,
};
