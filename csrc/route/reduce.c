/* Reduction, on the CPU or on the devices.
 *
 * DESIGN. A unit's gradient is cut into chunks that never cross an owner's border. All ranks walk
 * the chunks in one order: round robin over the owners, so that all of them work at once. Chunk
 * number s (counted over the whole run) uses place s mod PLACES of every rank's staging ring.
 *
 *   reaper (a thread a rank): waits until place k is free (consumed[k] says how many uses of it are
 *     over), has the device copy the chunk there, and counts `published` up when it arrived. A few
 *     copies are under way at a time.
 *   collector (a thread a rank): for each chunk that this rank owns waits until every rank has
 *     published it, sums in rank order block by block, on a pool, and hands each block to apply()
 *     or leaves it in the gradient plane; then consumed[k] goes up. After the last chunk of a unit
 *     it says done().
 *
 * On the devices (comm): the reaper of a rank has its device sum the rank's own chunks over all
 * ranks' gradient slots, in rank order in FP32, and copy the sums out; places and chunk numbers are
 * the rank's own then. It says `offered` when its gradient lies in its slot, begins when all have,
 * and says `taken` when it has read all; a slot is free again when all ranks have taken from it.
 * The sums are the CPU's to the bit.
 *
 * With a gradient plane, and one rank or sums from the devices (direct), the plane is where chunks
 * are copied to: no places, no sum; the collector only looks at what came (norm, Inf, NaN). The
 * plane is free by then: this step's forward waited for the unit's last update.
 *
 * No cycle of waits: publishing s needs consuming s - PLACES, consuming s needs publishing s.
 * Sums run in rank order over fixed blocks, so nothing but the wire type shows in the result, and
 * squares are summed by NORM elements counted from the slice's start, whatever the chunks.
 * After an error both threads end; what waits for them sees the abort word. */
#include <float.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/fault.h"
#include "base/mem.h"
#include "base/thread.h"
#include "optim/vec.h"
#include "route/route.h"

#define PLACES 8u    /* a power of two, <= SLIDE_RING_MAX */
#define IN_FLIGHT 3u /* copies under way */
#define QUEUE 64u    /* submissions not yet copied and reduced; a step has fewer in practice */
#define BLOCK 8192u  /* elements that are summed and applied at a time: fits the caches */
#define NORM 1024u   /* elements whose squares make one term of the norm; divides BLOCK */

struct job {
    int unit;
    const void *grad;
    struct slide_event *ready;
};

struct slide_reduce {
    struct slide_reduce_options o;
    enum slide_isa isa;
    uint64_t chunk; /* elements */
    size_t place_bytes;
    struct slide_lane *lane; /* d2h */
    struct slide_lane *peer; /* on the devices: sums */
    struct slide_event *summed[IN_FLIGHT];
    slide_word own[PLACES]; /* on the devices: in place of header->consumed */
    slide_word *consumed;
    enum slide_dtype from;  /* of what is copied out */
    int first_in, ranks_in; /* ranks whose copies are summed here */
    struct slide_event *arrived[PLACES];
    void *at[PLACES]; /* where the chunk in each place was copied to */
    bool direct;
    float *scratch;  /* [threads, BLOCK] */
    double *squares; /* [NORM elements of a chunk] */
    uint64_t *bad;   /* likewise: Inf or NaN */
    struct job job[QUEUE];
    slide_word submitted, copied, reduced, stop; /* jobs */
    struct slide_thread reaper, collector;
    uint64_t reap_seq, collect_seq; /* chunks */
    uint32_t offered;               /* jobs */
    pthread_mutex_t lock;           /* guards totals */
    struct slide_reduce_totals totals;
};

size_t slide_reduce_staging(uint64_t chunk_bytes)
{
    /* Whole terms of the norm, so that the cut into chunks doesn't show in it. */
    uint64_t term = NORM * sizeof(float);
    uint64_t place = chunk_bytes < term ? term : chunk_bytes / term * term;
    return (size_t)place * PLACES;
}

static size_t place_bytes(uint64_t chunk_bytes)
{
    return slide_reduce_staging(chunk_bytes) / PLACES;
}

size_t slide_reduce_sums(uint64_t chunk_bytes)
{
    return place_bytes(chunk_bytes) * IN_FLIGHT;
}

bool slide_reduce_direct(const struct slide_layout *layout, bool on_device)
{
    return (layout->world == 1 || on_device) && layout->grad_bytes;
}

static unsigned char *plane_at(const struct slide_reduce *r, int unit, uint64_t element)
{
    const struct slide_layout *layout = r->o.host->layout;
    return (unsigned char *)slide_host_at(r->o.host, layout->unit[unit].plane[SLIDE_PLANE_GRAD]) +
           element * (size_t)layout->grad_bytes;
}

/* Walks a unit's chunks in the order that all ranks share. */
struct walk {
    const struct slide_layout *layout;
    int unit, owner, only;        /* only: of this owner; -1: of all */
    uint64_t chunk, first, count; /* of the chunk it stands on */
    uint64_t round;
};

static void walk_start(struct walk *w, const struct slide_reduce *r, int unit)
{
    *w = (struct walk){.layout = r->o.host->layout,
                       .unit = unit,
                       .owner = -1,
                       .only = r->o.comm ? r->o.host->rank : -1,
                       .chunk = r->chunk};
}

static bool walk_next(struct walk *w)
{
    int idle = 0; /* owners in a row without a chunk in this round */
    while (idle < w->layout->world) {
        if (++w->owner == w->layout->world) {
            w->owner = 0;
            w->round++;
        }
        uint64_t first, end;
        slide_layout_slice(w->layout, w->unit, w->owner, &first, &end);
        uint64_t at = first + w->round * w->chunk;
        if (at < end && (w->only < 0 || w->only == w->owner)) {
            w->first = at;
            w->count = end - at < w->chunk ? end - at : w->chunk;
            return true;
        }
        idle++;
    }
    return false;
}

/* ---- reaper ---- */

static int publish(struct slide_reduce *r, uint64_t seq, struct slide_err *err)
{
    struct slide_host *host = r->o.host;
    bool spoil;
    float value;
    if (slide_event_host_wait(r->arrived[seq % PLACES], &host->worker, err) ||
        slide_fault_value("chunk", host->rank, &spoil, &value, err))
        return -1;
    if (spoil) {
        uint32_t bits = slide_f32_bits(value);
        uint16_t high = (uint16_t)(bits >> 16);
        memcpy(r->at[seq % PLACES], r->from == SLIDE_F32 ? (void *)&bits : (void *)&high,
               slide_dtype_size(r->from));
    }
    slide_word_set(&host->header->rank[host->rank].published, (uint32_t)(seq + 1));
    return 0;
}

/* On the devices: until the gradients of all ranks lie in their slots. */
static int offer(struct slide_reduce *r, const struct job *job, struct slide_err *err)
{
    const struct slide_host *host = r->o.host;
    if (slide_event_host_wait(job->ready, &host->worker, err) ||
        slide_fault("offer", host->rank, err))
        return -1;
    slide_word_set(slide_comm_word(r->o.comm, host->rank, SLIDE_COMM_OFFERED), ++r->offered);
    return slide_comm_reach(r->o.comm, SLIDE_COMM_OFFERED, r->offered, &host->worker_peers,
                            "the gradient", err);
}

/* The sum of a chunk over the ranks, on the device; *from is where it will lie. */
static int sum_chunk(struct slide_reduce *r, const struct job *job, const struct walk *w,
                     const void **from, struct slide_err *err)
{
    uint64_t turn = r->reap_seq % IN_FLIGHT; /* its last copy out is over: publish() saw to it */
    struct slide_accumulate_args a = {.out = r->o.sums + turn * r->chunk, .n = (int64_t)w->count};
    size_t at = w->first * slide_dtype_size(r->o.wire);
    for (int k = 0; k < r->o.host->world; k++) {
        a.in = slide_comm_at(r->o.comm, k, (const unsigned char *)job->grad + at);
        a.add = k > 0;
        if (slide_launch_accumulate(r->peer, r->o.wire, &a, err))
            return -1;
    }
    *from = a.out;
    return slide_event_record(r->summed[turn], r->peer, err) ||
                   slide_event_wait(r->summed[turn], r->lane, err)
               ? -1
               : 0;
}

/* All sums of a job have been formed: the others may use their gradients' memory again. */
static int take(struct slide_reduce *r, struct slide_err *err)
{
    const struct slide_host *host = r->o.host;
    for (uint32_t i = 0; i < IN_FLIGHT; i++)
        if (slide_event_host_wait(r->summed[i], &host->worker, err))
            return -1;
    slide_word_set(slide_comm_word(r->o.comm, host->rank, SLIDE_COMM_TAKEN), r->offered);
    return 0;
}

static int reap_job(struct slide_reduce *r, const struct job *job, struct slide_err *err)
{
    struct slide_host *host = r->o.host;
    size_t size = slide_dtype_size(r->from);
    struct walk w;
    uint64_t waiting = r->reap_seq; /* oldest copy that is not yet published */
    if (r->o.comm ? offer(r, job, err) : slide_event_wait(job->ready, r->lane, err))
        return -1;
    for (walk_start(&w, r, job->unit); walk_next(&w); r->reap_seq++) {
        uint64_t seq = r->reap_seq, place = seq % PLACES;
        while (seq - waiting >= IN_FLIGHT)
            if (publish(r, waiting++, err))
                return -1;
        if (slide_fault("copyout", host->rank, err) ||
            (!r->direct &&
             slide_wait_reach(&r->consumed[place], (uint32_t)(seq / PLACES), &host->worker_peers,
                              "a place in the gradient staging", err)))
            return -1;
        unsigned char *to = r->direct
                                ? plane_at(r, job->unit, w.first)
                                : slide_host_staging(host, host->rank) + place * r->place_bytes;
        r->at[place] = to;
        const void *from = (const unsigned char *)job->grad + w.first * size;
        if ((r->o.comm && sum_chunk(r, job, &w, &from, err)) ||
            slide_copy(r->lane, to, from, w.count * size, SLIDE_COPY_D2H, err) ||
            slide_event_record(r->arrived[place], r->lane, err))
            return -1;
    }
    while (waiting < r->reap_seq)
        if (publish(r, waiting++, err))
            return -1;
    return r->o.comm ? take(r, err) : 0;
}

/* ---- collector ---- */

struct block_work {
    struct slide_reduce *r;
    int unit;
    uint64_t first, count, place;
};

/* The terms of the norm, and how many elements are Inf or NaN. */
static void look(struct slide_reduce *r, const float *sum, uint64_t n, double *squares,
                 uint64_t *bad)
{
    for (uint64_t at = 0, i = 0; at < n; at += NORM, i++) {
        uint64_t count = n - at < NORM ? n - at : NORM;
        squares[i] = slide_vec_squares(r->isa, sum + at, count);
        bad[i] = 0;
        /* Squares of finite FP32 numbers can't overflow a double: this finds every Inf and NaN. */
        if (!(squares[i] <= DBL_MAX))
            for (uint64_t k = 0; k < count; k++)
                bad[i] += (slide_f32_bits(sum[at + k]) & 0x7f800000u) == 0x7f800000u;
    }
}

static void sum_block(void *ctx, int64_t i, int worker)
{
    struct block_work *work = ctx;
    struct slide_reduce *r = work->r;
    struct slide_host *host = r->o.host;
    uint64_t at = (uint64_t)i * BLOCK;
    uint64_t n = work->count - at < BLOCK ? work->count - at : BLOCK;
    size_t size = slide_dtype_size(r->from), place = work->place * r->place_bytes + at * size;
    const void *in[SLIDE_RANKS_MAX] = {0};
    bool plane = host->layout->grad_bytes;
    for (int k = 0; k < r->ranks_in; k++)
        in[k] = r->direct ? plane_at(r, work->unit, work->first + at)
                          : slide_host_staging(host, r->first_in + k) + place;
    const float *sum = in[0];
    if (r->ranks_in > 1 || r->from != SLIDE_F32) {
        float *out = plane && !r->direct ? (float *)plane_at(r, work->unit, work->first + at)
                                         : r->scratch + (size_t)worker * BLOCK;
        slide_vec_sum(r->isa, out, in, r->ranks_in, r->from, n);
        sum = out;
    }
    look(r, sum, n, r->squares + at / NORM, r->bad + at / NORM);
    if (!plane)
        r->o.apply(r->o.ctx, work->unit, work->first + at, sum, n);
}

static int collect_job(struct slide_reduce *r, const struct job *job, struct slide_err *err)
{
    struct slide_host *host = r->o.host;
    struct walk w;
    double squares = 0;
    uint64_t bad = 0;
    for (walk_start(&w, r, job->unit); walk_next(&w); r->collect_seq++) {
        if (w.owner != host->rank)
            continue;
        uint64_t seq = r->collect_seq;
        for (int k = r->first_in; k < r->first_in + r->ranks_in; k++) {
            char what[64];
            snprintf(what, sizeof what, "the gradient of unit %d from rank %d", job->unit, k);
            if (slide_wait_reach(&host->header->rank[k].published, (uint32_t)(seq + 1),
                                 &host->worker_peers, what, err))
                return -1;
        }
        if (slide_fault("reduce", host->rank, err))
            return -1;
        struct block_work work = {r, job->unit, w.first, w.count, seq % PLACES};
        int64_t blocks = (int64_t)((w.count + BLOCK - 1) / BLOCK);
        slide_pool_take(r->o.pool);
        slide_pool_for(r->o.pool, blocks, sum_block, &work);
        slide_pool_give(r->o.pool);
        for (uint64_t i = 0; i < (w.count + NORM - 1) / NORM; i++) {
            squares += r->squares[i];
            bad += r->bad[i];
        }
        slide_word_set(&r->consumed[seq % PLACES], (uint32_t)(seq / PLACES + 1));
    }
    pthread_mutex_lock(&r->lock);
    r->totals.squares += squares;
    r->totals.nonfinite += bad;
    if (bad && r->totals.nonfinite_unit < job->unit)
        r->totals.nonfinite_unit = job->unit;
    pthread_mutex_unlock(&r->lock);
    return r->o.done(r->o.ctx, job->unit, err);
}

/* ---- threads ---- */

/* Both threads: take jobs in order, until stopped or failed. */
static void serve(struct slide_reduce *r, slide_word *done,
                  int (*work)(struct slide_reduce *, const struct job *, struct slide_err *))
{
    struct slide_err err = SLIDE_ERR_INIT;
    for (uint32_t next = 0;; next++) {
        if (slide_wait_reach(&r->submitted, next + 1, &r->o.host->worker, "a gradient", &err))
            return;
        if (slide_word_get(&r->stop))
            return;
        if (work(r, &r->job[next % QUEUE], &err)) {
            slide_host_post(r->o.host, &err);
            return;
        }
        slide_word_set(done, next + 1);
    }
}

static void *reaper_main(void *arg)
{
    struct slide_reduce *r = arg;
    serve(r, &r->copied, reap_job);
    return NULL;
}

static void *collector_main(void *arg)
{
    struct slide_reduce *r = arg;
    serve(r, &r->reduced, collect_job);
    return NULL;
}

static int open_sums(struct slide_reduce *r, struct slide_err *err)
{
    r->peer = slide_lane_open(r->o.device, SLIDE_LANE_PEER, err);
    for (uint32_t i = 0; r->peer && i < IN_FLIGHT; i++)
        if (!(r->summed[i] = slide_event_new(r->o.device, err)))
            return -1;
    return r->peer ? 0 : -1;
}

int slide_reduce_open(struct slide_reduce **reduce, const struct slide_reduce_options *options,
                      struct slide_err *err)
{
    struct slide_reduce *r = slide_mem_new(sizeof *r, err);
    *reduce = r;
    if (!r)
        return -1;
    r->o = *options;
    r->isa = slide_isa_get();
    r->totals.nonfinite_unit = -1;
    pthread_mutex_init(&r->lock, NULL);
    r->from = options->comm ? SLIDE_F32 : options->wire;
    r->first_in = options->comm ? options->host->rank : 0;
    r->ranks_in = options->comm ? 1 : options->host->world;
    r->place_bytes = place_bytes(options->chunk_bytes);
    r->chunk = r->place_bytes / slide_dtype_size(r->from);
    r->direct = slide_reduce_direct(options->host->layout, options->comm);
    r->consumed = options->comm ? r->own : options->host->header->consumed;
    uint64_t threads = (uint64_t)slide_pool_threads(options->pool), terms = r->chunk / NORM;
    r->scratch = slide_mem_array(threads * BLOCK, sizeof *r->scratch, err);
    r->squares = slide_mem_array(terms, sizeof *r->squares, err);
    r->bad = slide_mem_array(terms, sizeof *r->bad, err);
    if (!r->scratch || !r->squares || !r->bad)
        goto fail;
    r->lane = slide_lane_open(options->device, SLIDE_LANE_D2H, err);
    if (!r->lane)
        goto fail;
    for (uint32_t i = 0; i < PLACES; i++)
        if (!(r->arrived[i] = slide_event_new(options->device, err)))
            goto fail;
    if (options->comm && open_sums(r, err))
        goto fail;
    if (!slide_thread_start(&r->reaper, reaper_main, r, "threads of the reduction", err) &&
        !slide_thread_start(&r->collector, collector_main, r, "threads of the reduction", err))
        return 0;
fail:
    slide_reduce_close(r);
    *reduce = NULL;
    return -1;
}

void slide_reduce_close(struct slide_reduce *r)
{
    if (!r)
        return;
    slide_word_set(&r->stop, 1);
    slide_word_add(&r->submitted, 1); /* wakes both threads */
    slide_thread_join(&r->reaper);
    slide_thread_join(&r->collector);
    slide_lane_close(r->peer);
    slide_lane_close(r->lane);
    for (uint32_t i = 0; i < IN_FLIGHT; i++)
        slide_event_free(r->summed[i]);
    for (uint32_t i = 0; i < PLACES; i++)
        slide_event_free(r->arrived[i]);
    slide_mem_free(r->bad);
    slide_mem_free(r->squares);
    slide_mem_free(r->scratch);
    pthread_mutex_destroy(&r->lock);
    slide_mem_free(r);
}

/* Jobs up to `n` are copied out and reduced. Neither follows from the other: a rank that owns
 * nothing of a unit has reduced its part before its own copy began. */
static int reach_both(struct slide_reduce *r, uint32_t n, const char *what, struct slide_err *err)
{
    const struct slide_waiter *peers = &r->o.host->peers;
    return slide_wait_reach(&r->copied, n, peers, what, err) ||
                   slide_wait_reach(&r->reduced, n, peers, what, err)
               ? -1
               : 0;
}

int slide_reduce_submit(struct slide_reduce *r, int unit, const void *grad,
                        struct slide_event *ready, uint32_t *ticket, struct slide_err *err)
{
    uint32_t n = slide_word_get(&r->submitted);
    /* Room for one more: both threads are past the job QUEUE back. */
    if (reach_both(r, n + 1 - QUEUE, "room for a gradient", err))
        return -1;
    r->job[n % QUEUE] = (struct job){unit, grad, ready};
    slide_word_set(&r->submitted, n + 1);
    *ticket = n + 1;
    return 0;
}

int slide_reduce_wait(struct slide_reduce *r, uint32_t ticket, struct slide_err *err)
{
    const struct slide_waiter *peers = &r->o.host->peers;
    if (slide_wait_reach(&r->copied, ticket, peers, "a gradient's copy", err))
        return -1;
    return r->o.comm ? slide_comm_reach(r->o.comm, SLIDE_COMM_TAKEN, ticket, peers,
                                        "the reading of a gradient", err)
                     : 0;
}

int slide_reduce_drain(struct slide_reduce *r, struct slide_err *err)
{
    return reach_both(r, slide_word_get(&r->submitted), "the gradients of this step", err);
}

int slide_reduce_flush(struct slide_reduce *r, struct slide_reduce_totals *totals,
                       struct slide_err *err)
{
    if (slide_reduce_drain(r, err))
        return -1;
    pthread_mutex_lock(&r->lock);
    *totals = r->totals;
    r->totals = (struct slide_reduce_totals){.nonfinite_unit = -1};
    pthread_mutex_unlock(&r->lock);
    return 0;
}
