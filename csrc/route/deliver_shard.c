/* Sharded delivery: each rank copies its own slice of a unit to its device, over its own link, and
 * takes the others' slices from their devices.
 *
 * DESIGN. Units are numbered over the whole run, alike on all ranks. For number n
 *
 *   shipper (a thread): waits until the unit's updates are done and until nobody reads the slot's
 *     last contents any more (`pulled` of the others), then has the slice copied there.
 *   puller (a thread): waits for that copy, says so (`filled` = n + 1), has its device copy every
 *     other rank's slice once that rank has said the same, and records slot->ready. When those
 *     copies are done it says `pulled` = n + 1.
 *
 * The driver waits for the ticket before it lets the compute lane wait for slot->ready, for a wait
 * is for a record made before. Only training passes go this way: the others aren't collective.
 * No cycle of waits: filling n waits for pulling of numbers below n alone, and pulling n for
 * filling n. After an error both threads end; what waits for them sees the abort word. */
#include "base/fault.h"
#include "base/mem.h"
#include "base/thread.h"
#include "route/route.h"

#define DEPTH 8u /* slices copied, or on their way, and not yet pulled; a power of two */
#define QUEUE 64u

struct job {
    int unit;
    uint32_t updates, before; /* number of the slot's last unit, plus 1; 0: none */
    unsigned char *slot;
    struct slide_event *free, *ready;
};

struct slide_shard {
    struct slide_host *host;
    const struct slide_comm *comm;
    struct slide_lane *h2d, *peer;
    struct slide_event *arrived[DEPTH];
    struct job job[QUEUE];
    slide_word submitted, shipped, enqueued, stop; /* units; enqueued: their ready is recorded */
    _Atomic uint64_t waited;                       /* nanoseconds, for updates */
    struct slide_thread shipper, puller;
};

/* The rank's part of the unit in a slot, and its bytes. */
static size_t slice(const struct slide_shard *s, const struct job *job, int rank, size_t *at)
{
    const struct slide_layout *layout = s->host->layout;
    size_t size = slide_layout_plane_size(layout, SLIDE_PLANE_HI);
    uint64_t first, end;
    slide_layout_slice(layout, job->unit, rank, &first, &end);
    *at = first * size;
    return (end - first) * size;
}

static int ship(struct slide_shard *s, const struct job *job, uint32_t n, struct slide_err *err)
{
    struct slide_host *host = s->host;
    size_t at, bytes = slice(s, job, host->rank, &at);
    const unsigned char *plane =
        slide_host_at(host, host->layout->unit[job->unit].plane[SLIDE_PLANE_HI]);
    if (slide_wait_reach(&s->enqueued, n + 1 - DEPTH, &host->worker, "a slice", err) ||
        slide_comm_reach(s->comm, SLIDE_COMM_PULLED, job->before, &host->worker_peers,
                         "the copies out of a slot", err))
        return -1;
    double start = slide_time();
    if (slide_host_wait_updates(host, job->unit, job->updates, &host->worker_peers, err))
        return -1;
    atomic_fetch_add(&s->waited, (uint64_t)((slide_time() - start) * 1e9));
    if (slide_fault("fetch", host->rank, err) || slide_event_wait(job->free, s->h2d, err) ||
        (bytes && slide_copy(s->h2d, job->slot + at, plane + at, bytes, SLIDE_COPY_H2D, err)))
        return slide_err_note(err, "while fetching unit %d", job->unit);
    return slide_event_record(s->arrived[n % DEPTH], s->h2d, err);
}

static int pull(struct slide_shard *s, const struct job *job, uint32_t n, struct slide_err *err)
{
    struct slide_host *host = s->host;
    if (slide_wait_reach(&s->shipped, n + 1, &host->worker, "a slice", err) ||
        slide_event_host_wait(s->arrived[n % DEPTH], &host->worker, err) ||
        slide_fault("gather", host->rank, err))
        return -1;
    slide_word_set(slide_comm_word(s->comm, host->rank, SLIDE_COMM_FILLED), n + 1);
    for (int i = 1; i < host->world; i++) {
        /* Each rank begins with its neighbour, so that not all read from one. */
        int from = (host->rank + i) % host->world;
        size_t at, bytes = slice(s, job, from, &at);
        if (slide_wait_reach(slide_comm_word(s->comm, from, SLIDE_COMM_FILLED), n + 1,
                             &host->worker_peers, "a slice of the weights", err) ||
            (bytes &&
             slide_copy(s->peer, job->slot + at, slide_comm_at(s->comm, from, job->slot + at),
                        bytes, SLIDE_COPY_D2D, err)))
            return slide_err_note(err, "while taking unit %d from rank %d", job->unit, from);
    }
    if (slide_event_record(job->ready, s->peer, err))
        return -1;
    slide_word_set(&s->enqueued, n + 1);
    if (slide_event_host_wait(job->ready, &host->worker, err))
        return -1;
    slide_word_set(slide_comm_word(s->comm, host->rank, SLIDE_COMM_PULLED), n + 1);
    return 0;
}

/* Both threads: take jobs in order, until stopped or failed. */
static void serve(struct slide_shard *s,
                  int (*work)(struct slide_shard *, const struct job *, uint32_t,
                              struct slide_err *),
                  slide_word *done)
{
    struct slide_err err = SLIDE_ERR_INIT;
    for (uint32_t next = 0;; next++) {
        if (slide_wait_reach(&s->submitted, next + 1, &s->host->worker, "a fetch", &err) ||
            slide_word_get(&s->stop))
            return;
        if (work(s, &s->job[next % QUEUE], next, &err)) {
            slide_host_post(s->host, &err);
            return;
        }
        if (done)
            slide_word_set(done, next + 1);
    }
}

static void *shipper_main(void *arg)
{
    struct slide_shard *s = arg;
    serve(s, ship, &s->shipped);
    return NULL;
}

static void *puller_main(void *arg)
{
    serve(arg, pull, NULL);
    return NULL;
}

int slide_shard_open(struct slide_shard **shard, struct slide_device *device,
                     const struct slide_comm *comm, struct slide_err *err)
{
    struct slide_shard *s = slide_mem_new(sizeof *s, err);
    *shard = s;
    if (!s)
        return -1;
    s->host = comm->host;
    s->comm = comm;
    s->h2d = slide_lane_open(device, SLIDE_LANE_H2D, err);
    s->peer = s->h2d ? slide_lane_open(device, SLIDE_LANE_PEER, err) : NULL;
    if (!s->peer)
        goto fail;
    for (uint32_t i = 0; i < DEPTH; i++)
        if (!(s->arrived[i] = slide_event_new(device, err)))
            goto fail;
    if (!slide_thread_start(&s->shipper, shipper_main, s, "threads of the delivery", err) &&
        !slide_thread_start(&s->puller, puller_main, s, "threads of the delivery", err))
        return 0;
fail:
    slide_shard_close(s);
    *shard = NULL;
    return -1;
}

void slide_shard_close(struct slide_shard *s)
{
    if (!s)
        return;
    slide_word_set(&s->stop, 1);
    slide_word_add(&s->submitted, 1); /* wakes both threads */
    slide_thread_join(&s->shipper);
    slide_thread_join(&s->puller);
    slide_lane_close(s->peer);
    slide_lane_close(s->h2d);
    for (uint32_t i = 0; i < DEPTH; i++)
        slide_event_free(s->arrived[i]);
    slide_mem_free(s);
}

int slide_shard_fetch(struct slide_shard *s, int unit, uint32_t updates,
                      const struct slide_shard_slot *slot, uint32_t *ticket, struct slide_err *err)
{
    uint32_t n = slide_word_get(&s->submitted);
    if (slide_wait_reach(&s->enqueued, n + 1 - QUEUE, &s->host->peers, "room for a fetch", err))
        return -1;
    s->job[n % QUEUE] = (struct job){unit, updates, *ticket, slot->memory, slot->free, slot->ready};
    slide_word_set(&s->submitted, n + 1);
    *ticket = n + 1;
    return 0;
}

int slide_shard_wait(struct slide_shard *s, uint32_t ticket, struct slide_err *err)
{
    return slide_wait_reach(&s->enqueued, ticket, &s->host->peers, "the weights of a unit", err);
}

double slide_shard_waited(struct slide_shard *s)
{
    return (double)atomic_load(&s->waited) * 1e-9;
}
