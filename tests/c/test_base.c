/* base/ but for the segment: errors, heap, number formats, waits, pool, libraries, instruction
 * sets, environment, log, faults. */
#define _GNU_SOURCE 1
#include "test.h"

#include <float.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "base/dl.h"
#include "base/dtype.h"
#include "base/env.h"
#include "base/fault.h"
#include "base/isa.h"
#include "base/log.h"
#include "base/pool.h"
#include "base/sync.h"

static void errors(void)
{
    struct slide_err err = SLIDE_ERR_INIT;
    CHECK_EQ(err.rank, -1);
    CHECK_EQ(slide_err_set(&err, SLIDE_EINVAL, "first %d", 1), -1);
    CHECK_EQ(slide_err_set(&err, SLIDE_EIO, "second"), -1);
    CHECK_EQ(slide_err_os(&err, ENOSPC, "third"), -1);
    CHECK_ERR(&err, SLIDE_EINVAL, "first 1");
    CHECK_EQ(err.os, 0);
    for (int i = 0; i < SLIDE_ERR_NOTES + 2; i++)
        CHECK_EQ(slide_err_note(&err, "note %d", i), -1);
    CHECK_EQ(err.notes, SLIDE_ERR_NOTES);
    CHECK(!strcmp(err.note[SLIDE_ERR_NOTES - 1], "note 3"));

    struct slide_err os = SLIDE_ERR_INIT;
    slide_err_os(&os, ENOSPC, "writing %s", "x");
    CHECK_ERR(&os, SLIDE_EIO, "writing x: No space left on device");
    CHECK_EQ(os.os, ENOSPC);

    CHECK_EQ(slide_err_set(NULL, SLIDE_EIO, "nobody listens"), -1);
    CHECK_EQ(slide_err_os(NULL, EIO, "nobody listens"), -1);
    CHECK_EQ(slide_err_note(NULL, "nobody listens"), -1);
    CHECK(!strcmp(slide_err_name(SLIDE_EMEM), "SLIDE_EMEM"));
    CHECK(!strcmp(slide_err_name(SLIDE_OK), "SLIDE_OK"));
    CHECK(!strcmp(slide_err_name(SLIDE_CODE_COUNT), "SLIDE_?"));

    char text[2 * SLIDE_ERR_TEXT];
    for (size_t length = SLIDE_ERR_TEXT - 2; length < SLIDE_ERR_TEXT + 2; length++) {
        struct slide_err longer = SLIDE_ERR_INIT;
        memset(text, 'x', sizeof text);
        text[length] = '\0';
        slide_err_os(&longer, EIO, "%s", text);
        CHECK_EQ(strlen(longer.text), SLIDE_ERR_TEXT - 1);
        CHECK(!strcmp(longer.text + SLIDE_ERR_TEXT - 4, "..."));
    }
}

static void heap(void)
{
    static const size_t sizes[] = {0, 1, 7, 64, 65, 4099, 1 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        unsigned char *p = slide_mem_new(sizes[i], NULL);
        if (!CHECK(p))
            continue;
        CHECK_EQ((uintptr_t)p % 64, 0);
        unsigned char any = 0;
        for (size_t k = 0; k < sizes[i]; k++)
            any |= p[k];
        CHECK_EQ(any, 0);
        memset(p, 0xff, sizes[i]); /* the next one must not see it */
        slide_mem_free(p);
    }
    slide_mem_free(NULL);

    struct slide_err err = SLIDE_ERR_INIT;
    CHECK(!slide_mem_array(UINT64_MAX / 4, 8, &err));
    CHECK_ERR(&err, SLIDE_EMEM, "elements of 8 bytes");
    if (!TEST_SANITIZED) { /* a sanitizer ends the process there */
        err = SLIDE_ERR_INIT;
        CHECK(!slide_mem_new(SIZE_MAX / 2, &err));
        CHECK_ERR(&err, SLIDE_EMEM, "out of memory");
    }

    char *text = slide_mem_text("a text", NULL);
    CHECK(text && !strcmp(text, "a text"));
    slide_mem_free(text);

    slide_mem_fail_at(3);
    uint64_t live = slide_mem_live();
    void *got[5];
    for (int i = 0; i < 5; i++) {
        got[i] = slide_mem_array(3, 5, NULL);
        CHECK_EQ(got[i] == NULL, i == 2); /* the third alone */
    }
    CHECK_EQ(slide_mem_live(), live + 4);
    for (int i = 0; i < 5; i++)
        slide_mem_free(got[i]);
    slide_mem_fail_at(1);
    slide_mem_fail_at(0);
    got[0] = slide_mem_new(1, NULL);
    CHECK(got[0]);
    slide_mem_free(got[0]);
}

/* The definition, in float64 where all candidates are exact: the nearest of the finite FP16 values
 * and 2^16 (which stands for infinity), the even one of two. */
static uint16_t f16_nearest(float x)
{
    double magnitude = fabs((double)x), best = INFINITY;
    uint32_t low = 0, high = 0x7c00;
    while (high - low > 1) { /* the last value that is not above */
        uint32_t middle = (low + high) / 2;
        *((slide_f16_to_f32((uint16_t)middle) <= magnitude) ? &low : &high) = middle;
    }
    uint32_t nearest = 0;
    for (uint32_t i = low; i <= low + 1 && i <= 0x7c00; i++) {
        double value = i == 0x7c00 ? 65536.0 : (double)slide_f16_to_f32((uint16_t)i);
        double away = fabs(value - magnitude);
        if (away < best || (away == best && i % 2 == 0)) {
            best = away;
            nearest = i;
        }
    }
    return (uint16_t)(nearest | (signbit(x) ? 0x8000 : 0));
}

static void f16_formats(void)
{
    int wrong = 0;
    for (uint32_t i = 0; i < 0x10000; i++) {
        uint16_t x = (uint16_t)i;
        float f = slide_f16_to_f32(x);
        int exponent = x >> 10 & 31, mantissa = x & 0x3ff;
        double expected = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
        if (exponent == 31)
            wrong += mantissa ? !isnan(f) : !isinf(f);
        else
            wrong += fabs((double)f) != expected;
        wrong += !signbit(f) != !(x & 0x8000);
        wrong += exponent == 31 && mantissa ? slide_f32_to_f16(f) != (x | 0x200)
                                            : slide_f32_to_f16(f) != x;
        /* Around the value and half way to the next one, a bit less and a bit more. */
        if (exponent == 31)
            continue;
        float next = exponent == 30 && mantissa == 0x3ff ? copysignf(65536.0f, f)
                                                         : slide_f16_to_f32((uint16_t)(x + 1));
        const float near[] = {f, 0.5f * (f + next)};
        for (int k = 0; k < 2; k++)
            for (int step = -1; step <= 1; step++) {
                uint32_t bits = slide_f32_bits(near[k]);
                if ((bits & 0x7fffffff) == 0 && step < 0)
                    continue;
                float y = slide_f32_from_bits(bits + (uint32_t)step);
                wrong += slide_f32_to_f16(y) != f16_nearest(y);
            }
    }
    CHECK_EQ(wrong, 0);

    uint64_t state = test_seed;
    for (int i = 0; i < 100000; i++) {
        float y = slide_f32_from_bits((uint32_t)(test_random(&state) >> 32));
        if (!isnan(y) && !isinf(y))
            wrong += slide_f32_to_f16(y) != f16_nearest(y);
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(slide_f32_to_f16(INFINITY), 0x7c00);
    CHECK_EQ(slide_f32_to_f16(-INFINITY), 0xfc00);
    CHECK_EQ(slide_f32_to_f16(slide_f32_from_bits(0x7f800001)), 0x7e00); /* stays a NaN */
    CHECK_EQ(slide_f32_to_f16(0x1p-25f), 0);
    CHECK_EQ(slide_f32_to_f16(65520.0f), 0x7c00);
}

static void bf16_and_master(void)
{
    static const uint32_t low[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    uint64_t state = test_seed;
    int wrong = 0;
    for (uint32_t high = 0; high < 0x10000; high++) {
        if ((high & 0x7f80) == 0x7f80)
            continue; /* only finite values */
        for (size_t k = 0; k <= sizeof low / sizeof low[0]; k++) {
            uint32_t rest =
                k < sizeof low / sizeof low[0] ? low[k] : (uint32_t)test_random(&state) & 0xffff;
            uint32_t bits = high << 16 | rest;
            uint16_t hi = slide_master_hi(bits);
            uint16_t even = slide_f32_to_bf16(slide_f32_from_bits(bits));
            wrong += slide_master_bits(hi, slide_master_lo(bits)) != bits;
            wrong += hi != high + (rest >= 0x8000);
            wrong += even != high + (rest > 0x8000 || (rest == 0x8000 && high % 2));
        }
        wrong += slide_f32_bits(slide_bf16_to_f32((uint16_t)high)) != high << 16;
    }
    CHECK_EQ(wrong, 0);
    CHECK(isnan(slide_bf16_to_f32(slide_f32_to_bf16(slide_f32_from_bits(0x7f800001)))));
    CHECK(isinf(slide_bf16_to_f32(slide_f32_to_bf16(INFINITY))));
    for (int d = 0; d < SLIDE_DTYPE_COUNT; d++)
        CHECK_EQ(slide_dtype_size((enum slide_dtype)d), d == SLIDE_F32 || d == SLIDE_I32 ? 4 : 2);
}

/* ---- waits ---- */

static int stop_at_third(void *arg, struct slide_err *err)
{
    return ++*(int *)arg == 3 ? slide_err_set(err, SLIDE_EINTR, "stopped") : 0;
}

static void waits(void)
{
    slide_word word = 7, abort_word = 0;
    struct slide_err err = SLIDE_ERR_INIT;
    CHECK_EQ(slide_word_get(&word), 7);
    CHECK_EQ(slide_word_add(&word, 3), 10);
    CHECK_OK(slide_wait_reach(&word, 10, NULL, "x", &err), &err);
    CHECK_OK(slide_wait_reach(&word, 3, NULL, "x", &err), &err);
    CHECK_OK(slide_wait_change(&word, 9, NULL, "x", &err), &err);
    slide_word_set(&word, 2); /* past the wrap */
    CHECK_OK(slide_wait_reach(&word, 0xfffffff0u, NULL, "x", &err), &err);

    struct slide_waiter waiter = {.abort = &abort_word, .deadline = 0.12};
    double start = slide_time();
    CHECK_EQ(slide_wait_reach(&word, 3, &waiter, "the third thing", &err), -1);
    CHECK_ERR(&err, SLIDE_ETIME, "waiting for the third thing");
    CHECK(slide_time() - start >= 0.12);
    err = SLIDE_ERR_INIT;
    CHECK_EQ(slide_wait_change(&word, 2, &waiter, "a change", &err), -1);
    CHECK_ERR(&err, SLIDE_ETIME, "waiting for a change");

    int polls = 0;
    err = SLIDE_ERR_INIT;
    waiter = (struct slide_waiter){.poll = stop_at_third, .arg = &polls};
    CHECK_EQ(slide_wait_reach(&word, 3, &waiter, "long", &err), -1);
    CHECK_ERR(&err, SLIDE_EINTR, "stopped");
    CHECK_EQ(polls, 3);

    err = SLIDE_ERR_INIT;
    abort_word = 1;
    waiter = (struct slide_waiter){.abort = &abort_word};
    CHECK_OK(slide_wait_reach(&word, 2, &waiter, "x", &err), &err); /* what is there is there */
    CHECK_EQ(slide_wait_reach(&word, 3, &waiter, "unit 4", &err), -1);
    CHECK_ERR(&err, SLIDE_EPEER, "waiting for unit 4: another rank has failed");
}

struct ping {
    slide_word there, back;
    int plain; /* ordered by the words alone */
    int rounds;
};

static void *ping_thread(void *arg)
{
    struct ping *ping = arg;
    for (int i = 1; i <= ping->rounds; i++) {
        if (slide_wait_reach(&ping->there, (uint32_t)i, NULL, "ping", NULL))
            break;
        ping->plain++;
        slide_word_add(&ping->back, 1);
    }
    return NULL;
}

static void ping_pong(struct ping *ping)
{
    for (int i = 1; i <= ping->rounds; i++) {
        ping->plain++;
        slide_word_set(&ping->there, (uint32_t)i);
        struct slide_err err = SLIDE_ERR_INIT;
        struct slide_waiter waiter = {.deadline = 60};
        if (!CHECK_OK(slide_wait_reach(&ping->back, (uint32_t)i, &waiter, "pong", &err), &err))
            return;
    }
    CHECK_EQ(ping->plain, 2 * ping->rounds);
}

static void waits_between_threads(void)
{
    struct ping ping = {.rounds = 1000};
    pthread_t thread;
    if (!CHECK(!pthread_create(&thread, NULL, ping_thread, &ping)))
        return;
    ping_pong(&ping);
    pthread_join(thread, NULL);
}

static void waits_between_processes(void)
{
    struct ping *ping =
        mmap(NULL, sizeof *ping, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!CHECK(ping != MAP_FAILED))
        return;
    ping->rounds = 200;
    pid_t child = fork();
    if (!child) {
        ping_thread(ping);
        _exit(0);
    }
    ping_pong(ping);
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    munmap(ping, sizeof *ping);
}

/* ---- pool ---- */

struct tally {
    int threads;
    unsigned char *count; /* [n], written plainly: each by one thread */
    _Atomic int bad;
};

static void tally_one(void *ctx, int64_t i, int worker)
{
    struct tally *tally = ctx;
    tally->count[i]++;
    if (worker < 0 || worker >= tally->threads)
        tally->bad++;
}

static void pool_loops(void)
{
    static const int threads[] = {1, 2, 3, 8};
    static const int64_t sizes[] = {0, 1, 2, 7, 8, 9, 65, 1009};
    static unsigned char count[1009];
    for (size_t t = 0; t < sizeof threads / sizeof threads[0]; t++) {
        struct slide_err err = SLIDE_ERR_INIT;
        struct slide_pool *pool = slide_pool_new(threads[t], NULL, 0, &err);
        if (!CHECK(pool))
            return;
        CHECK_EQ(slide_pool_threads(pool), threads[t]);
        for (int round = 0; round < 60; round++)
            for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
                struct tally tally = {.threads = threads[t], .count = count};
                memset(count, 0, sizeof count);
                slide_pool_for(pool, sizes[s], tally_one, &tally);
                int wrong = 0;
                for (int64_t i = 0; i < (int64_t)sizeof count; i++)
                    wrong += count[i] != (i < sizes[s]);
                CHECK_EQ(wrong, 0);
                CHECK_EQ(tally.bad, 0);
            }
        slide_pool_free(pool);
    }
}

static void pool_edges(void)
{
    struct slide_err err = SLIDE_ERR_INIT;
    slide_pool_free(NULL);
    CHECK(!slide_pool_new(0, NULL, 0, &err));
    CHECK_ERR(&err, SLIDE_EINVAL, "at least 1 thread");
    err = SLIDE_ERR_INIT;
    CHECK(!slide_pool_new(2, (const int[]){-1}, 1, &err));
    CHECK_ERR(&err, SLIDE_EINVAL, "no CPU -1");
    err = SLIDE_ERR_INIT;
    CHECK(!slide_pool_new(3, (const int[]){16000}, 1, &err));
    CHECK_ERR(&err, SLIDE_EIO, "on CPU 16000");

    for (int i = 0; i < 100; i++) /* ended before its workers have begun */
        slide_pool_free(slide_pool_new(4, NULL, 0, NULL));

    int failures = 0;
    for (int n = 1;; n++) {
        slide_mem_fail_at(n);
        err = SLIDE_ERR_INIT;
        struct slide_pool *pool = slide_pool_new(3, NULL, 0, &err);
        slide_mem_fail_at(0);
        if (pool) {
            slide_pool_free(pool);
            break;
        }
        CHECK_ERR(&err, SLIDE_EMEM, "out of memory");
        failures++;
    }
    CHECK_EQ(failures, 2);
}

static void note_cpu(void *ctx, int64_t i, int worker)
{
    (void)i;
    cpu_set_t set;
    if (worker && !sched_getaffinity(0, sizeof set, &set))
        ((int *)ctx)[worker] = CPU_COUNT(&set) == 1 ? sched_getcpu() : -2;
    usleep(1000); /* let others take an index */
}

static void pool_binding(void)
{
    int cpus[1024];
    int count = slide_pool_cpus(cpus, 1024);
    CHECK(count >= 1);
    CHECK_EQ(slide_pool_cpus(NULL, 0), count);
    int where[3] = {-1, -1, -1};
    struct slide_pool *pool = slide_pool_new(3, cpus, count, NULL);
    if (!CHECK(pool))
        return;
    slide_pool_for(pool, 64, note_cpu, where);
    slide_pool_free(pool);
    for (int i = 1; i < 3; i++)
        if (where[i] != -1) /* a worker that woke too late says nothing */
            CHECK_EQ(where[i], cpus[i % count]);
}

static void nothing(void *ctx, int64_t i, int worker)
{
    (void)ctx, (void)i, (void)worker;
}

/* Says what a loop of tiny work costs; asserts only that thousands of them end. */
static void pool_cost(void)
{
    struct slide_pool *pool = slide_pool_new(2, NULL, 0, NULL);
    if (!CHECK(pool))
        return;
    double start = slide_time();
    for (int i = 0; i < 5000; i++)
        slide_pool_for(pool, 4, nothing, NULL);
    double each = (slide_time() - start) / 5000;
    slide_pool_free(pool);
    CHECK(each > 0);
    if (getenv("TEST_VERBOSE"))
        printf("a loop of 4 empty pieces on 2 threads: %.2f us\n", each * 1e6);
}

/* ---- the rest ---- */

static void libraries(void)
{
    double (*cosine)(double) = NULL;
    int (*lacking)(void) = NULL;
    char found[64];
    const struct slide_dl_symbol good[] = {{"cos", (void **)&cosine}};
    const struct slide_dl_symbol bad[] = {{"cos", (void **)&cosine},
                                          {"slide_no_such_symbol", (void **)&lacking}};
    struct slide_err err = SLIDE_ERR_INIT;

    void *handle = slide_dl_open((const char *const[]){"", "libslide-none.so.9", "libm.so.6", NULL},
                                 good, 1, found, sizeof found, &err);
    if (CHECK(handle && cosine)) {
        CHECK(!strcmp(found, "libm.so.6"));
        CHECK(cosine(0.0) == 1.0);
    }
    slide_dl_close(handle);
    slide_dl_close(NULL);

    cosine = NULL;
    CHECK(!slide_dl_open((const char *const[]){"libslide-none.so.9", "libm.so.6", NULL}, bad, 2,
                         found, sizeof found, &err));
    CHECK_ERR(&err, SLIDE_EIO, "libm.so.6 (it has no symbol slide_no_such_symbol)");
    CHECK_HAS(err.text, "libslide-none.so.9 (");
    CHECK(!cosine);
    err = SLIDE_ERR_INIT;
    CHECK(!slide_dl_open((const char *const[]){NULL}, good, 1, NULL, 0, &err));
    CHECK_ERR(&err, SLIDE_EIO, "tried: nothing");
}

static int in_child(int (*fn)(void))
{
    pid_t child = fork();
    if (!child)
        _exit(fn());
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

static int child_isa_base(void)
{
    setenv("SLIDE_ISA", "base", 1);
    return slide_isa_get() != SLIDE_ISA_BASE;
}

static int child_isa_bad(void)
{
    setenv("SLIDE_LOG", "0", 1);
    setenv("SLIDE_ISA", "sse9", 1);
    return slide_isa_get() != slide_isa_best();
}

static void instruction_sets(void)
{
    struct slide_err err = SLIDE_ERR_INIT;
    for (int i = 0; i < SLIDE_ISA_COUNT; i++) {
        enum slide_isa isa = SLIDE_ISA_COUNT;
        CHECK_OK(slide_isa_parse(slide_isa_name((enum slide_isa)i), &isa, &err), &err);
        CHECK_EQ(isa, i);
    }
    enum slide_isa isa;
    CHECK_EQ(slide_isa_parse("sse9", &isa, &err), -1);
    CHECK_ERR(&err, SLIDE_EINVAL, "\"sse9\"");
    CHECK(!strcmp(slide_isa_name(SLIDE_ISA_COUNT), "?"));
    CHECK_EQ(in_child(child_isa_base), 0);
    CHECK_EQ(in_child(child_isa_bad), 0);
    CHECK(slide_isa_get() <= slide_isa_best());
}

static void environment(void)
{
    int count;
    const struct slide_env_entry *list = slide_env_list(&count);
    CHECK(count >= 5);
    for (int i = 0; i < count; i++) {
        CHECK(!strncmp(list[i].name, "SLIDE_", 6) && *list[i].meaning);
        unsetenv(list[i].name);
        CHECK(!strcmp(slide_env_get(list[i].name), list[i].fallback));
    }
    CHECK_EQ(slide_env_int("SLIDE_LOG"), 1);
    setenv("SLIDE_LOG", "", 1);
    CHECK_EQ(slide_env_int("SLIDE_LOG"), 1);
    setenv("SLIDE_LOG", "3x", 1);
    CHECK_EQ(slide_env_int("SLIDE_LOG"), 1);
    setenv("SLIDE_LOG", "0", 1);
    CHECK_EQ(slide_env_int("SLIDE_LOG"), 0);
    setenv("SLIDE_JITTER", "many", 1);
    CHECK_EQ(slide_env_int("SLIDE_JITTER"), 0);
    unsetenv("SLIDE_JITTER");
    unsetenv("SLIDE_LOG");
    CHECK(!strcmp(slide_env_get("SLIDE_UNHEARD_OF"), ""));
}

/* What the log writes at a level of SLIDE_LOG, into text. */
static void capture(const char *level, char *text, size_t size)
{
    int ends[2];
    text[0] = '\0';
    if (!CHECK(!pipe(ends)))
        return;
    pid_t child = fork();
    if (!child) {
        dup2(ends[1], STDERR_FILENO);
        setenv("SLIDE_LOG", level, 1);
        char more[3000];
        memset(more, 'y', sizeof more);
        more[sizeof more - 1] = '\0';
        slide_log(1, SLIDE_LOG_WARN, "too %s", "warm");
        slide_log(-1, SLIDE_LOG_INFO, "news");
        slide_log(12, SLIDE_LOG_DEBUG, "%s", more);
        setenv("SLIDE_JITTER", "q", 1);
        slide_env_int("SLIDE_JITTER");
        _exit(0);
    }
    close(ends[1]);
    size_t used = 0;
    ssize_t got;
    while ((got = read(ends[0], text + used, size - 1 - used)) > 0)
        used += (size_t)got;
    text[used] = '\0';
    close(ends[0]);
    waitpid(child, NULL, 0);
}

static void log_lines(void)
{
    char text[4096];
    capture("0", text, sizeof text);
    CHECK(!*text);
    capture("1", text, sizeof text);
    CHECK(!strcmp(text, "[slidedp rank 1] warning: too warm\n[slidedp] warning: SLIDE_JITTER=q is "
                        "not a whole number; the default, \"0\", is used\n"));
    capture("3", text, sizeof text);
    CHECK_HAS(text, "\n[slidedp] info: news\n[slidedp rank 12] debug: yyy");
    CHECK_HAS(text, "yyy...\n[slidedp] warning: SLIDE_JITTER");
}

static int child_kill(void)
{
    setenv("SLIDE_FAULT", "update:2:kill:2", 1);
    struct slide_err err = SLIDE_ERR_INIT;
    if (slide_fault("update", 2, &err))
        return 1;
    slide_fault("update", 2, &err);
    return 2;
}

static void faults(void)
{
    struct slide_err err = SLIDE_ERR_INIT;
    unsetenv("SLIDE_FAULT");
    CHECK_OK(slide_fault("forward", 0, &err), &err);

    for (int again = 0; again < 2; again++) { /* unset and set, it counts anew */
        setenv("SLIDE_FAULT", "forward:1:error:3", 1);
        for (int i = 1; i <= 5; i++) {
            err = SLIDE_ERR_INIT;
            CHECK_OK(slide_fault("forward", 0, &err), &err);
            CHECK_OK(slide_fault("backward", 1, &err), &err);
            CHECK_EQ(slide_fault("forward", 1, &err), i == 3 ? -1 : 0);
            CHECK_EQ(err.code, i == 3 ? SLIDE_EDEVICE : SLIDE_OK);
        }
        unsetenv("SLIDE_FAULT");
        CHECK_OK(slide_fault("forward", 1, &err), &err);
    }
    err = SLIDE_ERR_INIT;
    setenv("SLIDE_FAULT", "save:0:error", 1);
    CHECK_EQ(slide_fault("save", 0, &err), -1);
    CHECK_ERR(&err, SLIDE_EDEVICE, "stage save");

    bool spoil = true;
    float value = 0;
    setenv("SLIDE_FAULT", "chunk:1:inf:2", 1);
    for (int i = 1; i <= 3; i++) {
        CHECK_OK(slide_fault_value("chunk", 1, &spoil, &value, &err), &err);
        CHECK_EQ(spoil, i == 2);
    }
    CHECK(value > FLT_MAX);
    setenv("SLIDE_FAULT", "chunk:0:nan", 1);
    CHECK_OK(slide_fault_value("chunk", 0, &spoil, &value, &err), &err);
    CHECK(spoil && value != value);

    static const char *const bad[] = {
        "x",
        "backward:0:inf",
        "forward",
        "forward:0",
        "forward:0:explode",
        "sleep:0:kill",
        "forward:a:kill",
        "forward:-1:kill",
        "forward:0:kill:0",
        "forward:0:kill:x",
        "forward:0:kill:1:1",
        ":::",
        "forward:0:kill:",
        "forward:0:error:111111111111111111111111111111111111111111111111111111"
        "11111111111111111111111111111111111111111111111111111111111111111111111111"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        err = SLIDE_ERR_INIT;
        setenv("SLIDE_FAULT", bad[i], 1);
        CHECK_EQ(slide_fault("forward", 0, &err), -1);
        CHECK_ERR(&err, SLIDE_EINVAL, "expected STAGE:RANK:ACTION[:N]");
    }
    unsetenv("SLIDE_FAULT");
    CHECK_EQ(in_child(child_kill), SIGKILL);

    pid_t child = fork();
    if (!child) {
        setenv("SLIDE_FAULT", "load:0:stop", 1);
        _exit(slide_fault("load", 0, NULL));
    }
    int status;
    CHECK_EQ(waitpid(child, &status, WUNTRACED), child);
    CHECK(WIFSTOPPED(status));
    kill(child, SIGCONT);
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);

    setenv("SLIDE_JITTER", "5", 1);
    err = SLIDE_ERR_INIT;
    for (int i = 0; i < 20; i++)
        CHECK_OK(slide_fault("forward", 0, &err), &err);
    unsetenv("SLIDE_JITTER");
}

TEST_MAIN(CASE(errors), CASE(heap), CASE(f16_formats), CASE(bf16_and_master), CASE(waits),
          CASE(waits_between_threads), CASE(waits_between_processes), CASE(pool_loops),
          CASE(pool_edges), CASE(pool_binding), CASE(pool_cost), CASE(libraries),
          CASE(instruction_sets), CASE(environment), CASE(log_lines), CASE(faults))
