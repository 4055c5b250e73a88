/* A thread of ours. It takes no signals but those of its own faults: the others belong to the
 * threads of the caller's program.
 * Threads: one owner. Blocks: join, until the thread's function has returned. */
#ifndef SLIDE_BASE_THREAD_H
#define SLIDE_BASE_THREAD_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>

#include "err.h"

struct slide_thread { /* zeroed: not started */
    pthread_t id;
    bool runs;
};

/* `what` names it in the error. */
int slide_thread_start(struct slide_thread *thread, void *(*run)(void *), void *arg,
                       const char *what, struct slide_err *err);
/* Nothing where it was not started. */
void slide_thread_join(struct slide_thread *thread);

/* Blocks those signals in the calling thread, for what it starts inherits that; *before: for
 * pthread_sigmask(SIG_SETMASK). */
void slide_thread_block_signals(sigset_t *before);

#endif
