/* The harness of the C tests. A test file ends in
 *     TEST_MAIN(CASE(name), CASE(other))
 * where each is `static void name(void)`. Arguments pick the cases whose names contain one of them.
 * A case fails when a CHECK did, or when allocations of the library outlive it.
 * TEST_SEED repeats a random run. A test that hangs is ended by SIGALRM.
 * Threads: checks from any. Blocks: never. */
#ifndef SLIDE_TESTS_TEST_H
#define SLIDE_TESTS_TEST_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/err.h"
#include "base/mem.h"

#define TEST_SECONDS 300

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TEST_SANITIZED 1
#else
#define TEST_SANITIZED 0
#endif

struct test_case {
    const char *name;
    void (*run)(void);
};

static _Atomic int test_checks, test_failures;
static uint64_t test_seed;

static inline bool test_check(bool good, const char *file, int line, const char *text)
{
    atomic_fetch_add(&test_checks, 1);
    if (good)
        return true;
    atomic_fetch_add(&test_failures, 1);
    fprintf(stderr, "%s:%d: failed: %s\n", file, line, text);
    return false;
}

static inline bool test_check_eq(long long a, long long b, const char *file, int line,
                                 const char *text)
{
    char full[512];
    snprintf(full, sizeof full, "%s: %lld and %lld (%#llx and %#llx)", text, a, b, a, b);
    return test_check(a == b, file, line, full);
}

static inline bool test_check_has(const char *text, const char *part, const char *file, int line)
{
    char full[2048];
    snprintf(full, sizeof full, "\"%.800s\" is in \"%.1200s\"", part, text);
    return test_check(strstr(text, part) != NULL, file, line, full);
}

static inline bool test_check_err(const struct slide_err *err, enum slide_code code,
                                  const char *part, const char *file, int line)
{
    char full[2048];
    snprintf(full, sizeof full, "an error %s with \"%s\"; found %s: %s", slide_err_name(code), part,
             slide_err_name(err->code), err->text);
    return test_check(err->code == code && strstr(err->text, part), file, line, full);
}

/* Each is an expression: true when it held. */
#define CHECK(condition) test_check(!!(condition), __FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b)                                                                             \
    test_check_eq((long long)(a), (long long)(b), __FILE__, __LINE__, #a " == " #b)
#define CHECK_HAS(text, part) test_check_has(text, part, __FILE__, __LINE__)
#define CHECK_ERR(err, code, part) test_check_err(err, code, part, __FILE__, __LINE__)
#define CHECK_OK(call, err)                                                                        \
    test_check((call) == 0, __FILE__, __LINE__, (err)->code ? (err)->text : #call)

/* xorshift64*: the same numbers everywhere. */
static inline uint64_t test_random(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 0x2545f4914f6cdd1dull;
}

static inline bool test_wanted(const char *name, int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strstr(name, argv[i]))
            return true;
    return argc < 2;
}

static inline int test_main(const struct test_case *cases, int count, int argc, char **argv)
{
    const char *seed = getenv("TEST_SEED"), *slash = strrchr(argv[0], '/');
    test_seed =
        seed ? strtoull(seed, NULL, 10) : (uint64_t)time(NULL) * 1000003u + (uint64_t)getpid();
    test_seed += !test_seed; /* the generator stands still on 0 */
    alarm(TEST_SECONDS);
    int ran = 0;
    for (int i = 0; i < count; i++) {
        if (!test_wanted(cases[i].name, argc, argv))
            continue;
        int before = atomic_load(&test_failures);
        uint64_t live = slide_mem_live();
        cases[i].run();
        if (slide_mem_live() != live) {
            fprintf(stderr, "%lld allocations are left\n", (long long)(slide_mem_live() - live));
            atomic_fetch_add(&test_failures, 1);
        }
        if (atomic_load(&test_failures) != before)
            fprintf(stderr, "FAILED: %s\n", cases[i].name);
        ran++;
    }
    printf("%-14s %3d cases, %7d checks, %d failed (TEST_SEED=%llu)\n", slash ? slash + 1 : argv[0],
           ran, atomic_load(&test_checks), atomic_load(&test_failures),
           (unsigned long long)test_seed);
    return atomic_load(&test_failures) || !ran;
}

#define CASE(function) {#function, function}
#define TEST_MAIN(...)                                                                             \
    int main(int argc, char **argv)                                                                \
    {                                                                                              \
        static const struct test_case cases[] = {__VA_ARGS__};                                     \
        return test_main(cases, (int)(sizeof cases / sizeof cases[0]), argc, argv);                \
    }

#endif
