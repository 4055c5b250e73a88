/* Routes: how a unit's weights reach the device, and how its gradient leaves it and ends, reduced,
 * at the owners. Routes know nothing of the optimizer: they end in apply() or the gradient plane.
 * Threads: the driver calls everything here; apply() and done() are called from the route's own
 * threads. Blocks: fetch (until all owners have updated the unit), wait, flush. */
#ifndef SLIDE_ROUTE_ROUTE_H
#define SLIDE_ROUTE_ROUTE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/pool.h"
#include "device/device.h"
#include "route/comm.h"
#include "state/host.h"

enum slide_delivery { SLIDE_DELIVER_AUTO, SLIDE_DELIVER_FULL, SLIDE_DELIVER_SHARD };
enum slide_reduction { SLIDE_REDUCE_AUTO, SLIDE_REDUCE_CPU, SLIDE_REDUCE_GPU };

/* Full delivery: the unit's whole `hi` plane is copied to `slot` on the lane, once every owner has
 * finished `updates` updates of it; the seconds that this took are added to *waited. */
int slide_deliver_full(struct slide_host *host, int unit, uint32_t updates, void *slot,
                       struct slide_lane *lane, double *waited, struct slide_err *err);

/* Sharded delivery. */
struct slide_shard;
struct slide_shard_slot {
    void *memory;                     /* in the slots that the ranks read of each other */
    struct slide_event *free, *ready; /* free: recorded by the caller after the last use */
};
int slide_shard_open(struct slide_shard **shard, struct slide_device *device,
                     const struct slide_comm *comm, struct slide_err *err);
void slide_shard_close(struct slide_shard *shard);
/* Collective, in the same order on all ranks. *ticket: that of the slot's last fetch, 0 before the
 * first; set to this one's. */
int slide_shard_fetch(struct slide_shard *shard, int unit, uint32_t updates,
                      const struct slide_shard_slot *slot, uint32_t *ticket, struct slide_err *err);
/* Until slot->ready stands for the fetch of `ticket`: a lane may be made to wait for it. */
int slide_shard_wait(struct slide_shard *shard, uint32_t ticket, struct slide_err *err);
/* Seconds that updates have been waited for so far. */
double slide_shard_waited(struct slide_shard *shard);

/* The mean gradient of elements [first, first + n) of `unit`, all owned by this rank, FP32. Called
 * from pool threads on disjoint ranges, in any order. */
typedef void slide_apply_fn(void *ctx, int unit, uint64_t first, const float *sum, uint64_t n);
/* All of this rank's slice of `unit` has been reduced: applied, or it stands in the plane. */
typedef int slide_reduced_fn(void *ctx, int unit, struct slide_err *err);

struct slide_reduce_totals { /* of this rank's slices, one step */
    double squares;
    uint64_t nonfinite;
    int nonfinite_unit; /* highest unit with one, -1: none */
};

struct slide_reduce_options {
    struct slide_host *host;
    struct slide_device *device;
    enum slide_dtype wire; /* F32 or BF16 */
    uint64_t chunk_bytes;
    const struct slide_comm *comm; /* reduction on the devices; NULL: on the CPU */
    float *sums;                   /* then: device memory, slide_reduce_sums() bytes */
    struct slide_pool *pool;       /* used in turns */
    slide_apply_fn *apply;         /* where the layout has no gradient plane */
    slide_reduced_fn *done;
    void *ctx; /* of apply and done */
};

struct slide_reduce;

/* Bytes of staging that a rank needs in the segment: ask before the layout is made. */
size_t slide_reduce_staging(uint64_t chunk_bytes);

/* Bytes of device memory that a reduction on the devices needs. */
size_t slide_reduce_sums(uint64_t chunk_bytes);

/* With a gradient plane, and one rank or sums that come from the devices: the device copies
 * straight into the plane, which has the type of what comes, and there is nothing to sum. */
bool slide_reduce_direct(const struct slide_layout *layout, bool on_device);

/* On the CPU: every rank copies its gradient out chunk by chunk into its staging ring; the owner of
 * a chunk sums the ranks' copies in rank order in FP32, into the gradient plane where there is one,
 * else straight into apply(). On the devices: each rank's device sums its own slice over the ranks'
 * gradient slots, in the same order, and FP32 sums leave. */
int slide_reduce_open(struct slide_reduce **reduce, const struct slide_reduce_options *options,
                      struct slide_err *err);
void slide_reduce_close(struct slide_reduce *reduce);
/* Hands over unit's gradient in device memory `grad` (wire type), readable once `ready` has
 * happened. Returns a ticket. */
int slide_reduce_submit(struct slide_reduce *reduce, int unit, const void *grad,
                        struct slide_event *ready, uint32_t *ticket, struct slide_err *err);
/* Until the gradient of `ticket` has been copied out: its memory may be used again. */
int slide_reduce_wait(struct slide_reduce *reduce, uint32_t ticket, struct slide_err *err);
/* Until everything submitted has been reduced on this rank. */
int slide_reduce_drain(struct slide_reduce *reduce, struct slide_err *err);
/* The same, and the totals since the last flush. */
int slide_reduce_flush(struct slide_reduce *reduce, struct slide_reduce_totals *totals,
                       struct slide_err *err);

#endif
