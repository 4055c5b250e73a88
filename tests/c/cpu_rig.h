/* What the tests of the CPU backend's mathematics share. A test is run by every(): once for each
 * instruction set of this CPU and each of 1, 2 and 3 threads, always from the same random numbers.
 * The first run is checked against formulas in float64 (`first` is set), the others against the
 * first run's bits, through same(). Arrays are allocated to the byte, for AddressSanitizer. */
#ifndef SLIDE_TESTS_CPU_RIG_H
#define SLIDE_TESTS_CPU_RIG_H

#include <math.h>

#include "cpu/cpu_inside.h"
#include "test.h"

#define RIG_HASHES 8192
#define RIG_ARRAYS 32

static const enum slide_dtype rig_acts[] = {SLIDE_F32, SLIDE_BF16};
/* Beside |want| + scale, where scale is the size of what was added up. BF16 rounds by 2^-8 at most,
 * and some results are rounded twice. */
static const double rig_tolerance[] = {[SLIDE_F32] = 4e-6, [SLIDE_BF16] = 1.01 / 128};

struct rig {
    struct slide_device *device;
    struct slide_lane *lane;
    struct slide_err err;
    bool first;
    uint64_t random, *hash;
    int hashes; /* of this run */
    void *array[RIG_ARRAYS];
    int arrays;
};

/* Memory that lives until rig_drop(). */
static inline void *rig_new(struct rig *r, size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    if (!p || r->arrays == RIG_ARRAYS) {
        fprintf(stderr, "the rig has no memory\n");
        exit(2);
    }
    memset(p, 0xff, bytes); /* NaN: what is read must have been written */
    return r->array[r->arrays++] = p;
}

static inline void rig_drop(struct rig *r)
{
    while (r->arrays)
        free(r->array[--r->arrays]);
}

static inline double rig_uniform(struct rig *r, double low, double high)
{
    return low + (high - low) * (double)(test_random(&r->random) >> 11) * 0x1p-53;
}

static inline int32_t rig_below(struct rig *r, int32_t n)
{
    return (int32_t)(test_random(&r->random) % (uint64_t)n);
}

static inline double rig_get(enum slide_dtype act, const void *p, int64_t i)
{
    if (act == SLIDE_F32)
        return ((const float *)p)[i];
    return slide_bf16_to_f32(((const uint16_t *)p)[i]);
}

static inline void rig_put(enum slide_dtype act, void *p, int64_t i, double x)
{
    if (act == SLIDE_F32)
        ((float *)p)[i] = (float)x;
    else
        ((uint16_t *)p)[i] = slide_f32_to_bf16((float)x);
}

/* n random numbers in [-size, size). */
static inline void *rig_array(struct rig *r, enum slide_dtype act, int64_t n, double size)
{
    void *p = rig_new(r, (size_t)n * slide_dtype_size(act));
    for (int64_t i = 0; i < n; i++)
        rig_put(act, p, i, rig_uniform(r, -size, size));
    return p;
}

static inline void *rig_copy(struct rig *r, const void *from, size_t bytes)
{
    return memcpy(rig_new(r, bytes), from, bytes);
}

/* Waits for the lane; the call before must have returned `failed` 0. */
static inline void rig_done(struct rig *r, int failed)
{
    static const struct slide_waiter waiter;
    if (!failed)
        failed = slide_lane_sync(r->lane, &waiter, &r->err);
    CHECK_OK(failed, &r->err);
}

static inline void rig_same(struct rig *r, const void *p, size_t bytes)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const unsigned char *)p)[i]) * 0x100000001b3u;
    if (r->hashes == RIG_HASHES) {
        CHECK(!"more results than the rig keeps");
        return;
    }
    if (r->first)
        r->hash[r->hashes] = hash;
    else
        CHECK_EQ(r->hash[r->hashes], hash);
    r->hashes++;
}

/* One check an array: the worst element. */
struct rig_worst {
    double ratio, got, want;
    int64_t at;
};

static inline void rig_compare(struct rig_worst *w, enum slide_dtype act, int64_t at, double got,
                               double want, double scale)
{
    double ratio = fabs(got - want) / (rig_tolerance[act] * (fabs(want) + scale) + 1e-37);
    if (ratio > w->ratio || ratio != ratio)
        *w = (struct rig_worst){ratio != ratio ? INFINITY : ratio, got, want, at};
}

static inline void rig_judge(const struct rig_worst *w, const char *what, const char *file,
                             int line)
{
    char text[256];
    snprintf(text, sizeof text, "%s: element %lld is %.9g, should be %.9g (%.2f x the tolerance)",
             what, (long long)w->at, w->got, w->want, w->ratio);
    test_check(w->ratio <= 1, file, line, text);
}

#define RIG_JUDGE(worst, ...)                                                                      \
    do {                                                                                           \
        char rig_what[128];                                                                        \
        snprintf(rig_what, sizeof rig_what, __VA_ARGS__);                                          \
        rig_judge(worst, rig_what, __FILE__, __LINE__);                                            \
    } while (0)

static inline void every(void (*one)(struct rig *))
{
    struct rig r = {.hash = calloc(RIG_HASHES, sizeof(uint64_t)), .err = SLIDE_ERR_INIT};
    r.first = true;
    for (int isa = SLIDE_ISA_BASE; isa <= (int)slide_isa_best(); isa++) {
        for (int threads = 1; threads <= 3; threads++) {
            struct slide_device_options options = {.threads = threads};
            int failed = slide_device_open(&r.device, &slide_cpu_backend, &options, &r.err);
            if (!CHECK_OK(failed, &r.err))
                goto end;
            r.device->isa = (enum slide_isa)isa;
            r.lane = slide_lane_open(r.device, SLIDE_LANE_COMPUTE, &r.err);
            r.random = test_seed;
            r.hashes = 0;
            if (CHECK(r.lane != NULL))
                one(&r);
            rig_drop(&r);
            slide_lane_close(r.lane);
            slide_device_close(r.device);
            r.first = false;
        }
    }
end:
    free(r.hash);
}

#endif
