/* The futex system call, for sync.c and pool.c. Words may lie in memory that processes share, so
 * the private flag is the caller's choice.
 * Threads: any. Blocks: futex_wait, until woken, the time is over, or a signal. */
#ifndef SLIDE_BASE_FUTEX_H
#define SLIDE_BASE_FUTEX_H

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__) || defined(__i386__)
#define slide_relax() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define slide_relax() __asm__ volatile("yield" ::: "memory")
#else
#define slide_relax() ((void)0)
#endif

/* Sleeps if *word is still `value`; returns for any reason, the caller looks again. */
static inline void slide_futex_wait(_Atomic uint32_t *word, uint32_t value, int flags,
                                    const struct timespec *time)
{
    syscall(SYS_futex, word, FUTEX_WAIT | flags, value, time, NULL, 0);
}

static inline void slide_futex_wake(_Atomic uint32_t *word, int count, int flags)
{
    syscall(SYS_futex, word, FUTEX_WAKE | flags, count, NULL, NULL, 0);
}

#endif
