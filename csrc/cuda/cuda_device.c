/* Device, lanes, events and memory over the driver API. A lane is a stream that doesn't wait for
 * the legacy one, an event is an event without timing. The primary context is used, as every
 * library of the process does; each entry makes it current in the calling thread, for several
 * threads feed lanes. Waits on the host ask again and again instead of blocking in the driver, so
 * that an abort, a deadline or a signal ends them: spinning first, then with naps.
 * Called through the table at the end. */
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "cuda/cuda_inside.h"

#define SPIN 2000      /* queries before the first nap: about a millisecond */
#define NAP_NS 50000   /* then */
#define POLL_TIME 0.05 /* seconds between looks at the waiter's poll */

struct slide_event {
    struct slide_device *device; /* first: device.c relies on it */
    CUevent event;
};

int slide_cuda_check(struct slide_device *device, CUresult result, const char *what,
                     struct slide_err *err)
{
    if (!result)
        return 0;
    const char *name = NULL, *text = NULL;
    device->driver->cuGetErrorName(result, &name);
    device->driver->cuGetErrorString(result, &text);
    return slide_err_set(err, result == CUDA_ERROR_OUT_OF_MEMORY ? SLIDE_EMEM : SLIDE_EDEVICE,
                         "GPU %d: %s: %s (%s)", device->options.index, what,
                         text ? text : "unknown error", name ? name : "?");
}

/* Calls a function of the driver with this device's context current. */
#define CALL(device, function, ...)                                                                \
    slide_cuda_check(device, (device)->driver->function(__VA_ARGS__), #function, err)

static int enter(struct slide_device *device, struct slide_err *err)
{
    return CALL(device, cuCtxSetCurrent, device->context);
}

/* ---- waiting ---- */

typedef CUresult query_fn(const struct slide_device *device, const void *object);

static CUresult query_event(const struct slide_device *device, const void *object)
{
    return device->driver->cuEventQuery(((const struct slide_event *)object)->event);
}

static CUresult query_stream(const struct slide_device *device, const void *object)
{
    return device->driver->cuStreamQuery(((const struct slide_lane *)object)->stream);
}

static int wait_for(struct slide_device *device, query_fn *query, const void *object,
                    const struct slide_waiter *waiter, struct slide_err *err)
{
    double start = slide_time(), looked = start;
    for (long round = 0;; round++) {
        CUresult result = query(device, object);
        if (result != CUDA_ERROR_NOT_READY)
            return slide_cuda_check(device, result, "work on the GPU", err);
        if (waiter && waiter->abort && slide_word_get(waiter->abort))
            return slide_err_set(err, SLIDE_EPEER, "another rank has failed");
        if (round < SPIN) {
            sched_yield();
            continue;
        }
        nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
        double now = slide_time();
        if (waiter && waiter->deadline > 0 && now - start > waiter->deadline)
            return slide_err_set(err, SLIDE_ETIME, "waiting for the GPU took more than %g s",
                                 waiter->deadline);
        if (waiter && waiter->poll && now - looked > POLL_TIME) {
            looked = now;
            if (waiter->poll(waiter->arg, err))
                return -1;
        }
    }
}

/* ---- lanes ---- */

static struct slide_lane *lane_open(struct slide_device *device, enum slide_lane_kind kind,
                                    struct slide_err *err)
{
    struct slide_lane *lane = slide_mem_new(sizeof *lane, err);
    if (!lane)
        return NULL;
    lane->device = device;
    lane->kind = kind;
    if (enter(device, err) ||
        CALL(device, cuStreamCreateWithPriority, &lane->stream, CU_STREAM_NON_BLOCKING, 0)) {
        slide_mem_free(lane);
        return NULL;
    }
    return lane;
}

static void lane_close(struct slide_lane *lane)
{
    struct slide_device *device = lane->device;
    /* What is queued uses memory that its owner frees next: it has to end. */
    if (!enter(device, NULL)) {
        wait_for(device, query_stream, lane, NULL, NULL);
        device->driver->cuStreamDestroy(lane->stream);
    }
    slide_mem_free(lane);
}

static int lane_sync(struct slide_lane *lane, const struct slide_waiter *waiter,
                     struct slide_err *err)
{
    return enter(lane->device, err) || wait_for(lane->device, query_stream, lane, waiter, err) ? -1
                                                                                               : 0;
}

/* ---- events ---- */

static struct slide_event *event_new(struct slide_device *device, struct slide_err *err)
{
    struct slide_event *event = slide_mem_new(sizeof *event, err);
    if (!event)
        return NULL;
    event->device = device;
    if (enter(device, err) || CALL(device, cuEventCreate, &event->event, CU_EVENT_DISABLE_TIMING)) {
        slide_mem_free(event);
        return NULL;
    }
    return event;
}

static void event_free(struct slide_event *event)
{
    if (!enter(event->device, NULL))
        event->device->driver->cuEventDestroy(event->event);
    slide_mem_free(event);
}

static int event_record(struct slide_event *event, struct slide_lane *lane, struct slide_err *err)
{
    struct slide_device *device = lane->device;
    return enter(device, err) || CALL(device, cuEventRecord, event->event, lane->stream) ? -1 : 0;
}

static int event_wait(struct slide_event *event, struct slide_lane *lane, struct slide_err *err)
{
    struct slide_device *device = lane->device;
    return enter(device, err) || CALL(device, cuStreamWaitEvent, lane->stream, event->event, 0) ? -1
                                                                                                : 0;
}

static int event_host_wait(struct slide_event *event, const struct slide_waiter *waiter,
                           struct slide_err *err)
{
    return enter(event->device, err) || wait_for(event->device, query_event, event, waiter, err)
               ? -1
               : 0;
}

/* ---- memory ---- */

static CUdeviceptr gpu(const void *p)
{
    return (CUdeviceptr)(uintptr_t)p;
}

static int copy(struct slide_lane *lane, void *to, const void *from, size_t bytes,
                enum slide_copy_kind kind, struct slide_err *err)
{
    struct slide_device *device = lane->device;
    if (enter(device, err))
        return -1;
    switch (kind) {
    case SLIDE_COPY_H2D:
        return CALL(device, cuMemcpyHtoDAsync, gpu(to), from, bytes, lane->stream);
    case SLIDE_COPY_D2H:
        return CALL(device, cuMemcpyDtoHAsync, to, gpu(from), bytes, lane->stream);
    case SLIDE_COPY_D2D:
        break;
    }
    return CALL(device, cuMemcpyDtoDAsync, gpu(to), gpu(from), bytes, lane->stream);
}

static int zero(struct slide_lane *lane, void *memory, size_t bytes, struct slide_err *err)
{
    struct slide_device *device = lane->device;
    return enter(device, err) || CALL(device, cuMemsetD8Async, gpu(memory), 0, bytes, lane->stream)
               ? -1
               : 0;
}

static void *device_alloc(struct slide_device *device, size_t bytes, struct slide_err *err)
{
    CUdeviceptr p = 0;
    size_t free_bytes = 0, all = 0;
    if (enter(device, err))
        return NULL;
    CUresult result = device->driver->cuMemAlloc(&p, bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        device->driver->cuMemGetInfo(&free_bytes, &all);
        slide_err_set(err, SLIDE_EMEM,
                      "GPU %d: %zu bytes are wanted, %zu of %zu are free: smaller "
                      "micro-batches (more gradient_accumulation_steps), fewer slots or "
                      "keep_activations=False need less",
                      device->options.index, bytes, free_bytes, all);
        return NULL;
    }
    return slide_cuda_check(device, result, "cuMemAlloc", err) ? NULL : (void *)(uintptr_t)p;
}

static void device_free(struct slide_device *device, void *memory)
{
    if (!enter(device, NULL))
        device->driver->cuMemFree(gpu(memory));
}

static int pin(struct slide_device *device, void *host, size_t bytes, struct slide_err *err)
{
    /* The error of a failed registration is not sticky: nothing is left to consume. */
    if (enter(device, err) ||
        CALL(device, cuMemHostRegister, host, bytes, CU_MEMHOSTREGISTER_PORTABLE))
        return slide_err_note(err,
                              "host: pinning %zu bytes for GPU %d (rank %d); ulimit -l and the "
                              "memory limit of the container bound it",
                              bytes, device->options.index, device->options.rank);
    return 0;
}

static void unpin(struct slide_device *device, void *host, size_t bytes)
{
    (void)bytes;
    if (!enter(device, NULL))
        device->driver->cuMemHostUnregister(host);
}

/* ---- compute ---- */

int slide_cuda_start(struct slide_lane *lane, enum slide_cuda_entry entry,
                     const struct slide_cuda_grid *g, const void *args, struct slide_err *err)
{
    static const char *const name[] = {
#define X(symbol, type) #symbol,
#include "cuda/entries.def"
#undef X
    };
    struct slide_device *device = lane->device;
    void *parameters[] = {(void *)(uintptr_t)args};
    if (enter(device, err))
        return -1;
    CUresult result =
        device->driver->cuLaunchKernel(device->entry[entry], g->x, g->y, g->z, g->threads, 1, 1,
                                       g->shared, lane->stream, parameters, NULL);
    if (slide_cuda_check(device, result, "cuLaunchKernel", err))
        return slide_err_note(err,
                              "%s, %u x %u x %u blocks of %u threads, %u bytes of shared memory",
                              name[entry], g->x, g->y, g->z, g->threads, g->shared);
    return 0;
}

/* ---- device ---- */

static int available(struct slide_err *err)
{
    const struct slide_cuda_driver *driver = slide_cuda_driver_get(err);
    int n = 0;
    if (!driver || !slide_cublaslt_get(err))
        return -1;
    if (driver->cuDeviceGetCount(&n) || n < 1)
        return slide_err_set(err, SLIDE_EDEVICE, "NVIDIA's driver finds no GPU");
    return 0;
}

static int count(void)
{
    const struct slide_cuda_driver *driver = slide_cuda_driver_get(NULL);
    int n = 0;
    return driver && !driver->cuDeviceGetCount(&n) ? n : 0;
}

static int attribute(struct slide_device *device, CUdevice_attribute which)
{
    int value = 0;
    device->driver->cuDeviceGetAttribute(&value, which, device->device);
    return value;
}

/* The kernels: fatbins in this library's own bytes (cuda_image.c), a module a file. */
#define X(name) extern const unsigned char slide_cuda_image_##name[];
#include "cuda/images.def"
#undef X

static CUresult find_entry(struct slide_device *device, int entry, const char *name)
{
    CUresult result = CUDA_ERROR_NOT_FOUND;
    for (int m = 0; result == CUDA_ERROR_NOT_FOUND && m < SLIDE_CUDA_IMAGES; m++)
        result =
            device->driver->cuModuleGetFunction(&device->entry[entry], device->module[m], name);
    return result;
}

static int load_kernels(struct slide_device *device, struct slide_err *err)
{
    static const unsigned char *const image[] = {
#define X(name) slide_cuda_image_##name,
#include "cuda/images.def"
#undef X
    };
    static const char *const name[] = {
#define X(symbol, type) #symbol,
#include "cuda/entries.def"
#undef X
    };
    for (int m = 0; m < SLIDE_CUDA_IMAGES; m++)
        if (CALL(device, cuModuleLoadData, &device->module[m], image[m]))
            return slide_err_note(err,
                                  "this build has no kernels for a GPU of compute capability "
                                  "%d.%d: see SLIDE_CUDA_ARCHS in setup.py",
                                  device->capability / 10, device->capability % 10);
    for (int i = 0; i < SLIDE_ENTRY_COUNT; i++) {
        int own = 0;
        if (slide_cuda_check(device, find_entry(device, i, name[i]), "cuModuleGetFunction", err) ||
            CALL(device, cuFuncGetAttribute, &own, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                 device->entry[i]) ||
            CALL(device, cuFuncSetAttribute, device->entry[i],
                 CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)device->shared_max - own))
            return slide_err_note(err, "kernel %s", name[i]);
    }
    return 0;
}

static void device_close(struct slide_device *device)
{
    slide_cuda_attn_close(device);
    slide_cuda_gemm_close(device);
    if (device->context && !enter(device, NULL)) {
        for (int m = 0; m < SLIDE_CUDA_IMAGES; m++)
            if (device->module[m])
                device->driver->cuModuleUnload(device->module[m]);
        device->driver->cuCtxSetCurrent(NULL);
    }
    if (device->context)
        device->driver->cuDevicePrimaryCtxRelease(device->device);
    slide_mem_free(device);
}

static int device_open(struct slide_device **out, const struct slide_device_options *options,
                       struct slide_err *err)
{
    slide_cuda_folder_set(options->nvidia);
    const struct slide_cuda_driver *driver = slide_cuda_driver_get(err);
    struct slide_device *device = driver ? slide_mem_new(sizeof *device, err) : NULL;
    if (!device)
        return -1;
    device->head.backend = &slide_cuda_backend; /* for lanes that open needs */
    device->driver = driver;
    device->options = *options;
    device->options.blas = device->options.nvidia = NULL; /* the caller's texts */
    if (CALL(device, cuDeviceGet, &device->device, options->index) ||
        CALL(device, cuDevicePrimaryCtxRetain, &device->context, device->device) ||
        enter(device, err))
        goto fail;
    device->sms = attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    device->capability = attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) * 10 +
                         attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    device->shared_max =
        (size_t)attribute(device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    if (load_kernels(device, err) || slide_cuda_gemm_open(device, err) ||
        slide_cuda_attn_open(device, err))
        goto fail;
    *out = device;
    return 0;
fail:
    slide_err_note(err, "while opening GPU %d", options->index);
    device_close(device);
    return -1;
}

/* Of the GPU's PCI bus id, never of its number: -1 where the system doesn't say. */
static int numa_node(struct slide_device *device)
{
    char id[32] = "", path[96];
    int node = -1;
    if (device->driver->cuDeviceGetPCIBusId(id, sizeof id, device->device))
        return -1;
    for (char *c = id; *c; c++)
        if (*c >= 'A' && *c <= 'F')
            *c += 'a' - 'A';
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", id);
    FILE *file = fopen(path, "re");
    if (file) {
        if (fscanf(file, "%d", &node) != 1)
            node = -1;
        fclose(file);
    }
    return node;
}

static int info(struct slide_device *device, struct slide_device_info *out, struct slide_err *err)
{
    size_t free_bytes = 0, all = 0;
    *out = (struct slide_device_info){.numa_node = numa_node(device)};
    if (enter(device, err) ||
        CALL(device, cuDeviceGetName, out->name, (int)sizeof out->name, device->device) ||
        CALL(device, cuMemGetInfo, &free_bytes, &all))
        return -1;
    out->memory_bytes = all;
    out->free_bytes = free_bytes;
    return 0;
}

int slide_cuda_text(const char *nvidia, char *text, size_t size, struct slide_err *err)
{
    slide_cuda_folder_set(nvidia);
    if (available(err))
        return -1;
    int driver = 0;
    slide_cuda_driver_get(NULL)->cuDriverGetVersion(&driver);
    size_t version = slide_cublaslt_get(NULL)->cublasLtGetVersion();
    snprintf(text, size, "driver for CUDA %d.%d (%s), cuBLASLt %zu.%zu.%zu (%s)", driver / 1000,
             driver % 1000 / 10, slide_cuda_driver_path(), version / 10000, version / 100 % 100,
             version % 100, slide_cublaslt_path());
    return 0;
}

const struct slide_backend slide_cuda_backend = {
    .name = "cuda",
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
    .gemm = slide_cuda_gemm,
    .gemm_workspace = slide_cuda_gemm_workspace,
    .attn_workspace = slide_cuda_attn_workspace,
    .attn_fwd = slide_cuda_attn_fwd,
    .attn_bwd = slide_cuda_attn_bwd,
    .launch = slide_cuda_launch,
};
