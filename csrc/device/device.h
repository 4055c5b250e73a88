/* The device interface: memory, lanes (queues in order), events, GEMM, attention, small kernels.
 * Everything above this folder is written once, against it. cpu/ is the reference that runs
 * everywhere; cuda/ is the fast one. Work is enqueued on a lane and runs in the lane's order;
 * events order lanes among each other. All calls go through the checked wrappers in device.c, which
 * count calls and allocations and can make the n-th one fail.
 * Threads: a lane is fed by one thread at a time; different lanes may be fed by different threads.
 * Blocks: slide_event_host_wait and slide_lane_sync; all others enqueue and return. */
#ifndef SLIDE_DEVICE_DEVICE_H
#define SLIDE_DEVICE_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/err.h"
#include "base/sync.h"
#include "device/kernel_args.h"

enum slide_kernel {
#define X(name) SLIDE_KERNEL_##name,
#include "kernels.def"
#undef X
    SLIDE_KERNEL_COUNT
};

enum slide_lane_kind { SLIDE_LANE_COMPUTE, SLIDE_LANE_H2D, SLIDE_LANE_D2H, SLIDE_LANE_PEER };
enum slide_copy_kind { SLIDE_COPY_H2D, SLIDE_COPY_D2H, SLIDE_COPY_D2D };

struct slide_device_info {
    char name[128];
    uint64_t memory_bytes;
    uint64_t free_bytes; /* for allocations; UINT64_MAX: they take memory when it is touched */
    int numa_node;       /* -1: unknown */
};

struct slide_device_options {
    int index;          /* of the backend's devices */
    int rank;           /* for messages and test hooks */
    int threads;        /* CPU backend: compute threads, the caller's budget */
    const char *blas;   /* CPU backend: path of the BLAS library, NULL: search */
    const char *nvidia; /* CUDA backend: folder of pip's nvidia packages, NULL: search */
};

/* Opaque, each backend's own. */
struct slide_device;
struct slide_lane;
struct slide_event;

struct slide_backend {
    const char *name;
    bool host_memory; /* device memory is host memory: any may be used */
    /* 0 when the backend can run here; else -1 and `err` says what is missing and why. */
    int (*available)(struct slide_err *err);
    int (*count)(void);
    int (*open)(struct slide_device **, const struct slide_device_options *, struct slide_err *);
    void (*close)(struct slide_device *);
    int (*info)(struct slide_device *, struct slide_device_info *, struct slide_err *);
    void *(*alloc)(struct slide_device *, size_t, struct slide_err *);
    void (*free)(struct slide_device *, void *);
    int (*pin)(struct slide_device *, void *, size_t, struct slide_err *);
    void (*unpin)(struct slide_device *, void *, size_t);
    struct slide_lane *(*lane_open)(struct slide_device *, enum slide_lane_kind,
                                    struct slide_err *);
    void (*lane_close)(struct slide_lane *);
    int (*lane_sync)(struct slide_lane *, const struct slide_waiter *, struct slide_err *);
    struct slide_event *(*event_new)(struct slide_device *, struct slide_err *);
    void (*event_free)(struct slide_event *);
    int (*event_record)(struct slide_event *, struct slide_lane *, struct slide_err *);
    int (*event_wait)(struct slide_event *, struct slide_lane *, struct slide_err *);
    int (*event_host_wait)(struct slide_event *, const struct slide_waiter *, struct slide_err *);
    int (*copy)(struct slide_lane *, void *, const void *, size_t, enum slide_copy_kind,
                struct slide_err *);
    int (*zero)(struct slide_lane *, void *, size_t, struct slide_err *);
    int (*gemm)(struct slide_lane *, const struct slide_gemm *, struct slide_err *);
    size_t (*gemm_workspace)(struct slide_device *);
    size_t (*attn_workspace)(struct slide_device *, const struct slide_attn *);
    int (*attn_fwd)(struct slide_lane *, const struct slide_attn *, struct slide_err *);
    int (*attn_bwd)(struct slide_lane *, const struct slide_attn *, struct slide_err *);
    int (*launch)(struct slide_lane *, enum slide_kernel, enum slide_dtype act, const void *args,
                  size_t args_bytes, struct slide_err *);
};

/* What every backend's device begins with; its lanes and events begin with a pointer to the device.
 */
struct slide_device_head {
    const struct slide_backend *backend;
    int rank;
    _Atomic uint64_t calls, allocs, fail_at;
    _Atomic int abandoned; /* lanes drop what is queued */
};

/* ---- checked wrappers (device.c) ---- */
int slide_device_open(struct slide_device **device, const struct slide_backend *backend,
                      const struct slide_device_options *options, struct slide_err *err);
void slide_device_close(struct slide_device *device);
/* Lanes drop what they have not begun, as far as the backend can: for a close after an error, when
 * nobody wants the results any more. */
void slide_device_abandon(struct slide_device *device);
int slide_device_info(struct slide_device *device, struct slide_device_info *info,
                      struct slide_err *err);
void *slide_device_alloc(struct slide_device *device, size_t bytes, struct slide_err *err);
void slide_device_free(struct slide_device *device, void *memory);
int slide_device_pin(struct slide_device *device, void *host, size_t bytes, struct slide_err *err);
void slide_device_unpin(struct slide_device *device, void *host, size_t bytes);
struct slide_lane *slide_lane_open(struct slide_device *device, enum slide_lane_kind kind,
                                   struct slide_err *err);
void slide_lane_close(struct slide_lane *lane); /* finishes what is queued */
/* Waits until the lane is empty; reports the first error of what ran on it. */
int slide_lane_sync(struct slide_lane *lane, const struct slide_waiter *waiter,
                    struct slide_err *err);
struct slide_event *slide_event_new(struct slide_device *device, struct slide_err *err);
void slide_event_free(struct slide_event *event);
/* An event is "done" before its first record. A wait is for the last record made before the wait
 * was enqueued. */
int slide_event_record(struct slide_event *event, struct slide_lane *lane, struct slide_err *err);
int slide_event_wait(struct slide_event *event, struct slide_lane *lane, struct slide_err *err);
int slide_event_host_wait(struct slide_event *event, const struct slide_waiter *waiter,
                          struct slide_err *err);
int slide_copy(struct slide_lane *lane, void *to, const void *from, size_t bytes,
               enum slide_copy_kind kind, struct slide_err *err);
int slide_zero(struct slide_lane *lane, void *memory, size_t bytes, struct slide_err *err);
int slide_gemm(struct slide_lane *lane, const struct slide_gemm *gemm, struct slide_err *err);
/* Bytes that every gemm of the device may use, one at a time; and those of an attention. */
size_t slide_gemm_workspace(struct slide_device *device);
size_t slide_attn_workspace(struct slide_device *device, const struct slide_attn *attn);
int slide_attn_fwd(struct slide_lane *lane, const struct slide_attn *attn, struct slide_err *err);
int slide_attn_bwd(struct slide_lane *lane, const struct slide_attn *attn, struct slide_err *err);

/* slide_launch_<name>(lane, act, &args, err), one a line of kernels.def. */
#define X(name)                                                                                    \
    int slide_launch_##name(struct slide_lane *lane, enum slide_dtype act,                         \
                            const struct slide_##name##_args *args, struct slide_err *err);
#include "kernels.def"
#undef X

/* Device allocations, and calls that could fail, since the device was opened. The n-th next call
 * fails when asked to (0: off), for tests. */
uint64_t slide_device_allocs(struct slide_device *device);
uint64_t slide_device_calls(struct slide_device *device);
void slide_device_fail_at(struct slide_device *device, uint64_t n);

#endif
