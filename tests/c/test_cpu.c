/* Lanes, events and memory of the CPU backend, and the checked wrappers around it: order, waits
 * across lanes and devices, errors, calls that fail on demand. Runs under ThreadSanitizer too. */
#include "cpu/cpu_inside.h"
#include "test.h"

static const struct slide_waiter forever;

/* A device with a compute lane and two copy lanes. */
struct rig {
    struct slide_device *device;
    struct slide_lane *compute, *up, *down;
    struct slide_event *event[3];
    struct slide_err err;
};

static int rig_open(struct rig *r, int threads)
{
    struct slide_device_options options = {.threads = threads, .rank = 3};
    *r = (struct rig){.err = SLIDE_ERR_INIT};
    if (slide_device_open(&r->device, &slide_cpu_backend, &options, &r->err) ||
        !(r->compute = slide_lane_open(r->device, SLIDE_LANE_COMPUTE, &r->err)) ||
        !(r->up = slide_lane_open(r->device, SLIDE_LANE_H2D, &r->err)) ||
        !(r->down = slide_lane_open(r->device, SLIDE_LANE_D2H, &r->err)))
        return -1;
    for (int i = 0; i < 3; i++)
        if (!(r->event[i] = slide_event_new(r->device, &r->err)))
            return -1;
    return 0;
}

static void rig_close(struct rig *r)
{
    for (int i = 0; i < 3; i++)
        slide_event_free(r->event[i]);
    slide_lane_close(r->down);
    slide_lane_close(r->up);
    slide_lane_close(r->compute);
    slide_device_close(r->device);
}

static bool opened(struct rig *r)
{
    int failed = rig_open(r, 2);
    if (CHECK_OK(failed, &r->err))
        return true;
    rig_close(r);
    return false;
}

/* ---- commands of the tests ---- */

struct gate {
    slide_word opened, passed;
};

/* Holds a lane until the gate is open. */
static int hold(struct slide_lane *lane, const void *args, struct slide_err *err)
{
    struct gate *gate;
    (void)lane;
    memcpy(&gate, args, sizeof gate);
    slide_wait_reach(&gate->opened, 1, &forever, "the gate", err);
    slide_word_add(&gate->passed, 1);
    return 0;
}

static void put_gate(struct slide_lane *lane, struct gate *gate)
{
    CHECK_EQ(slide_cpu_enqueue(lane, false, hold, &gate, sizeof gate, NULL), 0);
}

static int fail(struct slide_lane *lane, const void *args, struct slide_err *err)
{
    (void)lane;
    return slide_err_set(err, SLIDE_EDEVICE, "failed with %d", *(const int *)args);
}

static void put_failure(struct slide_lane *lane, int number)
{
    CHECK_EQ(slide_cpu_enqueue(lane, false, fail, &number, sizeof number, NULL), 0);
}

static int synced(struct slide_lane *lane, struct slide_err *err)
{
    *err = SLIDE_ERR_INIT;
    return slide_lane_sync(lane, &forever, err);
}

static int copy(struct slide_lane *lane, void *to, const void *from, size_t bytes,
                struct slide_err *err)
{
    return slide_copy(lane, to, from, bytes, SLIDE_COPY_D2D, err);
}

/* ---- order ---- */

/* Each copy reads what the one before wrote, and the ring goes round ten times. */
static void order(void)
{
    enum { N = 10000 };
    struct rig r;
    if (!opened(&r))
        return;
    int *chain = calloc(N + 1, sizeof *chain), failed = 0;
    chain[0] = 42;
    for (int i = 0; i < N; i++)
        failed |= copy(r.compute, &chain[i + 1], &chain[i], sizeof *chain, &r.err);
    CHECK_OK(failed, &r.err);
    CHECK_EQ(synced(r.compute, &r.err), 0);
    CHECK_EQ(chain[N], 42);
    rig_close(&r);
    free(chain);
}

/* Sizes of one piece and of several, on the lane that has the pool and on one that hasn't, at the
 * same time; nothing beside them is touched. */
static void pieces(void)
{
    enum { MAX = (3 << 20) + 17 };
    static const size_t sizes[] = {1, 17, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, MAX};
    struct rig r;
    if (!opened(&r))
        return;
    struct slide_lane *lane[] = {r.compute, r.up};
    unsigned char *from = malloc(MAX), *to[2] = {malloc(MAX + 2), malloc(MAX + 2)};
    for (size_t i = 0; i < MAX; i++)
        from[i] = (unsigned char)(i * 31 + i / 4096 + 1);
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        size_t n = sizes[s], kept = n / 2, wrong = 0;
        for (int l = 0; l < 2; l++) {
            memset(to[l], 7, MAX + 2);
            CHECK_EQ(copy(lane[l], to[l] + 1, from, n, &r.err), 0);
            CHECK_EQ(slide_zero(lane[l], to[l] + 1 + kept, n - kept, &r.err), 0);
        }
        for (int l = 0; l < 2; l++) {
            CHECK_EQ(synced(lane[l], &r.err), 0);
            CHECK(to[l][0] == 7 && to[l][n + 1] == 7);
            for (size_t i = 0; i < n; i++)
                wrong += to[l][i + 1] != (i < kept ? from[i] : 0);
        }
        CHECK_EQ(wrong, 0);
    }
    rig_close(&r);
    free(to[1]);
    free(to[0]);
    free(from);
}

/* A value goes from lane to lane, over two devices, and is doubled by the copies. */
static void ping_pong(int rounds)
{
    struct rig a, b;
    if (!opened(&a))
        return;
    if (!opened(&b)) {
        rig_close(&a);
        return;
    }
    struct slide_lane *lane[] = {a.compute, b.up, a.down, b.compute};
    struct slide_event *event[] = {a.event[0], b.event[0], a.event[1], b.event[1]};
    int value[4] = {7, 0, 0, 0}, failed = 0, count = 0;
    for (int i = 0; i < rounds; i++) {
        for (int l = 0; l < 4; l++) {
            int from = l, to = (l + 1) % 4;
            /* What it reads is there, and then it is taken away: an early copy would move a 0. */
            failed |= slide_event_wait(event[(l + 3) % 4], lane[l], &a.err) ||
                      copy(lane[l], &value[to], &value[from], sizeof(int), &a.err) ||
                      slide_zero(lane[l], &value[from], sizeof(int), &a.err) ||
                      slide_event_record(event[l], lane[l], &a.err);
            count++;
        }
    }
    CHECK_OK(failed, &a.err);
    CHECK_EQ(slide_event_host_wait(event[3], &forever, &a.err), 0);
    CHECK_EQ(count, 4 * rounds);
    CHECK(value[0] == 7 && !value[1] && !value[2] && !value[3]);
    rig_close(&b);
    rig_close(&a);
}

static void across_lanes(void)
{
    ping_pong(2000);
}

static void across_lanes_jitter(void)
{
    setenv("SLIDE_JITTER", "5", 1);
    ping_pong(25);
    unsetenv("SLIDE_JITTER");
}

/* ---- events ---- */

static void event_rules(void)
{
    struct rig r;
    if (!opened(&r))
        return;
    struct gate first = {0}, second = {0};
    int from = 9, to = 0;
    /* Done before its first record, on the host and on a lane. */
    CHECK_EQ(slide_event_host_wait(r.event[0], &forever, &r.err), 0);
    CHECK_EQ(slide_event_wait(r.event[0], r.up, &r.err), 0);
    CHECK_EQ(synced(r.up, &r.err), 0);
    /* A wait is for the record before it, not for one that comes after. */
    put_gate(r.compute, &first);
    CHECK_EQ(slide_event_record(r.event[0], r.compute, &r.err), 0);
    CHECK_EQ(slide_event_wait(r.event[0], r.up, &r.err), 0);
    CHECK_EQ(copy(r.up, &to, &from, sizeof to, &r.err), 0);
    put_gate(r.compute, &second);
    CHECK_EQ(slide_event_record(r.event[0], r.compute, &r.err), 0);
    struct slide_waiter soon = {.deadline = 0.05};
    CHECK_EQ(slide_lane_sync(r.up, &soon, &r.err), -1);
    CHECK_ERR(&r.err, SLIDE_ETIME, "the device");
    slide_word_set(&first.opened, 1);
    CHECK_EQ(synced(r.up, &r.err), 0);
    CHECK_EQ(to, 9);
    CHECK_EQ(slide_word_get(&second.passed), 0);
    CHECK_EQ(slide_event_host_wait(r.event[0], &soon, &r.err), -1);
    slide_word_set(&second.opened, 1);
    r.err = SLIDE_ERR_INIT;
    CHECK_EQ(slide_event_host_wait(r.event[0], &forever, &r.err), 0);
    CHECK_EQ(slide_word_get(&second.passed), 1);
    rig_close(&r);
}

/* A record on a fast lane doesn't do for the wait for an earlier one on a slow lane. */
static void event_two_lanes(void)
{
    struct rig r;
    if (!opened(&r))
        return;
    struct gate gate = {0};
    int from = 5, middle = 0, to = 0;
    put_gate(r.compute, &gate);
    CHECK_EQ(copy(r.compute, &middle, &from, sizeof to, &r.err), 0);
    CHECK_EQ(slide_event_record(r.event[0], r.compute, &r.err), 0);
    CHECK_EQ(slide_event_wait(r.event[0], r.up, &r.err), 0);
    CHECK_EQ(copy(r.up, &to, &middle, sizeof to, &r.err), 0);
    CHECK_EQ(slide_event_record(r.event[0], r.down, &r.err), 0);
    struct slide_waiter soon = {.deadline = 0.05};
    CHECK_EQ(slide_lane_sync(r.up, &soon, &r.err), -1);
    slide_word_set(&gate.opened, 1);
    CHECK_EQ(synced(r.up, &r.err), 0);
    CHECK_EQ(synced(r.down, &r.err), 0);
    CHECK_EQ(to, 5);
    rig_close(&r);
}

/* ---- errors ---- */

static void errors(void)
{
    struct rig r;
    if (!opened(&r))
        return;
    int from = 1, to[3] = {0};
    put_failure(r.compute, 1);
    put_failure(r.compute, 2);
    CHECK_EQ(copy(r.compute, &to[0], &from, sizeof from, &r.err), 0);
    CHECK_EQ(slide_event_record(r.event[0], r.compute, &r.err), 0);
    /* The next lane gets the error with the event, and the one behind it too. */
    CHECK_EQ(slide_event_wait(r.event[0], r.up, &r.err), 0);
    CHECK_EQ(copy(r.up, &to[1], &from, sizeof from, &r.err), 0);
    CHECK_EQ(slide_event_record(r.event[1], r.up, &r.err), 0);
    CHECK_EQ(slide_event_wait(r.event[1], r.down, &r.err), 0);
    CHECK_EQ(copy(r.down, &to[2], &from, sizeof from, &r.err), 0);
    CHECK_EQ(slide_event_record(r.event[2], r.down, &r.err), 0);
    for (int i = 0; i < 3; i++) {
        r.err = SLIDE_ERR_INIT;
        CHECK_EQ(slide_event_host_wait(r.event[i], &forever, &r.err), -1);
        CHECK_ERR(&r.err, SLIDE_EDEVICE, "failed with 1");
    }
    CHECK_EQ(synced(r.compute, &r.err), -1);
    CHECK_ERR(&r.err, SLIDE_EDEVICE, "failed with 1");
    CHECK_EQ(synced(r.down, &r.err), -1);
    CHECK_ERR(&r.err, SLIDE_EDEVICE, "failed with 1");
    CHECK_EQ(to[0] + to[1] + to[2], 0);
    /* A failed lane drains ten rings, completes events, and closes; an event outlives it. */
    int failed = 0;
    for (int i = 0; i < 10240; i++)
        failed |= slide_event_record(r.event[0], r.down, &r.err);
    CHECK_EQ(failed, 0);
    CHECK_EQ(slide_event_wait(r.event[0], r.compute, &r.err), 0);
    slide_lane_close(r.down);
    r.down = NULL;
    r.err = SLIDE_ERR_INIT;
    CHECK_EQ(slide_event_host_wait(r.event[2], &forever, &r.err), -1);
    CHECK_ERR(&r.err, SLIDE_EDEVICE, "failed with 1");
    rig_close(&r);
}

/* A test hook that fails in a queue, here by a text that isn't understood, doesn't keep an event
 * from being done. */
static void errors_of_hooks(void)
{
    struct rig r;
    if (!opened(&r))
        return;
    setenv("SLIDE_FAULT", "nonsense", 1);
    CHECK_EQ(slide_event_record(r.event[0], r.up, &r.err), 0);
    CHECK_EQ(slide_event_host_wait(r.event[0], &forever, &r.err), 0);
    CHECK_EQ(synced(r.up, &r.err), -1);
    CHECK_ERR(&r.err, SLIDE_EINVAL, "SLIDE_FAULT");
    unsetenv("SLIDE_FAULT");
    rig_close(&r);
}

static void abandon(void)
{
    struct rig r;
    if (!opened(&r))
        return;
    struct gate gate = {0};
    int from = 3, to[100] = {0}, sum = 0;
    put_gate(r.compute, &gate);
    for (int i = 0; i < 100; i++)
        sum |= copy(r.compute, &to[i], &from, sizeof from, &r.err);
    CHECK_EQ(slide_event_record(r.event[0], r.compute, &r.err), 0);
    CHECK_EQ(slide_event_wait(r.event[0], r.up, &r.err), 0);
    slide_device_abandon(r.device);
    slide_word_set(&gate.opened, 1);
    CHECK_EQ(slide_event_host_wait(r.event[0], &forever, &r.err), 0);
    CHECK_EQ(synced(r.up, &r.err), 0);
    for (int i = 0; i < 100; i++)
        sum += to[i];
    CHECK_EQ(sum, 0);
    rig_close(&r);
    slide_device_abandon(NULL);
}

static void one_compute_lane(void)
{
    struct rig r;
    if (!opened(&r))
        return;
    CHECK(!slide_lane_open(r.device, SLIDE_LANE_COMPUTE, &r.err));
    CHECK_ERR(&r.err, SLIDE_ESTATE, "one compute lane");
    float x[2] = {1, 2}, y[2] = {0};
    struct slide_cast_args cast = {x, y, 2, SLIDE_F32, SLIDE_F32};
    struct slide_gemm gemm = {
        .a = x, .b = x, .out = y, .lda = 1, .ldb = 1, .ldo = 1, .m = 1, .n = 1, .k = 1};
    struct slide_attn attn = {.rows = 1, .seq = 1, .heads = 1, .kv_heads = 1, .head_dim = 1};
    int refused = 0;
    r.err = SLIDE_ERR_INIT;
    refused += slide_launch_cast(r.up, SLIDE_F32, &cast, &r.err);
    CHECK_HAS(r.err.note[0], "kernel cast");
    refused += slide_gemm(r.up, &gemm, &r.err);
    CHECK_HAS(r.err.note[1], "gemm 1 x 1 x 1");
    refused += slide_attn_fwd(r.down, &attn, &r.err);
    CHECK_HAS(r.err.note[2], "attention of 1 rows");
    refused += slide_attn_bwd(r.down, &attn, &r.err);
    CHECK_EQ(refused, -4);
    CHECK_ERR(&r.err, SLIDE_ESTATE, "compute lane only");
    slide_lane_close(r.compute);
    r.err = SLIDE_ERR_INIT;
    r.compute = slide_lane_open(r.device, SLIDE_LANE_COMPUTE, &r.err);
    CHECK(r.compute != NULL);
    CHECK_EQ(slide_launch_cast(r.compute, SLIDE_F32, &cast, &r.err), 0);
    CHECK_EQ(synced(r.compute, &r.err), 0);
    CHECK_EQ(y[1], 2);
    rig_close(&r);
}

/* ---- every call and every allocation fails once ---- */

/* A bit of everything; what came out of it in `out`. */
static int use(struct rig *r, float *out, struct slide_err *err)
{
    static const float in[4] = {1, 2, 3, 4};
    int failed = -1;
    float *memory = slide_device_alloc(r->device, 12 * sizeof *memory, err);
    if (!memory)
        return -1;
    struct slide_gemm gemm = {.a = memory,
                              .b = memory,
                              .out = memory + 4,
                              .lda = 2,
                              .ldb = 2,
                              .ldo = 2,
                              .m = 2,
                              .n = 2,
                              .k = 2,
                              .trans_b = 1};
    struct slide_cast_args cast = {memory + 4, memory + 8, 4, SLIDE_F32, SLIDE_F32};
    if (slide_device_pin(r->device, out, 4 * sizeof *out, err))
        goto end;
    if (slide_zero(r->up, memory, 12 * sizeof *memory, err) ||
        slide_copy(r->up, memory, in, sizeof in, SLIDE_COPY_H2D, err) ||
        slide_event_record(r->event[0], r->up, err) ||
        slide_event_wait(r->event[0], r->compute, err) || slide_gemm(r->compute, &gemm, err) ||
        slide_launch_cast(r->compute, SLIDE_F32, &cast, err) ||
        slide_event_record(r->event[1], r->compute, err) ||
        slide_event_wait(r->event[1], r->down, err) ||
        slide_copy(r->down, out, memory + 8, sizeof in, SLIDE_COPY_D2H, err) ||
        slide_event_record(r->event[2], r->down, err) ||
        slide_event_host_wait(r->event[2], &forever, err) || synced(r->down, err))
        goto unpin;
    failed = 0;
unpin:
    slide_device_unpin(r->device, out, 4 * sizeof *out);
end:
    for (int i = 0; i < 3; i++) { /* nothing may use the memory any more */
        struct slide_lane *lane[] = {r->up, r->compute, r->down};
        slide_device_fail_at(r->device, 0);
        slide_lane_sync(lane[i], &forever, NULL);
    }
    slide_device_free(r->device, memory);
    return failed;
}

static void calls_fail(void)
{
    int n = 1;
    for (bool good = false; !good && n < 100; n++) {
        struct rig r;
        if (!opened(&r))
            return;
        float out[4] = {0};
        struct slide_err err = SLIDE_ERR_INIT;
        uint64_t allocs = slide_device_allocs(r.device), calls = slide_device_calls(r.device);
        CHECK_EQ(calls, 6); /* 3 lanes, 3 events */
        CHECK_EQ(allocs, 0);
        slide_device_fail_at(r.device, (uint64_t)n);
        good = use(&r, out, &err) == 0;
        if (good) {
            CHECK(out[0] == 5 && out[1] == 11 && out[2] == 11 && out[3] == 25);
            CHECK_EQ(slide_device_allocs(r.device), 1);
        } else {
            char text[64];
            snprintf(text, sizeof text, "device call %d fails, as asked", n + 6);
            CHECK_ERR(&err, SLIDE_EDEVICE, text);
        }
        rig_close(&r);
    }
    CHECK_EQ(n, 16); /* 14 calls failed in turn, and then none */
}

static void memory_fails(void)
{
    int n = 1;
    char text[256];
    struct slide_err err = SLIDE_ERR_INIT;
    int none = slide_cpu_blas(NULL, text, sizeof text, &err); /* opened once, and kept */
    if (!CHECK_OK(none, &err))
        return;
    CHECK_HAS(text, "OpenBLAS");
    for (bool good = false; !good && n < 100; n++) {
        struct rig r;
        uint64_t live = slide_mem_live();
        slide_mem_fail_at(n);
        good = rig_open(&r, 2) == 0;
        slide_mem_fail_at(0);
        if (!good)
            CHECK_ERR(&r.err, SLIDE_EMEM, "");
        rig_close(&r);
        CHECK_EQ(slide_mem_live(), live);
    }
    CHECK(n > 10 && n < 100);
    /* A BF16 product needs scratch memory when it runs. */
    struct rig r;
    if (!opened(&r))
        return;
    uint16_t a[4] = {0}, out[4];
    struct slide_gemm gemm = {.a = a,
                              .b = a,
                              .out = out,
                              .lda = 2,
                              .ldb = 2,
                              .ldo = 2,
                              .m = 2,
                              .n = 2,
                              .k = 2,
                              .in_type = SLIDE_BF16,
                              .out_type = SLIDE_BF16};
    slide_mem_fail_at(1);
    CHECK_EQ(slide_gemm(r.compute, &gemm, &r.err), 0);
    CHECK_EQ(synced(r.compute, &r.err), -1);
    slide_mem_fail_at(0);
    CHECK_ERR(&r.err, SLIDE_EMEM, "gemm 2 x 2 x 2");
    rig_close(&r);
    /* So does a long sum, which is cut. */
    if (!opened(&r))
        return;
    float *x = calloc(8192, sizeof *x), y[4];
    gemm = (struct slide_gemm){.a = x,
                               .b = x,
                               .out = y,
                               .lda = 4096,
                               .ldb = 4096,
                               .ldo = 2,
                               .m = 2,
                               .n = 2,
                               .k = 4096,
                               .trans_b = 1};
    slide_mem_fail_at(1);
    CHECK_EQ(slide_gemm(r.compute, &gemm, &r.err), 0);
    CHECK_EQ(synced(r.compute, &r.err), -1);
    slide_mem_fail_at(0);
    CHECK_ERR(&r.err, SLIDE_EMEM, "gemm 2 x 2 x 4096");
    rig_close(&r);
    free(x);
}

static void memory(void)
{
    struct rig r;
    if (!opened(&r))
        return;
    struct slide_device_info info;
    CHECK_EQ(slide_device_info(r.device, &info, &r.err), 0);
    CHECK_HAS(info.name, "2 threads");
    CHECK(info.memory_bytes > 0 && info.free_bytes == UINT64_MAX);
    CHECK_EQ(slide_cpu_backend.count(), 1);
    CHECK_EQ(slide_cpu_backend.available(&r.err), 0);
    unsigned char *p = slide_device_alloc(r.device, 3 << 20, &r.err);
    CHECK(p && (uintptr_t)p % 64 == 0);
    memset(p, 1, 3 << 20);
    slide_device_free(r.device, p);
    slide_device_free(r.device, NULL);
    CHECK(!slide_device_alloc(r.device, SIZE_MAX, &r.err)); /* more than there can be */
    CHECK_ERR(&r.err, SLIDE_EMEM, "no 18446744073709551615 bytes");
    r.err = SLIDE_ERR_INIT;
    CHECK(!slide_device_alloc(r.device, (size_t)1 << 60, &r.err));
    CHECK_ERR(&r.err, SLIDE_EMEM, "");
    CHECK_HAS(r.err.note[0], "bytes on the device");
    r.err = SLIDE_ERR_INIT;
    int none = 0; /* nothing to do is nothing enqueued */
    uint64_t calls = slide_device_calls(r.device);
    CHECK_EQ(copy(r.up, &none, NULL, 0, &r.err) || slide_zero(r.up, NULL, 0, &r.err), 0);
    CHECK_EQ(slide_device_calls(r.device), calls);
    char big[SLIDE_CPU_ARGS + 1] = {0};
    CHECK_EQ(slide_cpu_enqueue(r.up, false, fail, big, sizeof big, &r.err), -1);
    CHECK_ERR(&r.err, SLIDE_ESTATE, "257 bytes");
    rig_close(&r);
}

TEST_MAIN(CASE(order), CASE(pieces), CASE(across_lanes), CASE(across_lanes_jitter),
          CASE(event_rules), CASE(event_two_lanes), CASE(errors), CASE(errors_of_hooks),
          CASE(abandon), CASE(one_compute_lane), CASE(calls_fail), CASE(memory_fails), CASE(memory))
