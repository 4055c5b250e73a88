/* Which instruction set the hot loops use. Decided once a process, so that a run can't change its
 * mind half way; every set gives the same bits, so SLIDE_ISA is for tests and for finding a fault.
 * The sets must match the flags of csrc/isa.flags.
 * Called by optim/ and cpu/ when they choose a table of loops. */
#include "isa.h"

#include <pthread.h>
#include <string.h>

#include "env.h"
#include "log.h"

static const char *const names[SLIDE_ISA_COUNT] = {
    [SLIDE_ISA_BASE] = "base",
    [SLIDE_ISA_AVX2] = "avx2",
    [SLIDE_ISA_AVX512] = "avx512",
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static enum slide_isa chosen;

enum slide_isa slide_isa_best(void)
{
#if defined(__x86_64__)
    /* These ask the system as well: registers that it doesn't save don't count. */
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        return SLIDE_ISA_BASE;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return SLIDE_ISA_AVX512;
    return SLIDE_ISA_AVX2;
#else
    return SLIDE_ISA_BASE;
#endif
}

const char *slide_isa_name(enum slide_isa isa)
{
    return (unsigned)isa < SLIDE_ISA_COUNT ? names[isa] : "?";
}

int slide_isa_parse(const char *name, enum slide_isa *isa, struct slide_err *err)
{
    for (int i = 0; i < SLIDE_ISA_COUNT; i++)
        if (!strcmp(name, names[i])) {
            *isa = (enum slide_isa)i;
            return 0;
        }
    return slide_err_set(err, SLIDE_EINVAL,
                         "unknown instruction set \"%s\": there are base, avx2 and avx512", name);
}

static void choose(void)
{
    enum slide_isa wanted = SLIDE_ISA_BASE, best = slide_isa_best();
    const char *name = slide_env_get("SLIDE_ISA");
    struct slide_err err = SLIDE_ERR_INIT;
    chosen = best;
    if (!*name)
        return;
    if (slide_isa_parse(name, &wanted, &err))
        slide_log(-1, SLIDE_LOG_WARN, "SLIDE_ISA: %s; %s is used", err.text, names[best]);
    else if (wanted > best)
        slide_log(-1, SLIDE_LOG_WARN, "SLIDE_ISA=%s: this machine has %s at most", name,
                  names[best]);
    else
        chosen = wanted;
}

enum slide_isa slide_isa_get(void)
{
    pthread_once(&once, choose);
    return chosen;
}
