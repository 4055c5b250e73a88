/* Starts threads with signals blocked. Called by whoever has a thread: lanes, routes, updates, the
 * watch, the pool. */
#include "base/thread.h"

void slide_thread_block_signals(sigset_t *before)
{
    sigset_t all;
    sigfillset(&all);
    static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        sigdelset(&all, own[i]);
    pthread_sigmask(SIG_SETMASK, &all, before);
}

int slide_thread_start(struct slide_thread *thread, void *(*run)(void *), void *arg,
                       const char *what, struct slide_err *err)
{
    sigset_t before;
    slide_thread_block_signals(&before);
    int failed = pthread_create(&thread->id, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    thread->runs = !failed;
    return failed ? slide_err_os(err, failed, "%s", what) : 0;
}

void slide_thread_join(struct slide_thread *thread)
{
    if (thread->runs)
        pthread_join(thread->id, NULL);
    thread->runs = false;
}
