/* The checked wrappers around a backend's table: they count calls and allocations, can make the
 * n-th call fail (tests), and say in an error what was asked. Everything above device/ calls these.
 */
#include "device/device.h"

static struct slide_device_head *of_device(struct slide_device *device)
{
    return (struct slide_device_head *)device;
}

/* Lanes and events begin with a pointer to their device. */
static struct slide_device_head *of_lane(const struct slide_lane *lane)
{
    return *(struct slide_device_head *const *)lane;
}

static struct slide_device_head *of_event(const struct slide_event *event)
{
    return *(struct slide_device_head *const *)event;
}

/* Counts a call that can fail; -1 when this one was asked to. */
static int enter(struct slide_device_head *head, const char *what, struct slide_err *err)
{
    uint64_t n = atomic_fetch_add(&head->calls, 1) + 1;
    if (n == atomic_load(&head->fail_at))
        return slide_err_set(err, SLIDE_EDEVICE, "%s: device call %llu fails, as asked", what,
                             (unsigned long long)n);
    return 0;
}

int slide_device_open(struct slide_device **device, const struct slide_backend *backend,
                      const struct slide_device_options *options, struct slide_err *err)
{
    *device = NULL;
    if (backend->count() < 1 && backend->available(err))
        return -1;
    if (options->index < 0 || options->index >= backend->count())
        return slide_err_set(err, SLIDE_EINVAL, "%s has %d device%s, there is no number %d",
                             backend->name, backend->count(), backend->count() == 1 ? "" : "s",
                             options->index);
    if (backend->open(device, options, err))
        return -1;
    of_device(*device)->backend = backend;
    of_device(*device)->rank = options->rank;
    return 0;
}

void slide_device_close(struct slide_device *device)
{
    if (device)
        of_device(device)->backend->close(device);
}

int slide_device_info(struct slide_device *device, struct slide_device_info *info,
                      struct slide_err *err)
{
    return of_device(device)->backend->info(device, info, err);
}

void *slide_device_alloc(struct slide_device *device, size_t bytes, struct slide_err *err)
{
    struct slide_device_head *head = of_device(device);
    if (enter(head, "allocation", err))
        return NULL;
    atomic_fetch_add(&head->allocs, 1);
    void *memory = head->backend->alloc(device, bytes, err);
    if (!memory)
        slide_err_note(err, "%zu bytes on the device", bytes);
    return memory;
}

void slide_device_free(struct slide_device *device, void *memory)
{
    if (memory)
        of_device(device)->backend->free(device, memory);
}

int slide_device_pin(struct slide_device *device, void *host, size_t bytes, struct slide_err *err)
{
    struct slide_device_head *head = of_device(device);
    return enter(head, "pinning", err) ? -1 : head->backend->pin(device, host, bytes, err);
}

void slide_device_unpin(struct slide_device *device, void *host, size_t bytes)
{
    of_device(device)->backend->unpin(device, host, bytes);
}

void slide_device_abandon(struct slide_device *device)
{
    if (device)
        atomic_store(&of_device(device)->abandoned, 1);
}

struct slide_lane *slide_lane_open(struct slide_device *device, enum slide_lane_kind kind,
                                   struct slide_err *err)
{
    struct slide_device_head *head = of_device(device);
    return enter(head, "lane", err) ? NULL : head->backend->lane_open(device, kind, err);
}

void slide_lane_close(struct slide_lane *lane)
{
    if (lane)
        of_lane(lane)->backend->lane_close(lane);
}

int slide_lane_sync(struct slide_lane *lane, const struct slide_waiter *waiter,
                    struct slide_err *err)
{
    struct slide_device_head *head = of_lane(lane);
    return enter(head, "lane sync", err) ? -1 : head->backend->lane_sync(lane, waiter, err);
}

struct slide_event *slide_event_new(struct slide_device *device, struct slide_err *err)
{
    struct slide_device_head *head = of_device(device);
    return enter(head, "event", err) ? NULL : head->backend->event_new(device, err);
}

void slide_event_free(struct slide_event *event)
{
    if (event)
        of_event(event)->backend->event_free(event);
}

int slide_event_record(struct slide_event *event, struct slide_lane *lane, struct slide_err *err)
{
    struct slide_device_head *head = of_lane(lane);
    return enter(head, "event record", err) ? -1 : head->backend->event_record(event, lane, err);
}

int slide_event_wait(struct slide_event *event, struct slide_lane *lane, struct slide_err *err)
{
    struct slide_device_head *head = of_lane(lane);
    return enter(head, "event wait", err) ? -1 : head->backend->event_wait(event, lane, err);
}

int slide_event_host_wait(struct slide_event *event, const struct slide_waiter *waiter,
                          struct slide_err *err)
{
    struct slide_device_head *head = of_event(event);
    return enter(head, "event wait on the host", err)
               ? -1
               : head->backend->event_host_wait(event, waiter, err);
}

int slide_copy(struct slide_lane *lane, void *to, const void *from, size_t bytes,
               enum slide_copy_kind kind, struct slide_err *err)
{
    static const char *const name[] = {"copy to the device", "copy to the host",
                                       "copy on the device"};
    struct slide_device_head *head = of_lane(lane);
    if (!bytes)
        return 0;
    if (enter(head, name[kind], err) || head->backend->copy(lane, to, from, bytes, kind, err))
        return slide_err_note(err, "%s of %zu bytes", name[kind], bytes);
    return 0;
}

int slide_zero(struct slide_lane *lane, void *memory, size_t bytes, struct slide_err *err)
{
    struct slide_device_head *head = of_lane(lane);
    if (!bytes)
        return 0;
    if (enter(head, "zero", err) || head->backend->zero(lane, memory, bytes, err))
        return slide_err_note(err, "zeroing %zu bytes", bytes);
    return 0;
}

int slide_gemm(struct slide_lane *lane, const struct slide_gemm *g, struct slide_err *err)
{
    struct slide_device_head *head = of_lane(lane);
    if (enter(head, "gemm", err) || head->backend->gemm(lane, g, err))
        return slide_err_note(err, "gemm %d x %d x %d%s%s", g->m, g->n, g->k,
                              g->trans_a ? ", a transposed" : "",
                              g->trans_b ? ", b transposed" : "");
    return 0;
}

size_t slide_gemm_workspace(struct slide_device *device)
{
    return of_device(device)->backend->gemm_workspace(device);
}

size_t slide_attn_workspace(struct slide_device *device, const struct slide_attn *attn)
{
    return of_device(device)->backend->attn_workspace(device, attn);
}

static int attn_note(const struct slide_attn *a, const char *what, struct slide_err *err)
{
    return slide_err_note(err, "%s of %d rows of %d tokens, %d heads, %d kv heads, head size %d",
                          what, a->rows, a->seq, a->heads, a->kv_heads, a->head_dim);
}

int slide_attn_fwd(struct slide_lane *lane, const struct slide_attn *attn, struct slide_err *err)
{
    struct slide_device_head *head = of_lane(lane);
    if (enter(head, "attention", err) || head->backend->attn_fwd(lane, attn, err))
        return attn_note(attn, "attention", err);
    return 0;
}

int slide_attn_bwd(struct slide_lane *lane, const struct slide_attn *attn, struct slide_err *err)
{
    struct slide_device_head *head = of_lane(lane);
    if (enter(head, "attention backward", err) || head->backend->attn_bwd(lane, attn, err))
        return attn_note(attn, "attention backward", err);
    return 0;
}

static int launch(struct slide_lane *lane, enum slide_kernel kernel, const char *name,
                  enum slide_dtype act, const void *args, size_t bytes, struct slide_err *err)
{
    struct slide_device_head *head = of_lane(lane);
    if (enter(head, name, err) || head->backend->launch(lane, kernel, act, args, bytes, err))
        return slide_err_note(err, "kernel %s", name);
    return 0;
}

#define X(name)                                                                                    \
    int slide_launch_##name(struct slide_lane *lane, enum slide_dtype act,                         \
                            const struct slide_##name##_args *args, struct slide_err *err)         \
    {                                                                                              \
        return launch(lane, SLIDE_KERNEL_##name, #name, act, args, sizeof *args, err);             \
    }
#include "device/kernels.def"
#undef X

uint64_t slide_device_allocs(struct slide_device *device)
{
    return atomic_load(&of_device(device)->allocs);
}

uint64_t slide_device_calls(struct slide_device *device)
{
    return atomic_load(&of_device(device)->calls);
}

void slide_device_fail_at(struct slide_device *device, uint64_t n)
{
    struct slide_device_head *head = of_device(device);
    atomic_store(&head->fail_at, n ? atomic_load(&head->calls) + n : 0);
}
